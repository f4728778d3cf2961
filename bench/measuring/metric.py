"""Figures of a bench: each metric says its kind, its heading and how it is written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from enum import Enum
from typing import Literal

import msgspec

Summary = Literal["median", "mean", "largest"]


class Kind(Enum):
    """What a figure is, and so what disturbs it.

    A ratio compares two figures of one run. Where other processes used the machine meanwhile, nothing says whether both
    sides were disturbed alike, so such a ratio is not shown.
    """

    TIME = "time"  # seconds on the clock
    CPU = "cpu"  # seconds of CPU
    RATE = "rate"  # so many per second
    RATIO = "ratio"
    COUNT = "count"  # no matter of speed: tokens, bytes, accuracy


class Metric(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A column of a bench's table.

    doc: what it says, for the legend. A value is shown as `value * scale` in the format `form`, followed by `unit`.
    summary: what becomes of the rounds' values.
    """

    title: str
    doc: str
    kind: Kind
    form: str = ".2f"
    scale: float = 1.0
    unit: str = ""
    summary: Summary = "median"

    def summarised(self, samples: Sequence[float]) -> float:
        match self.summary:
            case "median":
                return statistics.median(samples)
            case "mean":
                return statistics.fmean(samples)
            case "largest":
                return max(samples)

    def shown(self, value: float) -> str:
        return f"{value * self.scale:{self.form}}{self.unit}"


def seconds(title: str, doc: str, *, form: str = ".2f") -> Metric:
    return Metric(title=title, doc=doc, kind=Kind.TIME, form=form, unit=" s")


def milliseconds(title: str, doc: str, *, form: str = ".1f", kind: Kind = Kind.TIME) -> Metric:
    """Returns a metric whose value is in seconds and is shown in milliseconds."""
    return Metric(title=title, doc=doc, kind=kind, form=form, scale=1e3, unit=" ms")


def microseconds(title: str, doc: str, *, form: str = ".1f", kind: Kind = Kind.CPU) -> Metric:
    """Returns a metric whose value is in seconds and is shown in microseconds."""
    return Metric(title=title, doc=doc, kind=kind, form=form, scale=1e6, unit=" us")


def rate(title: str, doc: str, *, form: str = ",.0f") -> Metric:
    return Metric(title=title, doc=doc, kind=Kind.RATE, form=form)


def ratio(title: str, doc: str, *, form: str = ".2f", summary: Summary = "median") -> Metric:
    return Metric(title=title, doc=doc, kind=Kind.RATIO, form=form, summary=summary)


def share(title: str, doc: str, *, form: str = ".1f", kind: Kind = Kind.COUNT) -> Metric:
    """Returns a metric whose value is a share of 1 and is shown in per cent."""
    return Metric(title=title, doc=doc, kind=kind, form=form, scale=100.0, unit=" %")


def count(title: str, doc: str, *, form: str = ",.0f", summary: Summary = "median") -> Metric:
    return Metric(title=title, doc=doc, kind=Kind.COUNT, form=form, summary=summary)


def megabytes(title: str, doc: str, *, form: str = ",.1f", summary: Summary = "median") -> Metric:
    """Returns a metric whose value is in bytes and is shown in megabytes."""
    return Metric(title=title, doc=doc, kind=Kind.COUNT, form=form, summary=summary, scale=1e-6, unit=" MB")


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Returns a 95 % interval of the median from the order of the samples; of less than six, their range.

    >>> interval([5.0, 1.0, 3.0])
    (1.0, 5.0)
    >>> interval([float(n) for n in range(20)])
    (5.0, 14.0)
    """
    ordered, count_ = sorted(samples), len(samples)
    outside, below = 0.0, 0
    while True:
        outside += 2 * math.comb(count_, below) / 2**count_
        if outside > 0.05:
            break
        below += 1
    below = max(0, below - 1)
    return ordered[below], ordered[count_ - 1 - below]
