"""Answers the page "Sandbox": the tool calls of some recorded steps."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.types import ToolUse
from engine.view.answers.trajectories import NotThere, plain
from engine.view.run_files import RunFiles

SLOWEST = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPlace:
    """The position of a call in a record. call: its number within the trajectory, over all turns."""

    step: int
    group: int
    sample: int
    call: int


def tool_calls_of(run: RunFiles, first: int, last: int) -> dict[str, Any]:
    """Returns columns over all calls of the steps from first to last, and the slowest calls whole. Raises NotThere.

    latency_s: seconds from dispatch to result, including the wait for a slot.
    """
    steps = [step for step in run.recorded.steps if first <= step <= last]
    if not steps:
        raise NotThere("no recorded step (record/steps) holds tool calls of this run")
    calls = [call for step in steps for call in _calls(run, step)]
    slowest = heapq.nlargest(SLOWEST, calls, key=lambda call: _latency_s(call[1]))
    return {
        "steps": steps,
        "name": [use.name for _, use in calls],
        "outcome": [use.outcome for _, use in calls],
        "executed": [use.executed for _, use in calls],
        "latency_s": [round(_latency_s(use), 6) for _, use in calls],
        "slowest": [plain(place) | plain(use) for place, use in slowest],
    }


def call_of(run: RunFiles, place: CallPlace) -> ToolUse:
    """Returns the call. Raises NotThere."""
    for candidate, use in _calls(run, place.step):
        if candidate == place:
            return use
    raise NotThere(
        f"step {place.step} has no recorded call {place.call} of trajectory {place.sample} in group {place.group}"
    )


def _latency_s(use: ToolUse) -> float:
    return use.finished_at - use.dispatched_at


def _calls(run: RunFiles, step: int) -> Iterator[tuple[CallPlace, ToolUse]]:
    for recorded in run.recorded.groups(step):
        for member in recorded.group.trajectories:
            for number, use in enumerate(member.tool_uses):
                yield CallPlace(step=step, group=recorded.number, sample=member.sample, call=number), use
