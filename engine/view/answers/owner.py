"""Finds the trajectory to which a span of the timeline belongs."""

from __future__ import annotations

from typing import Any

from engine.recording.outlines import TurnOutline
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles

NEAR_S = 2e-5  # the page rounds the times of spans to 1e-5 s
LATE_S = 0.1  # the most by which the span of an agent's request, or of a wait for calls, ends after them
LATER = 4  # steps after the last one shown in which a trajectory may be trained


def owner_of(run: RunFiles, first: int, last: int, start: float, end: float) -> dict[str, Any]:
    """Returns the step, group and sample of the trajectory that has a turn, a wait or a tool call of these times.

    first, last: the steps in whose timeline the span is. Raises NotThere.
    """
    for step in run.recorded.steps:
        if not first <= step <= last + LATER:
            continue
        for recorded in run.recorded.outlines(step):
            for member in recorded.group.trajectories:
                if not member.started_at - NEAR_S <= start <= end <= member.finished_at + NEAR_S:
                    continue
                if any(_has(turn, start, end) for turn in member.all_turns):
                    return {"step": step, "group": recorded.number, "sample": member.sample}
    raise NotThere(f"no recorded trajectory of steps {first} to {last} has a span of these times")


def _has(turn: TurnOutline, start: float, end: float) -> bool:
    """Returns whether a span is the turn, one of its calls, or the wait for them.

    The span of a turn that an agent asked for is that of the request, from its queue to the end of the answer.
    """
    times = [(turn.started_at, turn.finished_at, NEAR_S), (turn.queued_at, turn.finished_at, LATE_S)]
    times += [(use.dispatched_at, use.finished_at, NEAR_S) for use in turn.tool_uses]
    if turn.tool_uses:
        last = max(use.finished_at for use in turn.tool_uses)
        times.append((turn.finished_at, max(turn.finished_at, last), LATE_S))
    return any(abs(begin - start) <= NEAR_S and abs(finish - end) <= slack_s for begin, finish, slack_s in times)
