"""The timeline: valid JSON for Perfetto, spans of one lane never overlap."""

import asyncio
import contextlib
import json
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.replica.port import KvSample
from engine.telemetry.timeline import TRACKS, Lanes, Timeline
from tests.support.fakes import Clock


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60))
def test_a_lane_is_never_given_to_two_owners_and_the_lowest_free_one_is_used(events):
    lanes, out, seen = Lanes(), set(), 0
    for take, number in events:
        if take or not out:
            lane = lanes.take()
            assert lane not in out
            assert lane == min(set(range(len(out) + 1)) - out)
            out.add(lane)
            seen = max(seen, len(out))
            assert lane < seen
        else:
            lane = sorted(out)[number % len(out)]
            out.remove(lane)
            lanes.give(lane)


def test_the_file_is_valid_and_begins_at_zero(tmp_path):
    clock = Clock(100.0)
    timeline = Timeline(clock)
    timeline.instant("fleet", "replica 0 up", pid=17)
    clock.now = 100.5
    timeline.step(0, 12, KvSample(free_blocks=88, running=3, waiting=1, preempted=0))
    timeline.span("trajectories", "generate", 100.25, 100.75, 2, key=7, end=0.5)  # a loss may count what it likes
    path = tmp_path / "timeline.json"
    timeline.write(path)
    events = json.loads(path.read_text())["traceEvents"]
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
def test_spans_that_meet_do_not_overlap_in_the_file(times):
    """Of two that overlap by a rounding, Perfetto drops one."""
    timeline = Timeline()
    for start, end in pairwise(sorted(times)):
        timeline.span("trajectories", "generate", start, end)
    spans = [event for event in timeline._events() if event["ph"] == "X"]
    for before, after in pairwise(spans):
        assert before["ts"] + before["dur"] == after["ts"]


def test_numpy_numbers_in_an_event_are_numbers(tmp_path):
    """As in the places of somebody's own policy."""
    timeline = Timeline(Clock())
    timeline.instant("fleet", "mine", replica=np.int64(1), headroom_blocks=np.float64(2.5), stay_s=np.float32(0.5))
    timeline.write(path := tmp_path / "timeline.json")
    [event] = (event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "i")
    assert event["args"] == {"replica": 1, "headroom_blocks": 2.5, "stay_s": 0.5}


def test_writing_holds_one_event_at_a_time(tmp_path):
    timeline = Timeline(Clock(tick=0.001))
    for used in range(3000):
        timeline.step(0, used, KvSample(free_blocks=88, running=3, waiting=1, preempted=0))
    tracemalloc.start()
    try:
        timeline.write(tmp_path / "timeline.json")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_file_that_is_interrupted_holds_what_it_held(tmp_path):
    class CtrlC:
        def __float__(self):
            raise KeyboardInterrupt

    timeline = Timeline(Clock())
    timeline.write(path := tmp_path / "timeline.json")
    before = path.read_bytes()
    timeline.instant("fleet", "late", number=CtrlC())
    with pytest.raises(KeyboardInterrupt):
        timeline.write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_timeline_can_be_written(tmp_path):
    Timeline().write(tmp_path / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text())["displayTimeUnit"] == "ms"


def test_a_track_that_does_not_exist_is_refused_when_it_is_used():
    timeline = Timeline(Clock())
    with pytest.raises(KeyError, match="trajectory"):
        timeline.span("trajectory", "x", 0.0, 1.0)
    with pytest.raises(KeyError, match="nowhere"):
        timeline.instant("nowhere", "x")


async def test_spans_of_one_lane_do_not_overlap_in_a_run_of_many_rollouts(tmp_path):
    from tests.support.node import ANSWER, END, Setup, call

    text = call("print(1)") + call("print(2)") + END
    async with Setup([text], [text], [ANSWER], replicas=2) as node, asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(node.run())
    node.timeline.write(tmp_path / "timeline.json")
    lanes = {}
    for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(len(spans) for spans in lanes.values()) == 12 * (3 + 2 + 4)
    for lane, spans in lanes.items():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, (lane, spans)


def test_an_idle_cause_ends_with_what_it_covers_also_when_that_fails():
    clock = Clock()
    timeline = Timeline(clock)
    timeline.idle.replica(0, clock())
    with contextlib.suppress(ZeroDivisionError), timeline.idle_cause("kv_blocked"):
        clock.now += 2.0
        raise ZeroDivisionError
    clock.now += 3.0
    assert timeline.idle.seconds(clock.now)[0] == {"kv_blocked": 2.0, "host": 3.0}


def test_lanes_have_names_and_the_spans_of_a_trajectory_are_joined(tmp_path):
    clock = Clock()
    timeline = Timeline(clock)
    timeline.span("trajectories", "generate", 0.0, 1.0, 3, key=7)
    timeline.span("tool calls", "ok", 0.5, 2.0, 1, key=7)
    timeline.span("trajectories", "generate", 2.0, 3.0, 3, key=7)
    timeline.span("trajectories", "generate", 0.0, 1.0, 4, key=8)  # alone: nothing to join it to
    timeline.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"trajectories 3", "trajectories 4", "tool calls 1"}
    flow = [(event["ph"], event["id"], event["tid"], event["ts"]) for event in events if event["ph"] in "stf"]
    assert flow == [("s", 7, 3, 0), ("t", 7, 1, 500_000), ("f", 7, 3, 2_000_000)]
