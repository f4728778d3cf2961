"""What limits a run is said rightly: of rows by hand, and of those that runs with one fault each have written."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.diagnosis.advice import _ADVICE
from engine.diagnosis.limit import _SENTENCES, WINDOW, diagnose
from engine.diagnosis.step_window import Limit
from engine.telemetry.idle_clock import CAUSES

RECORDED = Path(__file__).parent / "recorded"
CONFIG = {
    "replicas": 2,
    "devices": [],
    "max_staleness": 0,
    "kv_blocks": 64,
    "slots": 8,
    "extra_samples": 0,
    "rollout.max_tokens": 230,
    "learner.micro_batch_tokens": 4096,
    "learner.weights_dtype": "float32",
}


def a_row(step=1, rollout_s=8.0, learn_s=1.0, sync_s=0.0, **others):
    """A step of two replicas, which sample while rollouts are made. others: with _ for / where a name begins so."""
    step_s = rollout_s + learn_s + sync_s
    row = {"step": step, "time/step_s": step_s, "time/rollout_s": rollout_s, "time/learn_s": learn_s}
    row |= {"time/sync_s": sync_s, "replicas/busy_s": 2 * rollout_s, "replicas/live": 2, "tokens/generated": 900}
    row |= {f"idle/{cause}_s": 0.0 for cause in CAUSES}
    row |= {"idle/staleness_gate_s": 2 * learn_s, "idle/weight_sync_s": 2 * sync_s, "host/machine_cpu_share": 1.0}
    return row | {name.replace("__", "/"): value for name, value in others.items()}


HEALTHY = a_row()
CASES = {
    "healthy": (HEALTHY, Limit.NONE),
    "half of the time is the learner's": (a_row(rollout_s=3.0, learn_s=7.0), Limit.LEARNER),
    "tools, replicas idle": (a_row(replicas__busy_s=6.0, idle__tool_wait_s=10.0), Limit.TOOL),
    "tools, a request here and there": (a_row(tools__starved_s=5.0), Limit.TOOL),
    "tail": (a_row(rollout__tail_s=5.0), Limit.TAIL),
    "kv": (a_row(kv__blocked_s=6.0), Limit.KV),
    "reward": (a_row(replicas__busy_s=6.0, idle__reward_s=10.0), Limit.REWARD),
    "loading weights": (a_row(rollout_s=3.0, sync_s=7.0), Limit.SYNC),
    "publishing weights": (a_row(rollout_s=3.0, learn_s=7.0, learner__publish_s=6.0), Limit.SYNC),
    "loop": (a_row(host__loop_blocked_s=4.0), Limit.HOST),
    "a loop without a stall and without time": (a_row(host__loop_cpu_share=0.95), Limit.HOST),
    "a loop that computes a lot": (a_row(host__loop_cpu_share=0.7), Limit.NONE),
    "node's own work": (a_row(replicas__busy_s=6.0, idle__host_s=10.0), Limit.HOST),
    "a stage of one's own": (
        a_row(replicas__busy_s=6.0, idle__stage_s=10.0)
        | {"stage/judge/busy_s": 7.0, "stage/judge/blocked_in_s": 2.0, "stage/judge/blocked_out_s": 0.0},
        Limit.STAGE,
    ),
    "a stage of ours is no stage of one's own": (
        a_row(replicas__busy_s=6.0, idle__host_s=10.0) | {"stage/groups/busy_s": 9.0},
        Limit.HOST,
    ),
    "a stage that works while the replicas do": (a_row() | {"stage/judge/busy_s": 9.0}, Limit.NONE),
    "a stage that stands still with the loop": (
        a_row(replicas__busy_s=6.0, idle__stage_s=10.0, host__loop_blocked_s=5.0) | {"stage/judge/busy_s": 9.0},
        Limit.HOST,
    ),
    "checkpoints on a slow disk": (
        a_row(replicas__busy_s=6.0, idle__host_s=10.0, time__checkpoint_s=5.0),
        Limit.CHECKPOINT,
    ),
    "checkpoints beside the rollouts": (a_row(time__checkpoint_s=5.0), Limit.NONE),
    "long evaluations": (a_row(time__eval_s=20.0), Limit.EVALUATION),
    "others on the machine": (a_row(host__others_cpu_share=0.7), Limit.MACHINE),
    "others on a machine with room": (
        a_row(host__others_cpu_share=0.05, host__machine_cpu_share=0.4),
        Limit.NONE,
    ),
    "dead": (a_row(replicas__busy_s=8.0, idle__down_s=8.0, replicas__live=1), Limit.DEAD_REPLICA),
    "one replica of two at a sixth of the pace": (
        a_row(rollout_s=3.0, learn_s=1.0, rollout__tail_s=1.6)
        | {"replicas/token_ms/0": 380.0, "replicas/token_ms/1": 58.0},
        Limit.SLOW_REPLICA,
    ),
    "taking turns, with room": (a_row(rollout_s=5.0, learn_s=5.0, host__machine_cpu_share=0.5), Limit.STALENESS),
    "taking turns, without": (a_row(rollout_s=4.5, learn_s=5.5), Limit.LEARNER),
    "a dead replica and a slow learner": (
        a_row(rollout_s=2.0, learn_s=8.0, idle__down_s=10.0, replicas__live=1, replicas__busy_s=2.0),
        Limit.DEAD_REPLICA,
    ),
    "a loop that stands still makes all else slow": (
        a_row(host__loop_blocked_s=4.0, tools__starved_s=6.0, rollout__tail_s=2.0),
        Limit.HOST,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_limit_is_what_costs_most(case):
    row, limit = CASES[case]
    found = diagnose([row] * 3, CONFIG)
    assert found.limit == limit
    assert found.healthy == (limit is Limit.NONE)


def test_the_line_at_which_the_loop_stands_is_named():
    rows = [
        {**a_row(host__loop_blocked_s=4.0), "host/blocked_at/mine.py:12 clean": 1.5, "host/blocked_at/own.py:3 x": 1.0},
        {**a_row(host__loop_blocked_s=4.0), "host/blocked_at/mine.py:12 clean": 1.5},
    ]
    found = diagnose(rows, CONFIG)
    assert "mine.py:12 clean" in found.sentence
    assert any("mine.py:12 clean" in alarm.text for alarm in found.alarms)


def test_a_thread_that_takes_the_loops_turns_is_no_line_to_move_into_a_thread():
    row = a_row(host__loop_blocked_s=4.0) | {"host/blocked_at/mine.py:5 spin (in thread worker)": 3.0}
    [alarm] = diagnose([row], CONFIG).alarms
    assert "`mine.py:5 spin (in thread worker)` into a process" in alarm.text


def test_a_slow_stage_behind_a_shut_gate_is_not_staleness():
    row = a_row(replicas__busy_s=4.0, idle__stage_s=12.0, time__lease_wait_s=8.0) | {"stage/judge/busy_s": 9.0}
    found = diagnose([row], CONFIG | {"max_staleness": 1})
    assert found.limit == Limit.STAGE
    assert "Your stage `judge` limits this run: it works for 9.0 of 9.0 s" in found.sentence
    assert "workers" in found.advice[0].text


def test_more_replicas_are_not_advised_where_no_core_is_free():
    assert not diagnose([HEALTHY], CONFIG).advice
    free = HEALTHY | {"host/machine_cpu_share": 0.5}
    assert diagnose([free], CONFIG).advice[0].option == "replicas"
    assert diagnose([HEALTHY], CONFIG | {"devices": [0, 1]}).advice[0].option == "replicas"


def test_each_limit_has_a_sentence_and_advice():
    assert set(_SENTENCES) == set(_ADVICE) == set(Limit)


def test_a_gate_that_is_shut_while_both_sides_wait_is_staleness():
    row = a_row(learn_s=0.5, replicas__busy_s=16.0, rollout__tail_s=7.5, time__lease_wait_s=6.0)
    assert diagnose([row], CONFIG).limit == Limit.TAIL
    found = diagnose([row], CONFIG | {"max_staleness": 1})
    assert found.limit == Limit.STALENESS
    assert "max_staleness=1" in found.sentence
    open_gate = row | {"time/lease_wait_s": 0.5}
    assert diagnose([open_gate], CONFIG | {"max_staleness": 1}).limit == Limit.TAIL


def test_replicas_without_work_behind_a_shut_gate_do_not_wait_for_the_host():
    row = a_row(replicas__busy_s=6.0, idle__host_s=10.0, time__lease_wait_s=8.0)
    assert diagnose([row], CONFIG | {"max_staleness": 1}).limit == Limit.STALENESS


def test_a_learner_that_trains_beside_the_rollouts_costs_nothing():
    row = a_row(rollout_s=5.0, learn_s=5.0) | {"replicas/busy_s": 20.0, "idle/staleness_gate_s": 0.0}
    assert diagnose([row], CONFIG | {"max_staleness": 1}).limit == Limit.NONE


@pytest.mark.parametrize(("devices", "limit"), [([0, 1, 2], Limit.STALENESS), ([0], Limit.LEARNER)])
def test_on_gpus_more_staleness_helps_where_the_learner_has_its_own(devices, limit):
    row = a_row(rollout_s=4.5, learn_s=5.5)
    assert diagnose([row], CONFIG | {"devices": devices, "learner_ranks": 1}).limit == limit


def test_the_newest_steps_count_and_those_without_a_pace_do_not():
    slow = a_row(rollout_s=1.0, learn_s=99.0)
    rows = [slow, *(a_row(step) for step in range(2, 2 + WINDOW)), {"step": 99, "reward": 1.0}, {"eval/accuracy": 1.0}]
    found = diagnose(rows, CONFIG)
    assert found.limit == Limit.NONE
    assert found.steps == (2, 1 + WINDOW)
    assert diagnose(rows, CONFIG, window=WINDOW + 1).limit == Limit.LEARNER


@pytest.mark.parametrize(("queue_ms", "run_ms", "option"), [(90.0, 9.0, "slots"), (3.0, 5_000.0, "prompts_per_step")])
def test_more_slots_are_advised_only_where_calls_queue_for_them(queue_ms, run_ms, option):
    row = CASES["tools, replicas idle"][0] | {"tools/queue_p50_ms": queue_ms, "tools/run_p50_ms": run_ms}
    assert diagnose([row], CONFIG | {"prompts_per_step": 8}).advice[0].option == option


@pytest.mark.parametrize(
    ("row", "config", "option", "value", "figure"),
    [
        (
            CASES["tools, replicas idle"][0] | {"tools/queue_p50_ms": 90.0, "tools/run_p50_ms": 9.0},
            {},
            "slots",
            8,
            Limit.TOOL,
        ),
        (CASES["tail"][0], {}, "extra_samples", 0, Limit.TAIL),
        (CASES["tail"][0], {"extra_samples": 4}, "rollout.max_tokens", 230, Limit.TAIL),
        (CASES["kv"][0], {}, "kv_blocks", 64, Limit.KV),
        (CASES["loading weights"][0], {}, "learner.weights_dtype", "float32", Limit.SYNC),
        (CASES["loading weights"][0], {"devices": [0, 1], "learner.lora_rank": 0}, "learner.lora_rank", 0, Limit.SYNC),
        (
            CASES["loading weights"][0],
            {"dtype": "bfloat16", "learner.lora_rank": 0},
            "learner.lora_rank",
            0,
            Limit.SYNC,
        ),
        (
            CASES["loading weights"][0],
            {"devices": [0, 1], "learner.lora_rank": 8, "adapters": False},
            "adapters",
            False,
            Limit.SYNC,
        ),
        (CASES["reward"][0], {"graders": 4}, "graders", 4, Limit.REWARD),
        (
            CASES["half of the time is the learner's"][0] | {"learner/tokens": 9000, "learner/trajectories": 3},
            {},
            "learner.micro_batch_tokens",
            4096,
            Limit.LEARNER,
        ),
        (CASES["taking turns, with room"][0], {}, "max_staleness", 0, Limit.STALENESS),
    ],
)
def test_the_first_advice_names_the_option_that_changes_the_limit(row, config, option, value, figure):
    found = diagnose([row], CONFIG | config)
    first = found.advice[0]
    assert found.limit == figure
    assert (first.option, first.value) == (option, value)
    assert first.figures == {figure: found.lost[figure]}
    assert option in str(first)


@pytest.mark.parametrize("case", ["tail", "kv", "reward", "loading weights", "tools, replicas idle"])
def test_advice_whose_option_the_recipe_does_not_have_is_not_given(case):
    row, limit = CASES[case]
    found = diagnose([row], {"replicas": 2, "devices": [], "max_staleness": 0})
    assert found.limit == limit
    assert {finding.option for finding in found.advice} <= {"replicas", "max_staleness"}
    assert diagnose([row], {}).advice, "which options there are is not known"


@pytest.mark.parametrize(
    ("figures", "names", "option"),
    [
        ({"replicas/live": 1}, {"replicas/live", "replicas/deaths"}, "kv_blocks"),
        ({"host/others_cpu_share": 0.15}, {"host/others_cpu_share"}, ""),
        ({"replicas/deaths": 1}, {"replicas/live", "replicas/deaths"}, "kv_blocks"),
        ({"host/loop_blocked_s": 1.5}, {"host/loop_blocked_s"}, ""),
        ({"kv/preemptions": 3, "kv_peak/replica1": 0.95}, {"kv/preemptions", "kv_peak"}, "kv_blocks"),
        ({"rollout/trajectories": 20, "rollout/trajectories_failed": 1}, {"rollout/trajectories_failed"}, ""),
        ({"rollout/trajectories": 20, "stop/length": 6}, {"stop/length"}, "rollout.max_tokens"),
        ({"rollout/trajectories": 20, "stop/deadline": 2}, {"stop/deadline"}, "deadline_s"),
        ({"groups/all": 8, "groups/flat": 5, "groups/solved": 1}, {"groups/flat", "groups/solved"}, "refills"),
        ({"gpu/use/2": 0.9, "gpu/clock/2": 0.6}, {"gpu/clock/2"}, ""),
        ({"replicas/token_ms/0": 9.0, "replicas/token_ms/1": 20.0}, {"replicas/token_ms/1"}, ""),
        ({"gpu/others_bytes/1": 5e9}, {"gpu/others_bytes/1"}, "devices"),
        ({"learner/routing_differs": 0.3}, {"learner/routing_differs"}, "learner.replay_routing"),
    ],
)
def test_an_alarm_has_its_figures_and_a_run_with_one_is_not_healthy(figures, names, option):
    options = CONFIG | {"refills": 0, "deadline_s": 120.0, "learner.replay_routing": "measure"}
    found = diagnose([HEALTHY | figures], options)
    [alarm] = found.alarms
    assert set(alarm.figures) == names
    assert alarm.option == option
    [without] = diagnose([HEALTHY | figures], {"replicas": 2}).alarms
    assert without.option == "", "the recipe has none"
    assert found.limit == Limit.NONE
    assert not found.healthy


@pytest.mark.parametrize(
    "figures",
    [
        {"kv/preemptions": 3, "kv_peak/replica1": 0.5},
        {"rollout/trajectories": 20, "stop/length": 5},
        {"groups/all": 8, "groups/flat": 4},
        {"host/loop_blocked_s": 0.5},
        {"groups/all": 8, "groups/flat": 8, "groups/solved": 7},
        {"gpu/use/2": 0.1, "gpu/clock/2": 0.2},
        {"gpu/others_bytes/1": 2e8},
        {"replicas/token_ms/0": 10.0, "replicas/token_ms/1": 13.0},
        {"replicas/token_ms/0": 10.0},
        {"learner/routing_differs": 0.03},
    ],
)
def test_what_is_usual_is_no_alarm(figures):
    assert diagnose([HEALTHY | figures], CONFIG).alarms == ()


def test_routes_that_differ_are_no_alarm_where_they_are_replayed():
    row = HEALTHY | {"learner/routing_differs": 0.3}
    assert diagnose([row], CONFIG | {"learner.replay_routing": True}).alarms == ()


def test_a_solved_run_is_a_success_with_advice():
    solved = HEALTHY | {"groups/all": 8, "groups/flat": 7, "groups/solved": 7}
    found = diagnose([solved], CONFIG | {"refills": 0})
    assert found.healthy
    assert (found.advice[0].option, found.advice[0].value) == ("refills", 0)
    assert "88 % of the groups are solved" in found.advice[0].text
    assert "Harder prompts" in diagnose([solved], {"replicas": 2}).advice[0].text, "the recipe has no refills"


def test_a_run_that_got_slower_is_not_healthy_until_it_is_faster_again():
    rows = [a_row(step) for step in range(1, 31)]
    slow = [a_row(step, rollout_s=16.0, learn_s=2.0, tokens__per_s=50.0) for step in range(31, 45)]
    found = diagnose([*rows, *slow], CONFIG)
    assert found.alarms[0].text.startswith("From step 31 on a step takes 2.0 times as long")
    assert not found.healthy
    assert diagnose([*rows, *slow, *(a_row(step) for step in range(45, 60))], CONFIG).healthy


def test_replicas_that_are_slow_by_turns_are_not_slow():
    pairs = [(285.0, 45.0), (56.0, 188.0), (79.0, 53.0), (271.0, 52.0), (98.0, 14.0), (20.0, 79.0)]
    rows = [
        a_row(step) | {"replicas/token_ms/0": one, "replicas/token_ms/1": two} for step, (one, two) in enumerate(pairs)
    ]
    assert not diagnose(rows, CONFIG).alarms


def test_what_was_not_measured_in_each_step_is_said():
    rows = [a_row(1, host__others_cpu_share=0.7), a_row(2), a_row(3)]
    found = diagnose(rows, CONFIG)
    assert found.sentence.endswith("all of them are busy (measured in 1 of 3 steps).")
    assert "(measured in 1 of 3 steps)" in found.alarms[0].text


def test_tools_that_leave_replicas_little_to_sample_are_told_apart_from_idle_replicas():
    little = diagnose([CASES["tools, a request here and there"][0]], CONFIG)
    assert "the replicas have little to sample, since trajectories wait for calls" in little.sentence
    assert "the replicas wait for calls" in diagnose([CASES["tools, replicas idle"][0]], CONFIG).sentence


def test_a_run_that_samples_half_of_the_time_is_not_called_healthy():
    found = diagnose([a_row(rollout_s=5.5, learn_s=4.5)], CONFIG)
    assert found.limit == Limit.NONE
    assert not found.healthy
    assert found.sentence == (
        "No one cause limits this run: sampling takes 55 % of a step, the learner 45 %; 90 tokens/s."
    )
    assert diagnose([HEALTHY], CONFIG).sentence.startswith("Healthy. Sampling takes 89 % of a step")


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_has_ended_is_told_in_the_past_tense(case):
    row, _ = CASES[case]
    sentence = diagnose([row] * 3, CONFIG, ended=True).sentence
    now = {"limits", "limit", "wait", "waits", "takes", "take", "uses", "use", "is", "are", "Healthy."}
    assert not now & set(sentence.replace("peak use", "").split()), sentence


def test_the_sentence_names_the_slowest_tool():
    tool = CASES["tools, replicas idle"][0] | {"tools/wait/search_s": 30.0, "tools/wait/python_s": 4.0}
    assert "`search`" in diagnose([tool], CONFIG).sentence


def test_without_steps_or_without_the_replicas_seconds_nothing_is_claimed():
    assert diagnose([], {}).limit == Limit.NONE
    old = {"step": 1, "time/step_s": 2.0, "time/rollout_s": 0.2, "time/learn_s": 1.8}
    assert diagnose([old], {}).limit == Limit.NONE
    summary = {"idle_attribution_s": {"replica0": {"busy": 1.0, "staleness_gate": 9.0}}}
    assert diagnose([old], {}, summary).limit == Limit.LEARNER
    assert diagnose([old], {"nodes_only": True}, summary).limit == Limit.NONE, "others make the rollouts"


numbers = st.floats(0, 10)
names = [name for name in HEALTHY if name != "step"] + ["kv/blocked_s", "tools/starved_s", "rollout/tail_s"]


@given(st.lists(st.dictionaries(st.sampled_from(names), numbers), max_size=4), st.integers(0, 2))
@example([{"time/step_s": 0.0, "replicas/busy_s": 0.0}], 0)
def test_any_rows_give_a_sentence_and_shares_that_are_none_below_zero(rows, staleness):
    found = diagnose([{"step": step, **row} for step, row in enumerate(rows)], {"max_staleness": staleness})
    assert found.sentence.endswith(".")
    assert found.sentence[0].isupper()
    assert all(share >= 0 for share in found.lost.values())


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_recorded_run_with_one_fault_is_limited_by_it(path):
    config, *rows = map(json.loads, path.read_text().splitlines())
    expected = {"healthy": Limit.NONE, "dead": Limit.DEAD_REPLICA}.get(path.stem) or Limit(path.stem)
    found = diagnose(rows, config)
    assert found.limit == expected, found


def test_steps_that_all_began_before_this_process_are_not_denied():
    """A resumed run whose steps used what was sampled before has no durations of its own."""
    said = diagnose([{"step": 1, "reward": 0.5}], CONFIG, ended=True).sentence
    assert said == "Every step began before this process did, so where their time went is not known."
    assert diagnose([{"step": 0, "eval/accuracy": 0.5}], CONFIG, ended=True).sentence == "No step was trained."
