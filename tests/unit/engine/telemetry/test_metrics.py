"""The numbers of a step, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from engine.telemetry import metrics
from engine.types import Boundary, Group, RolloutError, StopReason
from tests.support.fakes import a_prompt, a_trajectory, a_use

ERROR = RolloutError(boundary=Boundary.SANDBOX, message="lost")


def group(trajectories, lease=0, **options):
    return Group(prompt=a_prompt(lease), trajectories=tuple(trajectories), lease=lease, **options)


def test_the_queue_and_the_run_of_a_call_are_told_apart_where_a_tool_measures_them():
    uses = [replace(a_use(took=0.5), queue_s=0.4), replace(a_use(took=0.3), queue_s=0.2), a_use(took=9.0)]
    found = metrics.step([group([a_trajectory(0, reward=1.0, uses=uses)], kept=(0,))], version=1)
    assert found["tools/queue_p50_ms"] == pytest.approx(300.0)
    assert found["tools/run_p50_ms"] == pytest.approx(100.0), "the call that was not measured is in neither"
    unmeasured = metrics.step([group([a_trajectory(0, reward=1.0, uses=[a_use()])], kept=(0,))], version=1)
    assert not [name for name in unmeasured if "queue" in name or name.startswith("tools/run")]


def test_a_step_by_hand():
    ok, bad, refused = a_use("ok", took=0.1), a_use("timeout", at=1.0, took=0.3), a_use("malformed", executed=False)
    trained = group(
        [
            a_trajectory(0, reward=1.0, sampled=10, version=4, uses=[ok, bad]),
            a_trajectory(1, reward=0.0, sampled=20, version=5, uses=[refused]),
            a_trajectory(2, reward=1.0, sampled=30, version=5, stop=StopReason.LENGTH),
        ],
        kept=(0, 1),
    )
    flat = group([a_trajectory(0, reward=0.0, sampled=40, stop=StopReason.DEADLINE)], 1, drop="flat")
    failed = group([a_trajectory(0, sampled=50, stop=StopReason.ERROR, error=ERROR)], 2, drop="error")
    trained, flat = replace(trained, waste={"surplus": 7, "flat": 5}, refills=1), replace(flat, refills=2)
    found = metrics.step([trained, flat, failed], version=5)
    wanted = {
        "reward": 0.5,
        "tools/error_share_correct": 0.5,
        "tools/error_share": 2 / 3,
        "tools/rate": 0.5,
        "rollout/response_tokens": 30.0,
        "rollout/trajectories": 5,
        "rollout/trajectories_trained": 2,
        "rollout/trajectories_failed": 1,
        "stop/answer": 2,
        "stop/length": 1,
        "stop/turns": 0,
        "stop/deadline": 1,
        "stop/error": 1,
        "groups/all": 3,
        "groups/solved": 0,
        "groups/flat": 1,
        "groups/error": 1,
        "groups/refilled": 3,
        "tokens/generated": 162,
        "tokens/trained": 30,
        "tokens/goodput": 30 / 162,
        "waste/flat_tokens": 45,
        "waste/error_tokens": 50,
        "waste/surplus_tokens": 7,
        "waste/not_selected_tokens": 30,
        "rollout/staleness_mean": 0.5,
        "rollout/staleness_max": 1,
        "rollout/prefix_hit_rate": 5 / 15,
        "replicas/token_ms/0": 1e3 * 5 / 150,  # five turns of a second each
        "tools/calls": 2,
        "tools/calls_refused": 1,
        "tools/calls_jailed": 2,
        "tools/latency_p50_ms": 200.0,
        "tools/latency_p99_ms": 298.0,
        "tools/overlap_saved_ms": 1e3 * (0.05 + 0.15) / 2,
        "tools/wait/python_s": 0.3,  # its turn was over after 1.0
    }
    assert found == pytest.approx(wanted)


def test_generated_tokens_are_trained_or_wasted_for_a_reason():
    members = [a_trajectory(n, reward=1.0, sampled=n + 1, error=ERROR if n == 2 else None) for n in range(4)]
    groups = [group(members, kept=(1, 3), waste={"superseded": 20}), group(members, 1, drop="easy")]
    found = metrics.step(groups, 0)
    waste = {name: value for name, value in found.items() if name.startswith("waste/") and value}
    assert waste == {
        "waste/not_selected_tokens": 1,
        "waste/error_tokens": 3,
        "waste/superseded_tokens": 20,
        "waste/easy_tokens": 10,
    }
    assert (found["tokens/trained"], found["tokens/generated"]) == (6, 40)


def test_a_step_in_which_everything_failed_is_measured_too():
    found = metrics.step([group([a_trajectory(error=ERROR)], drop="error")], 3)
    assert (found["tokens/goodput"], found["rollout/trajectories_failed"]) == (0.0, 1)
    unknown = ("reward", "tools/rate", "tools/error_share_correct", "tools/latency_p50_ms", "rollout/staleness_max")
    assert not found.keys() & set(unknown), "a figure that could not be measured is a gap, never a 0"
    assert metrics.is_step(found)


def test_a_trained_trajectory_that_sampled_nothing_has_no_staleness():
    """Its deadline passed before its first token."""
    empty = replace(a_trajectory(0, reward=0.0, sampled=0, stop=StopReason.DEADLINE), turns=())
    found = metrics.step([group([empty, a_trajectory(1, reward=1.0, version=1)], kept=(0, 1))], 2)
    assert (found["rollout/staleness_mean"], found["rollout/staleness_max"]) == (1.0, 1)


def test_a_group_is_solved_when_it_is_flat_with_the_full_reward():
    def flat(*rewards, drop="flat"):
        return group([a_trajectory(n, reward=reward) for n, reward in enumerate(rewards)], drop=drop)

    groups = [flat(1.0, 1.0), flat(1.0, 0.0, 1.0), flat(2.0, 2.0), flat(0.0, 0.0), flat(0.5, 0.5)]
    lost = group([a_trajectory(reward=1.0), a_trajectory(1, error=ERROR)], drop="error")
    groups += [lost, flat(1.0, 1.0, drop=None), group([a_trajectory(error=ERROR)], drop="flat")]
    assert [metrics.step([one], 0)["groups/solved"] for one in groups] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert metrics.step(groups, 0, full_reward=0.5)["groups/solved"] == 4


def test_an_evaluation_counts_turns():
    of_three = replace(a_trajectory(0, reward=1.0), turns=a_trajectory(0).turns * 3)
    assert metrics.evaluation([of_three, a_trajectory(1, reward=0.0)])["eval/turns"] == 4


def test_an_evaluation_by_hand():
    trajectories = [
        a_trajectory(0, reward=1.0, uses=[a_use(), a_use("error")]),
        a_trajectory(1, reward=0.0, uses=[a_use("error")]),
        a_trajectory(2, reward=1.0),
        a_trajectory(3, error=ERROR, sampled=6),
    ]
    found = metrics.evaluation(trajectories)
    assert found["eval/accuracy"] == pytest.approx(2 / 3)
    assert found["eval/n"] == 3
    assert found["eval/tool_error_share_correct"] == 0.5
    assert found["eval/tool_rate"] == pytest.approx(2 / 3)
    assert (found["eval/tool_calls"], found["eval/tool_calls_jailed"]) == (3, 3)
    assert found["eval/tokens"] == 4 * 3 + 6
    assert found["eval/accuracy_low"] < 2 / 3 < found["eval/accuracy_high"]


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634)],
)
def test_wilsons_interval(successes, trials, low, high):
    """Wilson 1927; the values are those of statsmodels' proportion_confint(method="wilson")."""
    np.testing.assert_allclose(metrics.wilson(successes, trials), (low, high), atol=5e-5)


def test_rewards_are_told_by_source_and_prompts_without_one_are_not():
    def of(source, rewards, **options):
        prompt = replace(a_prompt(), source=source)
        members = tuple(a_trajectory(n, prompt=prompt, reward=reward) for n, reward in enumerate(rewards))
        return Group(prompt=prompt, trajectories=members, lease=0, **options)

    failed = of("math", [None])
    failed = replace(failed, trajectories=(replace(failed.trajectories[0], error=ERROR),))
    found = metrics.step([of("gsm8k", [1.0, 0.0]), of("gsm8k", [1.0, 1.0], drop="flat"), failed, of("", [0.5])], 0)
    assert {name: value for name, value in found.items() if name.startswith("reward/")} == {"reward/gsm8k": 0.75}
    assert found["reward"] == pytest.approx(3.5 / 5)
