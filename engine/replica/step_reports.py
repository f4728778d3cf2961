"""Decides which steps of an engine are reported to the node. Pure: the state after a step goes in, a count comes out.

A report costs the node's event loop about as much as ten tokens, and most steps change little: each running request has
one token more.

Invariants
- Each step is in exactly one report, which says for how many it stands. A pause is not in the middle of a report.
- While requests wait for a place, and when one is preempted, every step is reported. A report is never more than
  EVERY_S older than the newest step, nor are its blocks and requests further from the truth than the shares below.
"""

from __future__ import annotations

from dataclasses import dataclass

PREEMPTED = "preempted"  # in a report: requests that lost their blocks since the report before
EVERY_S = 0.1
BLOCKS_SHARE = 1 / 64  # of the KV cache
RUNNING_SHARE = 1 / 16  # of the running requests, of which some begin or end in most steps


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine after a step. usage: share of its KV blocks in use. preempted: requests that lost theirs in it."""

    usage: float
    running: int
    waiting: int
    preempted: int = 0


class StepReports:
    """Counts the steps since the last report.

    >>> reports = StepReports()
    >>> calm, full = EngineState(0.5, 8, 0), EngineState(0.6, 8, 0)
    >>> [reports.step(state, now) for state, now in [(calm, 0.0), (calm, 0.02), (calm, 0.04), (full, 0.06)]]
    [1, 0, 0, 3]
    """

    def __init__(self) -> None:
        self._last: EngineState | None = None
        self._at = 0.0
        self._steps = 0

    def step(self, state: EngineState, now: float, *, last: bool = False) -> int:
        """Notes a step that ended at `now` (seconds). Returns how many steps a report stands for, 0 if none is due.

        last: a pause follows, which must not count as time of the steps before it.
        """
        self._steps += 1
        if not last and not self._due(state, now):
            return 0
        steps, self._steps = self._steps, 0
        self._last, self._at = state, now
        return steps

    def _due(self, state: EngineState, now: float) -> bool:
        last = self._last
        if last is None or now - self._at >= EVERY_S:
            return True
        if state.waiting or last.waiting or state.preempted or not state.running:
            return True
        if abs(state.usage - last.usage) > BLOCKS_SHARE:
            return True
        return abs(state.running - last.running) > RUNNING_SHARE * last.running
