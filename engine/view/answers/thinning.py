"""Makes many spans few enough for a screen, without losing the time that they cover. Pure.

A track of up to LANES lanes keeps its lanes: spans of one lane and name that lie within a pixel of each other become
one. A track of more lanes becomes a density: how many of its lanes are busy, by name and pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.telemetry.timeline import SpanEvent

PIXELS = 2_000  # of the widest screen that is served
LANES = 260
WHOLE = 10_000  # spans of a track that are sent as they are


def spans_of(spans: Sequence[SpanEvent], start: float, seconds: float) -> dict[str, Any]:
    """Returns the spans of a track as columns, thinned if there are more than WHOLE.

    start: the time that becomes 0. seconds: the length of what is shown. merged: how many spans are not there by
    themselves.
    """
    kept = spans if len(spans) <= WHOLE else _merged(spans, seconds / PIXELS)
    return {
        "lane": [span.lane for span in kept],
        "name": [span.name for span in kept],
        "start": [round(span.start - start, 5) for span in kept],
        "end": [round(span.end - start, 5) for span in kept],
        "args": [span.args for span in kept],
        "merged": len(spans) - len(kept),
    }


def lanes_of(spans: Sequence[SpanEvent]) -> int:
    return 1 + max((span.lane for span in spans), default=0)


def _merged(spans: Sequence[SpanEvent], pixel_s: float) -> list[SpanEvent]:
    last: dict[int, int] = {}  # by lane, the place of its newest span
    kept: list[SpanEvent] = []
    for span in sorted(spans, key=lambda span: span.start):
        place = last.get(span.lane)
        if place is not None:
            before = kept[place]
            if before.name == span.name and span.end - before.start < pixel_s:
                kept[place] = before._replace(end=max(before.end, span.end), args={})
                continue
        last[span.lane] = len(kept)
        kept.append(span)
    return kept


def density_of(spans: Sequence[SpanEvent], start: float, seconds: float) -> dict[str, Any]:
    """Returns how many lanes are busy, by name and pixel: {"lanes", "busy": {name: [PIXELS means]}}.

    >>> from engine.telemetry.timeline import SpanEvent
    >>> spans = [SpanEvent("t", lane, "generate", 0.0, 5.0, {}) for lane in (0, 1)]
    >>> busy = density_of(spans, 0.0, 10.0)["busy"]["generate"]
    >>> busy[0], busy[PIXELS // 2 - 1], busy[-1]
    (2.0, 2.0, 0.0)
    """
    edges = np.linspace(0.0, seconds, PIXELS + 1)
    names = sorted({span.name for span in spans})
    busy: dict[str, list[float]] = {}
    for name in names:
        begins = np.sort(np.asarray([span.start for span in spans if span.name == name]) - start)
        ends = np.sort(np.asarray([span.end for span in spans if span.name == name]) - start)
        passed = _seconds_since(begins, edges) - _seconds_since(ends, edges)
        busy[name] = np.round(np.diff(passed) / max(1e-9, seconds / PIXELS), 2).tolist()
    return {"lanes": lanes_of(spans), "busy": busy}


def _seconds_since(moments: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns for each edge the seconds that have passed since the moments before it, summed. moments: sorted."""
    sums = np.concatenate([[0.0], np.cumsum(moments)])
    count = np.searchsorted(moments, edges, side="right")
    return np.asarray(count * edges - sums[count], np.float64)
