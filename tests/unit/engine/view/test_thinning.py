"""A step of many thousand trajectories fits a screen, and nothing of its time is lost."""

import random

import pytest

from engine.telemetry.timeline import SpanEvent
from engine.view.answers.thinning import PIXELS, WHOLE, density_of, spans_of


def a_span(lane, start, end, name="generate"):
    return SpanEvent("trajectories", lane, name, start, end, {"turn": 1})


def test_few_spans_are_as_they_were():
    found = spans_of([a_span(1, 102.0, 103.0), a_span(0, 101.0, 104.0, "tool")], 100.0, 10.0)
    assert (found["lane"], found["name"]) == ([1, 0], ["generate", "tool"])
    assert (found["start"], found["end"], found["merged"]) == ([2.0, 1.0], [3.0, 4.0], 0)


def test_narrow_neighbours_of_one_lane_and_name_become_one_and_wide_spans_stay():
    pixel_s = 100.0 / PIXELS
    narrow = [a_span(0, at * pixel_s / 50, (at + 0.5) * pixel_s / 50) for at in range(WHOLE + 1)]
    wide = [a_span(1, 10.0, 90.0, "tool"), a_span(0, 99.0, 100.0)]
    found = spans_of([*narrow, *wide], 0.0, 100.0)
    assert len(found["lane"]) < WHOLE / 20
    assert found["merged"] == len(narrow) + len(wide) - len(found["lane"])
    assert max(found["end"]) == 100.0
    assert "tool" in found["name"]


def test_a_density_has_all_the_time_of_its_spans_and_the_last_of_them():
    draw = random.Random(0)
    spans = [a_span(lane, begin := draw.uniform(0, 50), begin + draw.uniform(0, 20)) for lane in range(5_000)]
    spans.append(a_span(5_000, 0.0, 100.0, "tail"))
    found = density_of(spans, 0.0, 100.0)
    assert found["lanes"] == 5_001
    assert found["busy"]["tail"] == [1.0] * PIXELS
    seconds = sum(found["busy"]["generate"]) * 100.0 / PIXELS
    assert seconds == pytest.approx(sum(span.end - span.start for span in spans[:-1]), rel=1e-3)
    assert max(found["busy"]["generate"][int(0.71 * PIXELS) :]) == 0.0
