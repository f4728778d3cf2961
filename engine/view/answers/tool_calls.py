"""Answers the page "Sandbox": the tool calls of some recorded steps."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.recording.damage import damage
from engine.recording.outlines import CallOutline, RecordedOutline
from engine.types import ToolUse
from engine.view.answers.trajectories import NotThere, plain
from engine.view.run_files import RunFiles

SLOWEST = 20
CALLS = 100_000  # with so many calls, no older step is read
BINS = 24  # of the histogram


class CallPlace(NamedTuple):
    """The position of a call in a record. call: its number within the trajectory, over all turns."""

    step: int
    group: int
    sample: int
    call: int


def tool_calls_of(run: RunFiles, first: int, last: int) -> dict[str, Any]:
    """Returns figures over the calls of the steps from first to last, and the slowest calls whole. Raises NotThere.

    damage: a sentence for each step of which not all groups can be read, as their calls are not counted.
    asked: how many of these steps are recorded; steps: the newest of them, as many as hold CALLS calls. kinds: calls by
    tool and outcome; their seconds are quantiles from dispatch to result, and medians of the part before they ran
    (queue) and of the rest (run), None where that was not measured.
    """
    asked = [step for step in run.recorded.steps if first <= step <= last]
    if not asked:
        raise NotThere("no recorded step (record/steps) holds tool calls of this run")
    steps: list[int] = []
    calls: list[tuple[CallPlace, CallOutline]] = []
    lost: list[str] = []
    for step in reversed(asked):
        if len(calls) >= CALLS:
            break
        steps.insert(0, step)
        groups = run.recorded.outlines(step)
        calls += _calls(groups)
        lost = [*damage(run.recorded, step, len(groups)), *lost]
    slowest = heapq.nlargest(SLOWEST, calls, key=lambda call: _latency_s(call[1]))
    return {
        "asked": len(asked),
        "steps": steps,
        "damage": lost,
        "count": len(calls),
        "kinds": _kinds([use for _, use in calls]),
        "histogram": _histogram([_latency_s(use) for _, use in calls]),
        "slowest": [place._asdict() | plain(use) for place, use in _whole(run, [place for place, _ in slowest])],
    }


def call_of(run: RunFiles, place: CallPlace) -> ToolUse:
    """Returns the call. Raises NotThere."""
    for _, use in _whole(run, [place]):
        return use
    raise NotThere(
        f"step {place.step} has no recorded call {place.call} of trajectory {place.sample} in group {place.group}"
    )


def _latency_s(use: CallOutline) -> float:
    return use.finished_at - use.dispatched_at


def _calls(groups: Sequence[RecordedOutline]) -> Iterator[tuple[CallPlace, CallOutline]]:
    for recorded in groups:
        for member in recorded.group.trajectories:
            for number, use in enumerate(member.tool_uses):
                yield CallPlace(recorded.step, recorded.number, member.sample, number), use


def _whole(run: RunFiles, places: Sequence[CallPlace]) -> Iterator[tuple[CallPlace, ToolUse]]:
    """Yields the calls of some places with their texts; a call that is not there is left out."""
    for place in places:
        recorded = run.recorded.group(place.step, place.group)
        members = recorded.group.trajectories if recorded is not None else ()
        uses = next((member.tool_uses for member in members if member.sample == place.sample), [])
        if 0 <= place.call < len(uses):
            yield place, uses[place.call]


def _kinds(uses: Sequence[CallOutline]) -> list[dict[str, Any]]:
    """Returns the calls by tool, outcome and whether they ran, the most frequent kind first."""
    kinds: dict[tuple[str, str, bool], list[CallOutline]] = defaultdict(list)
    for use in uses:
        kinds[use.name, use.outcome, use.executed].append(use)
    return [
        {
            "name": name,
            "outcome": outcome,
            "executed": executed,
            "count": len(own),
            **_seconds(own),
        }
        for (name, outcome, executed), own in sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    ]


def _seconds(own: Sequence[CallOutline]) -> dict[str, float | None]:
    quantiles = np.quantile([_latency_s(use) for use in own], (0.5, 0.9, 0.99)).tolist()
    queued = [(use.queue_s, _latency_s(use) - use.queue_s) for use in own if use.queue_s is not None]
    medians = np.median(queued, axis=0).tolist() if queued else (None, None)
    return dict(zip(("p50_s", "p90_s", "p99_s", "queue_s", "run_s"), (*quantiles, *medians), strict=True))


def _histogram(latencies_s: Sequence[float]) -> dict[str, Any] | None:
    """Returns the counts of BINS bins that are equally wide on a logarithmic axis, and their edges in seconds."""
    positive = [seconds for seconds in latencies_s if seconds > 0]
    if not positive:
        return None
    low, high = min(positive), max(positive)
    counts, edges = np.histogram(np.log(positive), BINS, (np.log(low), max(np.log(high), np.log(low) + 0.1)))
    return {"counts": counts.tolist(), "edges_s": np.exp(edges).tolist()}
