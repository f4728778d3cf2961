"""The timeline of a step of many trajectories, a part of it, and some of its trajectories and replicas."""

import pytest

from engine.recording import files
from engine.recording.records import Segment
from engine.telemetry.idle_clock import Interval
from engine.telemetry.timeline import SpanEvent
from engine.view.answers.thinning import LANES
from engine.view.answers.timeline import IDLEST, LONGEST, Stretch, timeline_of
from engine.view.run_files import RunFiles
from tests.support.viewed_runs import write_viewed_run

START, SECONDS, LANES_USED = 1_790_000_000.0, 100.0, 2 * LANES


@pytest.fixture
def run(tmp_path):
    """Trajectory n takes 20 + n / 100 s in two turns on lane n; number 7 goes on until the end. Replica n samples for n
    seconds.
    """
    spans = []
    for lane in range(LANES_USED):
        for turn in range(2):
            start = START + 10 * turn
            end = START + SECONDS if (lane, turn) == (7, 1) else start + 10 + turn * lane / 100
            spans.append(SpanEvent("trajectories", lane, "generate", start, end, {"key": lane}))
        spans.append(SpanEvent("trajectories", lane, "tools", START + 10, START + 10, {"calls": 1}))
    spans.append(SpanEvent("learner", 0, "step 1", START + 90, START + SECONDS, {}))
    idle = [Interval(replica, "busy", START, START + replica) for replica in range(20)]
    idle += [Interval(replica, "long_tail", START + replica, START + SECONDS) for replica in range(20)]
    segment = Segment(step=1, node="", start=START, end=START + SECONDS, spans=tuple(spans), idle=tuple(idle))
    write_viewed_run(tmp_path / "run", recorded=1)
    path = files.timeline_path(files.folder_of(tmp_path / "run"), 1)
    path.unlink()
    files.append_to(path, segment)
    return RunFiles(tmp_path / "run")


def trajectories(answer):
    return next(track for track in answer["tracks"] if track["track"] == "trajectories")


def test_a_track_of_too_many_lanes_is_a_density_and_its_quiet_part_has_lanes_again(run):
    whole = timeline_of(run, Stretch(first=1, last=1))
    assert trajectories(whole)["density"]["lanes"] == LANES_USED
    tail = timeline_of(run, Stretch(first=1, last=1, start=50.0, end=80.0))
    spans = trajectories(tail)["spans"]
    assert (spans["lane"], spans["args"]) == ([0], [{"key": 7}])
    assert (tail["from"], tail["to"], tail["seconds"]) == (50.0, 80.0, SECONDS)
    assert spans["end"] == [SECONDS], "the axis is that of the whole steps"


def test_the_longest_trajectories_are_picked_on_the_server_with_all_their_spans(run):
    answer = trajectories(timeline_of(run, Stretch(first=1, last=1, longest=True)))
    assert answer["picked"] == "longest"
    keys = {args["key"] for args in answer["spans"]["args"] if "key" in args}
    assert keys == {7, *range(LANES_USED - LONGEST + 1, LANES_USED)}
    first = [args for lane, args in zip(answer["spans"]["lane"], answer["spans"]["args"], strict=True) if lane == 0]
    assert sorted(map(str, first)) == sorted(map(str, [{"key": 7}, {"calls": 1}, {"key": 7}]))


def test_two_trajectories_that_follow_on_one_lane_are_two(tmp_path):
    spans = [
        SpanEvent("trajectories", lane, "generate", START + begin, START + begin + 10, {"key": 2 * lane + begin // 20})
        for lane in range(LONGEST + 1)
        for begin in (0, 20)
    ]
    spans.append(SpanEvent("trajectories", 3, "generate", START + 60, START + 75, {"key": "late"}))
    write_viewed_run(tmp_path / "run", recorded=1)
    path = files.timeline_path(files.folder_of(tmp_path / "run"), 1)
    path.unlink()
    files.append_to(path, Segment(step=1, node="", start=START, end=START + 80, spans=tuple(spans)))
    answer = trajectories(timeline_of(RunFiles(tmp_path / "run"), Stretch(first=1, last=1, longest=True)))
    assert len(answer["spans"]["lane"]) == LONGEST
    assert answer["spans"]["args"][answer["spans"]["lane"].index(0)] == {"key": "late"}


def test_the_replicas_that_sample_least_are_picked_in_the_part_that_is_shown(run):
    whole = timeline_of(run, Stretch(first=1, last=1, idlest=True))
    assert [replica["replica"] for replica in whole["replicas"]] == list(range(IDLEST))
    assert whole["replica_count"] == 20
    early = timeline_of(run, Stretch(first=1, last=1, start=0.0, end=2.0, idlest=True))
    assert {0, 1} <= {replica["replica"] for replica in early["replicas"]}


@pytest.mark.parametrize(("apart", "busy_s"), [(0, 2.0), (2, 9.0)])
def test_what_replicas_do_for_an_evaluation_is_not_the_steps_sampling(tmp_path, apart, busy_s):
    """Unless evaluations have replicas of their own."""
    idle = [Interval(0, "busy", START + 1, START + 10), Interval(0, "host", START + 10, START + 11)]
    spans = (SpanEvent("evaluation", 0, "step 0", START, START + 8, {}),)
    write_viewed_run(tmp_path / "run", recorded=1, eval_replicas=apart)
    path = files.timeline_path(files.folder_of(tmp_path / "run"), 1)
    path.unlink()
    files.append_to(path, Segment(step=1, node="", start=START, end=START + 11, spans=spans, idle=tuple(idle)))
    [replica] = timeline_of(RunFiles(tmp_path / "run"), Stretch(first=1, last=1))["replicas"]
    seconds = {cause: end - begin for cause, begin, end in replica["idle"]}
    assert seconds["busy"] == pytest.approx(busy_s)
    assert seconds.get("evaluation", 0.0) == pytest.approx(9.0 - busy_s)


def test_a_part_that_is_none_is_refused(run):
    for start, end in ((5.0, 5.0), (9.0, 2.0), (float("nan"), 2.0)):
        with pytest.raises(ValueError, match="from must be before to"):
            timeline_of(run, Stretch(first=1, last=1, start=start, end=end))
