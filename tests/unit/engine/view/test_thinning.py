"""A step of many thousand trajectories fits a screen, and nothing of its time is lost."""

import random
from collections import Counter

import msgspec
import numpy as np
import pytest

from engine.recording.columns import SpanColumns
from engine.telemetry.idle_clock import Interval
from engine.view.answers.thinning import PIXELS, WHOLE, density_of, engine_steps_of, idle_of, in_view, spans_of


def a_span(lane, start, end, name="generate"):
    return lane, start, end, name


def columns(spans):
    names = tuple(sorted({name for *_, name in spans}))
    return SpanColumns(
        node="",
        track="trajectories",
        lane_S=np.asarray([lane for lane, *_ in spans]),
        name_S=np.asarray([names.index(name) for *_, name in spans]),
        start_S=np.asarray([start for _, start, _, _ in spans]),
        end_S=np.asarray([end for _, _, end, _ in spans]),
        names=names,
        raw_args_S=[msgspec.Raw(msgspec.msgpack.encode({"turn": 1}))] * len(spans),
    )


def shown(spans, start, seconds):
    made = columns(spans)
    shown_S = in_view(made, start, start + seconds)
    return spans_of(made, shown_S, made.lane_S[shown_S], start, seconds)


def test_few_spans_are_as_they_were():
    found = shown([a_span(1, 102.0, 103.0), a_span(0, 101.0, 104.0, "tool")], 100.0, 10.0)
    assert (found["lane"], found["name"]) == ([1, 0], ["generate", "tool"])
    assert (found["start"], found["end"], found["merged"]) == ([2.0, 1.0], [3.0, 4.0], 0)
    assert found["args"] == [{"turn": 1}] * 2


def test_narrow_neighbours_of_one_lane_and_name_become_one_and_wide_spans_stay():
    pixel_s = 100.0 / PIXELS
    narrow = [a_span(0, at * pixel_s / 50, (at + 0.5) * pixel_s / 50) for at in range(WHOLE + 1)]
    wide = [a_span(1, 10.0, 90.0, "tool"), a_span(0, 99.0, 100.0)]
    found = shown([*narrow, *wide], 0.0, 100.0)
    assert len(found["lane"]) == 3
    assert found["merged"] == found["count"] - 3 == WHOLE
    assert max(found["end"]) == 100.0
    assert sorted(map(len, found["args"])) == [0, 1, 1], "spans that were put together have no args of one of them"
    assert found["end"][0] == pytest.approx(narrow[-1][2], abs=1e-4)


def test_a_part_of_the_time_has_its_spans_alone_and_each_of_them():
    pixel_s = 100.0 / PIXELS
    narrow = [a_span(0, at * pixel_s / 50, (at + 0.5) * pixel_s / 50) for at in range(WHOLE + 1)]
    found = shown(narrow, 0.0, 0.1)
    assert found["merged"] == 0
    assert found["count"] == sum(start <= 0.1 for _, start, _, _ in narrow)


def test_a_density_has_all_the_time_of_its_spans_and_the_last_of_them():
    draw = random.Random(0)
    spans = [a_span(lane, begin := draw.uniform(0, 50), begin + draw.uniform(0, 20)) for lane in range(5_000)]
    spans.append(a_span(5_000, 0.0, 100.0, "tail"))
    made = columns(spans)
    found = density_of(made, in_view(made, 0.0, 100.0), 0.0, 100.0)
    assert found["lanes"] == 5_001
    assert found["busy"]["tail"] == [1.0] * PIXELS
    seconds = sum(found["busy"]["generate"]) * 100.0 / PIXELS
    assert seconds == pytest.approx(sum(end - start for _, start, end, _ in spans[:-1]), rel=1e-3)
    assert max(found["busy"]["generate"][int(0.71 * PIXELS) :]) == 0.0


def test_a_density_of_a_part_counts_only_what_lies_within():
    made = columns([a_span(0, 0.0, 60.0), a_span(1, 40.0, 41.0), a_span(2, 90.0, 91.0)])
    found = density_of(made, in_view(made, 50.0, 70.0), 50.0, 20.0)
    assert found["lanes"] == 1
    assert sum(found["busy"]["generate"]) * 20.0 / PIXELS == pytest.approx(10.0)


def test_thinned_idle_time_has_the_same_seconds_of_each_cause_and_no_overlap():
    draw, at, stretches = random.Random(0), 0.0, []
    for number in range(5_000):
        length = draw.uniform(0, 0.01) if number % 100 else 1.0
        stretches.append(Interval(0, draw.choice(["busy", "tool_wait", "host"]), at, at + length))
        at += length
    found = idle_of(stretches, 0.0, at, 200)
    assert len(found) < 1_000
    assert [begin for _, begin, _ in found[1:]] == pytest.approx([end for _, _, end in found[:-1]])
    whole, thin = Counter(), Counter()
    for each in stretches:
        whole[each.cause] += each.end - each.start
    for cause, begin, end in found:
        thin[cause] += end - begin
    assert thin == pytest.approx(whole)


def test_idle_stretches_of_one_cause_that_meet_are_one():
    stretches = [Interval(0, "busy", 0.0, 5.0), Interval(0, "busy", 5.0, 7.0), Interval(0, "busy", 8.0, 9.0)]
    assert idle_of(stretches, 1.0, 9.0, 100) == [("busy", 1.0, 7.0), ("busy", 8.0, 9.0)]


def test_thinned_engine_steps_keep_the_peaks_and_the_sums():
    at = np.arange(0.0, 100.0, 0.05)
    used, preempted = np.zeros(len(at), np.int32), np.zeros(len(at), np.int32)
    used[777], preempted[777], preempted[778] = 99, 2, 3
    found = engine_steps_of({"at": at, "used_blocks": used, "preempted": preempted}, 0.0, 100.0, 200)
    assert len(found["at"]) == 200
    assert found["used_blocks"].max() == 99
    assert found["preempted"].sum() == 5
    assert list(found["at"]) == sorted(found["at"])
