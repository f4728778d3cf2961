"""The tool calls of some recorded steps, for the page "Sandbox"."""

from __future__ import annotations

import heapq
from typing import Any

from engine.recording.records import Call
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles

SLOWEST = 20


def tool_calls_of(run: RunFiles, first: int, last: int) -> dict[str, Any]:
    """Columns over all calls of the steps from first to last, and the slowest ones whole. Raises NotThere.

    latency_s: from dispatch to result, waiting for a slot included.
    """
    steps = [step for step in run.recorded.steps if first <= step <= last]
    if not steps:
        raise NotThere("no recorded step (record/steps) holds tool calls of this run")
    calls = [found for step in steps for found in _calls(run, step)]
    start = min((call.dispatched_at for _, call in calls), default=0.0)
    slowest = heapq.nlargest(SLOWEST, calls, key=lambda found: found[1].finished_at - found[1].dispatched_at)
    return {
        "steps": steps,
        "at": [round(call.dispatched_at - start, 4) for _, call in calls],
        "latency_s": [round(call.finished_at - call.dispatched_at, 6) for _, call in calls],
        "overlap_s": [round(call.overlap_s, 6) for _, call in calls],
        "tool": [call.name for _, call in calls],
        "outcome": [call.outcome for _, call in calls],
        "executed": [call.executed for _, call in calls],
        "slowest": [
            where
            | {
                "tool": call.name,
                "outcome": call.outcome,
                "latency_s": call.finished_at - call.dispatched_at,
                "arguments": call.arguments,
                "reply": call.reply,
            }
            for where, call in slowest
        ],
    }


def call_of(run: RunFiles, step: int, group: int, sample: int, call: int) -> Call:
    """The call-th call of a trajectory, over its turns. Raises NotThere."""
    for where, found in _calls(run, step):
        if where == {"step": step, "group": group, "sample": sample, "call": call}:
            return found
    raise NotThere(f"step {step} has no recorded call {call} of trajectory {sample} in group {group}")


def _calls(run: RunFiles, step: int) -> list[tuple[dict[str, int], Call]]:
    """Each with where it is: step, group, sample, and its number within the trajectory."""
    return [
        ({"step": step, "group": group.group, "sample": member.sample, "call": number}, call)
        for group in run.recorded.groups(step)
        for member in group.trajectories
        for number, call in enumerate(call for sequence in member.sequences for turn in sequence for call in turn.calls)
    ]
