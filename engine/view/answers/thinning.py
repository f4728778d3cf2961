"""Makes many spans, engine steps and idle stretches few enough for a screen, without losing the time that they cover.

Pure. A track with up to LANES lanes that are busy keeps its lanes: spans of one lane and name that lie within a pixel
of each other become one. A track of more lanes becomes a density: how many of its lanes are busy, by name and pixel.

Shape legend: S spans, P pixels, N engine steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.recording.columns import Numbers, SpanColumns
from engine.recording.records import Doubles
from engine.telemetry.idle_clock import Interval

PIXELS = 2_000  # of the widest screen that is served
LANES = 260
WHOLE = 10_000  # spans of a track, or idle stretches, that are sent as they are
POINTS = 60_000  # engine steps of all replicas that are sent


def in_view(spans: SpanColumns, start: float, end: float) -> Numbers:
    """Returns the numbers of the spans that overlap a stretch of time."""
    return np.flatnonzero((spans.end_S >= start) & (spans.start_S <= end))


def spans_of(spans: SpanColumns, shown_S: Numbers, lanes_S: Numbers, zero: float, seconds: float) -> dict[str, Any]:
    """Returns some spans as columns, thinned if there are more than WHOLE.

    shown_S: their numbers, and lanes_S the lane of each on the screen. zero: the time that becomes 0. seconds: the
    length of what is shown. count: how many spans there are, of which `merged` are not there by themselves.
    """
    kept_S = np.arange(len(shown_S))
    end_S = spans.end_S[shown_S]
    alone_S = np.ones(len(shown_S), np.bool_)
    pixel_s = seconds / PIXELS
    while len(kept_S) > WHOLE:
        kept_S, end_S, alone_S = _merged(spans, shown_S, lanes_S, pixel_s)
        pixel_s *= 2
    numbers_S = shown_S[kept_S]
    return {
        "lane": lanes_S[kept_S].tolist(),
        "name": [spans.names[name] for name in spans.name_S[numbers_S].tolist()],
        "start": np.round(spans.start_S[numbers_S] - zero, 5).tolist(),
        "end": np.round(end_S - zero, 5).tolist(),
        "args": [spans.args(span) if alone else {} for span, alone in zip(numbers_S.tolist(), alone_S, strict=True)],
        "count": len(shown_S),
        "merged": len(shown_S) - len(kept_S),
    }


def _merged(
    spans: SpanColumns, shown_S: Numbers, lanes_S: Numbers, pixel_s: float
) -> tuple[Numbers, Doubles, NDArray[np.bool_]]:
    """Returns the first span of each row of neighbours, where the row ends, and whether the span is alone in it.

    A row begins with another lane or name, after a gap of a pixel, and with each span that is wider than a pixel.
    """
    order_S = np.lexsort((spans.start_S[shown_S], lanes_S))
    numbers_S = shown_S[order_S]
    lane_S, name_S = lanes_S[order_S], spans.name_S[numbers_S]
    start_S, end_S = spans.start_S[numbers_S], spans.end_S[numbers_S]
    wide_S = end_S - start_S >= pixel_s
    begins_S = np.ones(len(order_S), np.bool_)
    same_S = (lane_S[1:] == lane_S[:-1]) & (name_S[1:] == name_S[:-1])
    begins_S[1:] = ~same_S | wide_S[1:] | wide_S[:-1] | (start_S[1:] - end_S[:-1] >= pixel_s)
    first = np.flatnonzero(begins_S)
    sizes = np.diff(np.append(first, len(order_S)))
    return order_S[first], np.maximum.reduceat(end_S, first), sizes == 1


def density_of(spans: SpanColumns, shown_S: Numbers, start: float, seconds: float) -> dict[str, Any]:
    """Returns how many lanes are busy, by name and pixel: {"lanes", "busy": {name: [PIXELS means]}}.

    lanes: how many different lanes the spans have.
    """
    edges = np.linspace(0.0, seconds, PIXELS + 1)
    begins_S = np.clip(spans.start_S[shown_S] - start, 0.0, seconds)
    ends_S = np.clip(spans.end_S[shown_S] - start, 0.0, seconds)
    busy: dict[str, list[float]] = {}
    for number, name in enumerate(spans.names):
        own_S = spans.name_S[shown_S] == number
        if own_S.any():
            passed = _seconds_since(np.sort(begins_S[own_S]), edges) - _seconds_since(np.sort(ends_S[own_S]), edges)
            busy[name] = np.round(np.diff(passed) / max(1e-9, seconds / PIXELS), 2).tolist()
    return {"lanes": len(np.unique(spans.lane_S[shown_S])), "busy": busy}


def _seconds_since(moments: Doubles, edges: Doubles) -> Doubles:
    """Returns for each edge the seconds that have passed since the moments before it, summed. moments: sorted."""
    sums = np.concatenate([[0.0], np.cumsum(moments)])
    count = np.searchsorted(moments, edges, side="right")
    return np.asarray(count * edges - sums[count], np.float64)


def engine_steps_of(columns: Mapping[str, NDArray[Any]], start: float, end: float, most: int) -> dict[str, Any]:
    """Returns the engine steps of a stretch of time, at most `most` of them: each stands for all within a part of it.

    columns: "at", ascending, and others, [N]. Of preempted and prefilled it has sums, of the others maxima.
    """
    shown_N = (columns["at"] >= start) & (columns["at"] <= end)
    own = {name: values_N[shown_N] for name, values_N in columns.items()}
    count = len(own["at"])
    if count <= most:
        return own
    part_N = np.minimum(most - 1, ((own["at"] - start) / max(1e-9, end - start) * most).astype(np.int64))
    first = np.flatnonzero(np.diff(part_N, prepend=-1))
    added = ("preempted", "prefilled")
    return {name: (np.add if name in added else np.maximum).reduceat(values_N, first) for name, values_N in own.items()}


def idle_of(stretches: Sequence[Interval], start: float, end: float, most: int) -> list[tuple[str, float, float]]:
    """Returns what a replica did in a stretch of time, as (cause, from, to).

    Neighbours of one cause become one. If there are more than `most`, those shorter than a part of the time are put
    together: a cause has the same seconds in each part, in one piece.
    """
    own: list[tuple[str, float, float]] = []
    for each in stretches:
        if each.end <= start or each.start >= end:
            continue
        begin, finish = max(start, each.start), min(end, each.end)
        if own and own[-1][0] == each.cause and own[-1][2] == begin:
            begin = own.pop()[1]
        own.append((each.cause, begin, finish))
    return own if len(own) <= most else list(_joined(own, (end - start) / most))


def _joined(own: Sequence[tuple[str, float, float]], part_s: float) -> Iterator[tuple[str, float, float]]:
    seconds: dict[str, float] = defaultdict(float)  # by cause, of the short ones that are not out yet
    at = 0.0  # where those began

    def pieces() -> Iterator[tuple[str, float, float]]:
        begin = at
        for cause, length in seconds.items():
            yield cause, begin, begin + length
            begin += length
        seconds.clear()

    for cause, begin, finish in own:
        if seconds and (finish - begin >= part_s or finish - at >= part_s):
            yield from pieces()
        if finish - begin >= part_s:
            yield cause, begin, finish
            continue
        if not seconds:
            at = begin
        seconds[cause] += finish - begin
    yield from pieces()


def largest_of(at_N: Doubles, values_N: Doubles, start: float, end: float) -> list[list[float]]:
    """Returns [seconds since start, value] of a stretch of time, the largest value of each pixel."""
    steps = engine_steps_of({"at": at_N, "value": values_N}, start, end, PIXELS)
    return np.stack([np.round(steps["at"] - start, 5), np.round(steps["value"], 6)], axis=1).tolist()
