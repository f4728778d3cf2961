"""One turn under way: what was read of it, and its tool calls.

Invariants
- Each call has exactly one reply; one that the trajectory's end cuts off is recorded as killed.
- A call whose infrastructure failed raises ToolLost: it is not the model's fault, and the trajectory is not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import no_foreign_cancel
from engine.ports import Tool, ToolReply
from engine.rollout.chat_template import TextStream
from engine.rollout.tool_call_parser import ToolCallParser
from engine.telemetry.timeline import Timeline
from engine.types import ToolUse

_UNANSWERED = ToolReply(outcome="killed", text="")  # the trajectory ended before the call did


class ToolLost(RuntimeError):
    """The tool's infrastructure failed."""


@dataclass(slots=True)
class PendingToolCall:
    """A call under way: when it closed, and its reply once there is one. arguments: as in ToolUse."""

    name: str
    arguments: str
    closed_at: float
    lane: int
    dispatched_at: float = 0.0
    finished_at: float = 0.0
    reply: ToolReply | None = None

    async def run(self, tool: Tool, arguments: Mapping[str, Any], timeline: Timeline) -> None:
        """Raises ToolLost."""
        self.dispatched_at = timeline.now()
        try:
            with no_foreign_cancel(f"tool {self.name!r}"):
                reply = await tool(arguments)
            if not isinstance(reply, ToolReply):
                raise TypeError(f"tool {self.name!r} must answer with a ToolReply, got {reply!r}")
            text = reply.text.encode(errors="replace").decode()  # half a surrogate pair has no tokens
            self.reply = replace(reply, text=text)  # plain, whatever string it was: the journal takes no other
        finally:
            self.finished_at = timeline.now()
        if reply.outcome == "lost":
            raise ToolLost(self.reply.text or "the sandbox lost the call")

    def use(self, turn_finished_at: float) -> ToolUse:
        """The record of it, at the turn's end."""
        reply = self.reply or _UNANSWERED
        return ToolUse(
            name=self.name,
            arguments=self.arguments,
            outcome=reply.outcome,
            response=reply.text,
            closed_at=self.closed_at,
            dispatched_at=self.dispatched_at,
            finished_at=self.finished_at,
            overlap_s=max(0.0, min(self.finished_at, turn_finished_at) - self.dispatched_at),
            executed=reply.executed,
            jailed=reply.jailed,
        )


@dataclass(slots=True)
class TurnInProgress:
    """A turn under way."""

    start: int
    read: int  # up to where the parser has read, in tokens
    queued_at: float
    stream: TextStream
    started_at: float = 0.0
    finished_at: float | None = None  # None: cut short while it was generated
    read_chars: int = 0  # of the turn's text
    text: str = ""  # once the turn has ended by itself
    replica: int = -1
    cached_tokens: int = 0
    finish: str | None = None
    calls: list[PendingToolCall] = field(default_factory=list)
    parser: ToolCallParser = field(default_factory=ToolCallParser)


def refusal(outcome: str, text: str) -> ToolReply:
    """The reply to a call that is not run."""
    return ToolReply(outcome=outcome, text=text, executed=False)
