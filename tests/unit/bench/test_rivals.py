"""A recorded step under other policies: what of it the simulator gets, and what it says."""

import json

import pytest
from msgspec.structs import replace

from bench.commands.rivals import compare, main, recorded, step_cost, traced
from bench.placement.policies import OURS, POLICIES
from bench.placement.workload import Turn
from engine.recording import files
from engine.recording.reader import RecordedRun
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
