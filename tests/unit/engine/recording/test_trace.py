"""The file for Perfetto: valid JSON, spans that meet do not overlap, machines beside each other."""

import json
import tracemalloc
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands.trace import main
from engine.recording import files
from engine.recording.segments import segment_of
from engine.recording.trace import write_trace
from engine.replica.port import KvSample
from engine.telemetry.timeline import BUCKET_S, TRACKS, Timeline
from tests.support.fakes import Clock
from tests.support.recorded_run import made_segment, write_recorded_run


def written(path, *timelines):
    """The events of the file that is made of these timelines, each a machine's."""
    segments = [
        segment_of(timeline.drain(), step=1, node="" if number == 0 else f"node-{number}")
        for number, timeline in enumerate(timelines)
    ]
    write_trace(path, segments)
    return json.loads(path.read_text())["traceEvents"]


def test_the_file_is_valid_and_begins_at_zero(tmp_path):
    clock = Clock(100.0)
    timeline = Timeline(clock)
    timeline.instant("fleet", "replica 0 up", pid=17)
    clock.now = 100.5
    timeline.step(0, 12, KvSample(free_blocks=88, running=3, waiting=1, preempted=0))
    timeline.span("trajectories", "generate", 100.25, 100.75, 2, key=7, end=0.5)  # a loss may count what it likes
    events = written(tmp_path / "timeline.json", timeline)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == list(TRACKS)
    by_kind = {kind: [event for event in events if event["ph"] == kind] for kind in "XiC"}
    [span], [instant], [blocks, requests] = by_kind["X"], by_kind["i"], by_kind["C"]
    assert (names[span["pid"]], span["tid"], span["ts"], span["dur"], span["args"]) == (
        *("trajectories", 2, 250_000.0, 500_000.0),
        {"key": 7, "end": 0.5},
    )
    assert (instant["ts"], instant["args"]) == (0.0, {"pid": 17})
    assert (blocks["name"], blocks["args"], blocks["ts"]) == ("replica 0 KV blocks", {"used": 12}, 500_000.0)
    assert requests["args"] == {"running": 3, "waiting": 1}


@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=20))
def test_spans_that_meet_do_not_overlap_in_the_file(tmp_path_factory, times):
    """Of two that overlap by a rounding, Perfetto drops one."""
    timeline = Timeline()
    for start, end in pairwise(sorted(times)):
        timeline.span("trajectories", "generate", start, end)
    path = tmp_path_factory.mktemp("trace") / "timeline.json"
    spans = [event for event in written(path, timeline) if event["ph"] == "X"]
    for before, after in pairwise(spans):
        assert before["ts"] + before["dur"] == after["ts"]


def test_numpy_numbers_in_an_event_are_numbers(tmp_path):
    """As in the places of somebody's own policy."""
    timeline = Timeline(Clock())
    timeline.instant("fleet", "mine", replica=np.int64(1), headroom_blocks=np.float64(2.5), stay_s=np.float32(0.5))
    [event] = (event for event in written(tmp_path / "timeline.json", timeline) if event["ph"] == "i")
    assert event["args"] == {"replica": 1, "headroom_blocks": 2.5, "stay_s": 0.5}


def test_writing_holds_one_event_at_a_time(tmp_path):
    timeline = Timeline(Clock(tick=2 * BUCKET_S))
    for used in range(3000):
        timeline.step(0, used, KvSample(free_blocks=88, running=3, waiting=1, preempted=0))
    segment = segment_of(timeline.drain(), step=1)
    tracemalloc.start()
    try:
        write_trace(tmp_path / "timeline.json", [segment])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000
    assert (tmp_path / "timeline.json").stat().st_size > 500_000


def test_a_file_that_is_interrupted_holds_what_it_held(tmp_path):
    class CtrlC:
        def __float__(self):
            raise KeyboardInterrupt

    timeline = Timeline(Clock())
    written(path := tmp_path / "timeline.json", timeline)
    before = path.read_bytes()
    timeline.instant("fleet", "late", number=CtrlC())
    with pytest.raises(KeyboardInterrupt):
        written(path, timeline)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_can_be_written(tmp_path):
    write_trace(tmp_path / "timeline.json", [])
    assert json.loads((tmp_path / "timeline.json").read_text())["displayTimeUnit"] == "ms"


def test_lanes_have_names_and_the_spans_of_a_trajectory_are_joined(tmp_path):
    timeline = Timeline(Clock())
    timeline.span("trajectories", "generate", 0.0, 1.0, 3, key=7)
    timeline.span("tool calls", "ok", 0.5, 2.0, 1, key=7)
    timeline.span("trajectories", "generate", 2.0, 3.0, 3, key=7)
    timeline.span("trajectories", "generate", 0.0, 1.0, 4, key=8)  # alone: nothing to join it to
    events = written(tmp_path / "timeline.json", timeline)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"trajectories 3", "trajectories 4", "tool calls 1"}
    flow = [(event["ph"], event["id"], event["tid"], event["ts"]) for event in events if event["ph"] in "stf"]
    assert flow == [("s", 7, 3, 0), ("t", 7, 1, 500_000), ("f", 7, 3, 2_000_000)]


def test_a_machine_has_tracks_of_its_own_and_its_trajectories_are_others(tmp_path):
    here, there = Timeline(Clock()), Timeline(Clock())
    for timeline in (here, there):
        timeline.span("trajectories", "generate", 0.0, 1.0, key=7)
    events = written(tmp_path / "timeline.json", here, there)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {names[event["pid"]] for event in events if event["ph"] == "X"} == {"trajectories", "node-1 trajectories"}
    assert not [event for event in events if event["ph"] in "stf"]


def test_a_record_and_its_copy_on_the_disk_give_the_same_file(tmp_path):
    write_recorded_run(tmp_path / "run", steps=2)
    write_trace(tmp_path / "direct.json", [made_segment(1), made_segment(2)])
    assert main([str(tmp_path / "run"), f"output={tmp_path / 'read.json'}"]) == 0
    assert (tmp_path / "read.json").read_bytes() == (tmp_path / "direct.json").read_bytes()


def test_the_command_writes_the_steps_that_it_is_asked_for(tmp_path):
    write_recorded_run(tmp_path, steps=4)
    assert main([str(tmp_path), "steps=2-3"]) == 0
    events = msgspec.json.decode((tmp_path / "timeline-2-3.json").read_bytes())["traceEvents"]
    assert {event["name"] for event in events if event["name"].startswith("step ")} == {"step 2", "step 3"}


@pytest.mark.parametrize("steps", ["x", "3-2", "0", "9-12", "-1"])
def test_steps_that_are_not_there_are_one_line_and_exit_code_2(tmp_path, capsys, steps):
    write_recorded_run(tmp_path, steps=2)
    assert main([str(tmp_path), f"steps={steps}"]) == 2
    said = capsys.readouterr().err
    assert "steps" in said
    assert steps in said
    assert said.count("\n") == 1


def test_a_range_beyond_the_record_is_cut_with_a_word(tmp_path, capsys):
    write_recorded_run(tmp_path, steps=3)
    assert main([str(tmp_path), "steps=2-9"]) == 0
    said = capsys.readouterr()
    assert "steps=2-9: only 2 to 3 have a timeline" in said.err
    assert "timeline-2-3.json" in said.out
    assert main([str(tmp_path), "steps=2-3"]) == 0
    assert capsys.readouterr().err == ""


def test_the_last_evaluation_is_no_step(tmp_path, capsys):
    write_recorded_run(tmp_path, steps=2)
    files.append_to(files.timeline_path(files.folder_of(tmp_path), 3), made_segment(3))
    assert main([str(tmp_path), "steps=9"]) == 2
    assert "steps between 1 and 2; 3 is what came after the last step" in capsys.readouterr().err


def test_a_folder_without_a_record_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("output", ["nowhere/x.json", "/dev/null", "."])
def test_an_output_that_is_no_place_for_a_file_is_refused_and_harms_nothing(tmp_path, monkeypatch, capsys, output):
    monkeypatch.chdir(tmp_path)
    write_recorded_run(tmp_path / "run", steps=1)
    assert main(["run", f"output={output}"]) == 2
    assert f"output={output}" in capsys.readouterr().err


def test_a_file_beside_the_output_is_left_alone(tmp_path):
    write_recorded_run(tmp_path / "run", steps=1)
    (tmp_path / "t.draft").write_text("mine")
    assert main([str(tmp_path / "run"), f"output={tmp_path / 't.json'}"]) == 0
    assert (tmp_path / "t.draft").read_text() == "mine"
