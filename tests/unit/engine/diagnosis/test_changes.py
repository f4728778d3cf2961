"""Where a run got slower, and what changed there: found where it is, and seldom where nothing is."""

import math

import numpy as np
import pytest

from engine.diagnosis.changes import changes
from engine.diagnosis.shifts import shifts
from engine.diagnosis.step_seconds import parts_of

LEAST = math.log(1.05)
RUNS = 25


def series(seed, steps, noise=0.05, jump=1.0, at=None, grows=1.0):
    """Logarithms of seconds with normal noise, a jump to `jump` times at step `at`, and growth over the run."""
    levels = np.log(1 + (grows - 1) * np.arange(steps) / steps)
    if at is not None:
        levels[at:] += math.log(jump)
    return levels + noise * np.random.default_rng(seed).standard_normal(steps)


def rows_of(seconds, **others):
    """Rows of two replicas that sample for three quarters of a step. others: functions of the step's index."""
    return [
        {
            "step": index + 1,
            "time/step_s": value,
            "replicas/busy_s": 1.5 * value,
            "idle/staleness_gate_s": 0.5 * value,
            **{name.replace("__", "/"): of(index) for name, of in others.items()},
        }
        for index, value in enumerate(np.asarray(seconds).tolist())
    ]


@pytest.mark.parametrize(("steps", "grows"), [(40, 1.0), (100, 1.0), (100, 3.0), (300, 3.0)])
def test_a_run_without_a_change_has_none(steps, grows):
    false = sum(bool(shifts(series(seed, steps, grows=grows), LEAST)) for seed in range(RUNS))
    assert false <= 1


@pytest.mark.parametrize(
    ("steps", "at", "noise", "jump"), [(100, 60, 0.03, 1.1), (100, 60, 0.05, 1.25), (40, 30, 0.05, 2)]
)
def test_a_jump_is_found_where_it_is(steps, at, noise, jump):
    found = [shifts(series(seed, steps, noise, jump, at), LEAST) for seed in range(RUNS)]
    assert sum(any(abs(position - at) <= 3 for position in positions) for positions in found) >= 0.75 * RUNS


def test_two_odd_steps_are_no_change():
    values = series(0, 60)
    values[[20, 21, 40]] += 3.0
    assert not shifts(values, LEAST)


def test_others_on_the_machine_are_named_with_what_follows():
    slow = [1.0] * 9 + [8.1] * 4
    rows = rows_of(
        slow * (1 + 0.02 * np.random.default_rng(0).standard_normal(13)),
        host__others_cpu_share=lambda index: 0.95 if index >= 9 else 0.01 * (index % 3),
        tokens__per_s=lambda index: 457 if index >= 9 else 4113 + index,
        reward=lambda index: 0.5 + 0.01 * index,
    )
    (change,) = changes(rows)
    assert (change.step, change.before, change.after) == (10, (1, 9), (10, 13))
    assert change.ratio == pytest.approx(8.1, rel=0.05)
    assert [reason.metric for reason in change.reasons] == ["host/others_cpu_share", "tokens/per_s"]
    assert change.sentence.startswith("From step 10 on a step takes 7.9 times as long as at steps 1 to 9")
    assert "other processes use 95 % of the cores (1 % before)" in change.sentence


def test_the_parts_add_up_to_the_difference():
    rows = rows_of(np.exp(series(1, 40, 0.02, 1.6, 20)))
    (change,) = changes(rows)
    means = [np.mean([row["time/step_s"] for row in rows[a - 1 : b]]) for a, b in (change.before, change.after)]
    assert sum(change.parts.values()) == pytest.approx(means[1] - means[0])
    assert sum(parts_of(rows[0]).values()) == pytest.approx(rows[0]["time/step_s"])


def test_what_speaks_against_the_change_is_no_reason():
    """A step takes longer although trajectories got shorter."""
    rows = rows_of(
        np.exp(series(2, 30, 0.02, 1.5, 15)), rollout__response_tokens=lambda index: 40 if index >= 15 else 90
    )
    (change,) = changes(rows)
    assert not change.reasons
    assert "no metric" not in change.sentence  # the parts still say where


def test_a_run_that_gets_faster_is_said_so():
    (change,) = changes(
        rows_of(np.exp(series(3, 30, 0.02, 0.5, 15)), replicas__live=lambda index: 2 if index < 15 else 4)
    )
    assert change.ratio < 0.6
    assert "4 replicas serve (2 before)" in change.sentence
    assert "less" in change.sentence


def test_a_resumed_step_is_left_out_and_named():
    rows = rows_of(np.exp(series(4, 40, 0.02, 2.0, 15)))
    for row in rows[15:19]:
        row |= {"time/step_s": 0.1, "rollout/trajectories_resumed": 200}
    (change,) = changes(rows)
    assert change.resumed
    assert change.step == 20
    assert "resumed" in change.sentence


def test_rows_of_an_older_version_are_split_by_phase():
    assert parts_of({"time/step_s": 3.0, "time/rollout_s": 1.0, "time/learn_s": 1.5}) == {
        "waits for rollouts": 1.0,
        "waits for the learner": 1.5,
        "other": 0.5,
    }


def test_no_rows_no_change():
    assert changes([]) == []
    assert changes([{"step": 0, "eval/accuracy": 0.1}]) == []
