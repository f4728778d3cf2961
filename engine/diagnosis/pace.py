"""Says whether a run moves, how fast, and how it ended. Pure: rows of metrics.jsonl and ages in seconds go in."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine import metric_names as metric
from engine.diagnosis.step_window import Row

RECENT = 8  # number of newest steps whose median is the pace
TIMES = 6  # a step that takes so many times the pace is a stall
LEAST_S = 60.0  # less than this is no stall, however fast the steps were


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How a run moves. step_s: the median of the newest steps, in seconds; None if none has a duration.

    age_s: seconds since the newest row, or since the run began. stalled: whether a running run stands still. sentence:
    says that the run stands still or how it ended; empty if it runs as it should.
    """

    step_s: float | None
    age_s: float
    stalled: bool = False
    sentence: str = ""


def pace_of(rows: Sequence[Row], state: str, age_s: float, ended: str | None) -> Pace:
    """Returns the pace of a run.

    state: "running", "finished" or "stopped". age_s: seconds since its newest row, or since it began if it has none.
    ended: the line with which it ended, if it left one.

    >>> rows = [{"step": step, "time/step_s": 1.1} for step in range(1, 9)]
    >>> pace_of(rows, "running", 7380.0, None).sentence
    'No step for 2 h 3 min; the last 8 took 1.1 s each.'
    """
    times = [row[metric.TIME_STEP_S] for row in rows if metric.TIME_STEP_S in row][-RECENT:]
    step_s = statistics.median(times) if times else None
    if state == "running":
        stalled = step_s is not None and age_s > max(LEAST_S, TIMES * step_s)
        sentence = ""
        if step_s is not None and stalled:
            took = f"the last {len(times)} took" if len(times) > 1 else "the last one took"
            each = " each" if len(times) > 1 else ""
            sentence = f"No step for {spelled(age_s)}; {took} {spelled(step_s)}{each}."
        elif step_s is None and age_s > LEAST_S:
            since = "its first evaluation" if rows else "it began"
            sentence = f"No step yet, {spelled(age_s)} after {since}."
        return Pace(step_s=step_s, age_s=age_s, stalled=stalled, sentence=sentence)
    last = max((int(row["step"]) for row in rows), default=0)
    where = f"after step {last}" if last else "before its first step"
    if state == "finished":
        return Pace(step_s=step_s, age_s=age_s)
    cause = ended or "it left no word, so it was killed, or its machine stopped"
    return Pace(step_s=step_s, age_s=age_s, sentence=f"The run ended {where}: {cause}")


def spelled(seconds: float) -> str:
    """Returns a duration in its two largest units.

    >>> [spelled(seconds) for seconds in (0.5, 1.123, 75.0, 7380.0, 200000.0)]
    ['0.5 s', '1.1 s', '1 min 15 s', '2 h 3 min', '2 d 7 h']
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    whole = round(seconds)
    at = next(index for index, (size, _) in enumerate(units) if whole >= size)
    (large, name), (small, lesser) = units[at], units[at + 1]
    rest = whole % large // small
    return f"{whole // large} {name}" + (f" {rest} {lesser}" if rest else "")
