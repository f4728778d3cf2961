"""A recorded step under other policies: what of it the simulator gets, and what it says."""

import dataclasses
import json
import re

import pytest
from msgspec.structs import replace

from bench.__main__ import main as rocstar_bench
from bench.commands.rivals import Prediction, changes, compare, error_of, load, main, of_users, predictions, verdict
from bench.measuring import user_policy
from bench.placement.policies import OURS, POLICIES
from bench.placement.workload import Turn
from bench.simulator.recorded_step import recorded, step_cost, traced
from engine.recording import files
from engine.recording.reader import RecordedRun
from engine.run.run_folder import signed_row
from engine.telemetry.idle_clock import Interval
from tests.support.recorded_run import made_group, made_segment, write_recorded_run


@pytest.fixture
def run(tmp_path):
    write_recorded_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"kv_blocks": 200, "replicas": 2}))
    return tmp_path


def test_a_trajectory_keeps_its_lengths_and_what_it_waited_between_its_turns():
    with_tool, plain, *_ = traced([made_group(1, 1, 2)])
    assert plain.turns == (Turn(prompt_new_tokens=10, gen_tokens=20),)
    first, last = with_tool.turns
    assert (first.prompt_new_tokens, first.gen_tokens) == (10, 20)
    assert first.tool_latency_s == pytest.approx(0.29)  # from the end of the turn until the next is queued
    assert last == Turn(prompt_new_tokens=10, gen_tokens=20)


def test_an_engine_step_costs_what_its_replica_worked_and_not_what_it_waited(run):
    """Five steps end in each twentieth of a second, half of which a replica waits for the node."""
    segment = made_segment(2)
    halves = [segment.start + 0.025 * number for number in range(40)]
    idle = tuple(
        Interval(replica=replica, cause=("busy", "host")[number % 2], start=at, end=at + 0.025)
        for replica in range(2)
        for number, at in enumerate(halves)
    )
    path = files.timeline_path(files.folder_of(run), 2)
    path.unlink()
    files.append_to(path, replace(segment, idle=idle))
    cost = step_cost(RecordedRun(run), 2)
    assert cost.step_s(2, kv_tokens=30 * 32, prompt_tokens=2) == pytest.approx(0.005, rel=0.05)


def test_each_policy_is_compared_with_the_runs_own(run):
    answer = compare(recorded(run, 2))
    rows = {row["policy"]: row for row in answer["rows"]}
    assert rows.keys() == POLICIES.keys()
    assert rows[OURS]["ratio"] == 1.0
    assert all(row["ratio"] == row["makespan_s"] / rows[OURS]["makespan_s"] for row in rows.values())
    assert answer["fidelity"] == rows[OURS]["makespan_s"] / answer["measured_s"]
    assert answer["measured_s"] == pytest.approx(0.71)


def test_a_step_that_is_not_kept_is_refused_with_those_that_are(run):
    with pytest.raises(ValueError, match="1, 2, 3"):
        recorded(run, 9)


def test_a_step_of_which_groups_are_lost_is_not_set_against_the_time_of_all(run):
    path = files.step_path(files.folder_of(run), 2)
    data = path.read_bytes()
    third = len(files.packed(RecordedRun(run).rows()[1])) + sum(
        len(files.packed(each)) for each in RecordedRun(run).groups(2)[:2]
    )
    path.write_bytes(data[: third + 9])
    with pytest.raises(ValueError, match=r"2 of 4 groups of step 2 can be read.*one of \[1, 3\]"):
        recorded(run, 2)


def test_a_run_that_does_not_say_its_replicas_or_has_no_timeline_is_refused(run):
    for path in (run / "record" / "timeline").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="timeline"):
        recorded(run, 2)
    (run / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="kv_blocks"):
        recorded(run, 2)


def test_the_last_line_is_the_answer(run, capsys):
    assert main([str(run), "step=2"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def write_metrics(run, share):
    rows = [
        signed_row(json.dumps({"step": n, "time/step_s": 1.0, "host/machine_cpu_share": share}).encode())
        for n in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_bytes(b"".join(row + b"\n" for row in rows))


def test_a_replica_more_is_no_lever_where_the_cores_are_busy(run):
    write_metrics(run, 0.95)
    answer = compare(recorded(run, 2))
    assert not [lever for lever in answer["levers"] if "replica" in lever["lever"]]
    assert "share the cores" in answer["lever"]
    write_metrics(run, 0.4)
    assert [lever for lever in compare(recorded(run, 2))["levers"] if "replica" in lever["lever"]]


def test_the_error_is_the_scatter_of_what_was_predicted():
    def made(*ratios):
        return [Prediction(step=at, predicted_s=ratio * 2.0, measured_s=2.0) for at, ratio in enumerate(ratios)]

    assert error_of(made(0.8, 0.8)) is None
    assert error_of(made(0.8, 0.8, 0.8, 0.8)) == pytest.approx(0.0, abs=1e-9)  # what all share is in both parts
    error = error_of(made(0.9, 1.0, 1.1, 1.0))
    assert 0.1 < error < 0.25
    assert [verdict(ratio, error) for ratio in (0.7, 0.95, 1.05, 1.4)] == ["faster", *["no difference"] * 2, "slower"]


def test_steps_are_predicted_from_those_before_them(run):
    made = predictions(run, 3)
    assert [each.step for each in made] == [2, 3]  # nothing is before the first
    assert all(each.predicted_s > 0 for each in made)


def test_without_enough_predictions_the_error_is_said_to_be_unknown(run):
    answer = compare(recorded(run, 2), made=predictions(run, 2))
    assert answer["error_log"] is None
    assert "not known" in answer["sentence"]


POLICIES_OF_MINE = """
import time

from engine.balancing.balancer import Place
from engine.balancing.round_robin import RoundRobin

class Mine(RoundRobin):
    pass

def fitting(setting):
    assert setting.longest_tokens > 0
    return RoundRobin()

class Broken(RoundRobin):
    def decide(self, now):
        raise KeyError("x")

class Refuses(RoundRobin):
    def __init__(self):
        raise ValueError("boom")

class Async(RoundRobin):
    async def decide(self, now):
        return []

class Elsewhere(RoundRobin):
    def decide(self, now):
        return [Place(key=each.key, replica=7, rule="x", headroom_blocks=0.0) for each in super().decide(now)]

class Nothing(RoundRobin):
    def decide(self, now):
        return None

class Hangs(RoundRobin):
    def decide(self, now):
        while True:
            pass

class Less:
    pass
"""


def test_a_policy_of_users_is_a_row(run):
    file = run / "mine.py"
    file.write_text(POLICIES_OF_MINE)
    step = recorded(run, 2)
    for name in ("Mine", "fitting"):
        rows = {row["policy"]: row for row in compare(step, users=of_users(step, load(f"{file}:{name}")))["rows"]}
        assert rows[name]["makespan_s"] == rows["round_robin"]["makespan_s"]
    for name in ("missing", "__name__"):
        with pytest.raises(ValueError, match="Fix:"):
            load(f"{file}:{name}")
    with pytest.raises(ValueError, match="Fix:"):
        load("none.py:Mine")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Broken", r"the policy Broken failed: KeyError: 'x' \(mine.py:16\) in decide"),
        ("Refuses", r"ValueError: boom \(mine.py:20\)"),
        ("Async", r"Async.decide \(mine.py:23\) is async"),
        ("Elsewhere", r"Elsewhere.decide \(mine.py:27\) placed trajectory \d+ on replica 7.*Fix: .* 0, 1"),
        ("Nothing", r"returned None.*Fix: return a list of Place"),
        ("Hangs", r"did not return within 0.2 s \(mine.py:3[67]\)"),
        ("Less", r"has no replica_up.*RoundRobin"),
    ],
)
def test_a_failure_of_a_policy_of_users_is_one_line_before_all_else(run, name, says, capsys, monkeypatch):
    monkeypatch.setattr(user_policy, "DEADLINE_S", 0.2)
    file = run / "mine.py"
    file.write_text(POLICIES_OF_MINE)
    assert rocstar_bench(["rivals", str(run), "step=2", f"policy={file}:{name}"]) == 2
    *before, said = capsys.readouterr().err.splitlines()
    assert re.search(says, said)
    assert before in ([], [f"simulating your policy {name}"])
    if name in ("Async", "Refuses", "Less"):
        assert not before


def test_another_fleet_is_compared_with_the_run_as_it_was(run):
    step, fleet = recorded(run, 2), recorded(run, 2, replicas=1, kv_blocks=150)
    answer = compare(step, fleet)
    rows = {row["policy"]: row for row in answer["rows"]}
    assert rows[OURS]["verdict"] != "as it ran"
    assert "1 replica of 150 KV blocks" in answer["sentence"]
    assert answer["fidelity"] == compare(step)["fidelity"]
    for lever in answer["levers"]:
        assert lever["ratio"] == pytest.approx(lever["makespan_s"] / rows[OURS]["makespan_s"])
    twice = next(lever for lever in answer["levers"] if lever["lever"] == "twice the KV cache")
    larger = compare(step, recorded(run, 2, replicas=1, kv_blocks=300))["rows"][0]
    assert twice["makespan_s"] == pytest.approx(larger["makespan_s"])
    assert "1 replica of 150 KV blocks" in answer["lever"]


def test_slow_tool_calls_are_a_lever_only_where_they_take_time(run):
    """The step takes 0.71 s: a call of 0.5 s can be quicker, and one of a millisecond does not matter."""
    step = recorded(run, 2)
    turn = Turn(prompt_new_tokens=10, gen_tokens=20, tool_latency_s=0.00028)

    def named(last_s):
        turns = (turn,) * 30 + (dataclasses.replace(turn, tool_latency_s=last_s), turn)
        return [*changes(dataclasses.replace(step, trace=[dataclasses.replace(step.trace[0], turns=turns)]))]

    assert "no tool call slower than nine in ten (0.28 ms)" in named(0.5)
    assert not [name for name in named(0.001) if "tool" in name]


@pytest.mark.parametrize(("recipe", "blocks"), [("recipes/quickstart.py", 2048), ("recipes/train_on_file.py", 1024)])
def test_the_kv_cache_is_that_of_the_recipe_where_it_is_not_set(run, recipe, blocks):
    (run / "config.json").write_text(json.dumps({"kv_blocks": None, "replicas": 2, "recipe": recipe}))
    assert recorded(run, 2).machine.blocks == blocks


def test_on_gpus_the_kv_cache_has_to_be_known(run):
    (run / "config.json").write_text(json.dumps({"kv_blocks": None, "replicas": 2, "devices": [0, 1]}))
    with pytest.raises(ValueError, match="on GPUs"):
        recorded(run, 2)
    assert recorded(run, 2, kv_blocks=300).machine.blocks == 300


def test_a_large_step_is_sampled_and_its_levers_are_of_the_whole_fleet(run):
    """A replica more of eight is an eighth more, however few of them are simulated."""
    step = recorded(run, 2)
    rows = [
        dataclasses.replace(
            step.trace[0], traj=at, group=at // 8, turns=(Turn(prompt_new_tokens=10, gen_tokens=50 + at % 97),)
        )
        for at in range(4096)
    ]
    large = dataclasses.replace(step, trace=rows, replicas=8)
    answer = compare(large)
    assert answer["simulated"] == 2048 < answer["trajectories"]
    assert "2,048 of its 4,096" in answer["sentence"]
    more = next(lever for lever in answer["levers"] if lever["lever"] == "one replica more")
    assert 0.8 < more["ratio"] < 0.97
