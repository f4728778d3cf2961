"""A turn in progress: how far it was read, and its tool calls.

Invariants
- Each call has exactly one reply; a call that the trajectory's end cuts off is recorded as killed.
- A call whose infrastructure failed raises ToolLost: it is not the model's fault, and the trajectory is not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import add_note, no_foreign_cancel
from engine.ports import Tool, ToolReply
from engine.rollout.chat_template import TextStream
from engine.rollout.tool_call_parser import ToolCallParser
from engine.telemetry.timeline import Timeline
from engine.types import Placement, ToolUse
from engine.user_parts import WrongPart, call, place_of

_UNANSWERED = ToolReply(outcome="killed", text="")  # the trajectory ended before the call did


class ToolLost(RuntimeError):
    """The tool's infrastructure failed."""


@dataclass(kw_only=True, slots=True)
class PendingToolCall:
    """A call from the token that closed it to its reply. arguments: as in ToolUse. lane: its row in the timeline,
    None for a call that is not run.
    """

    name: str
    arguments: str
    closed_at: float
    dispatched_at: float
    finished_at: float
    lane: int | None = None
    reply: ToolReply | None = None

    @classmethod
    def closed(cls, *, name: str, arguments: str, now: float, lane: int) -> PendingToolCall:
        """Returns a call that is about to `run`."""
        return cls(name=name, arguments=arguments, closed_at=now, dispatched_at=now, finished_at=now, lane=lane)

    @classmethod
    def malformed(cls, *, reason: str, now: float) -> PendingToolCall:
        """Returns a call that could not be decoded; its reply tells the model why."""
        return cls._answered(
            name="", arguments="{}", now=now, reply=_not_run(outcome="malformed", text=f"FormatError: {reason}")
        )

    @classmethod
    def refused(cls, *, name: str, arguments: str, reason: str, now: float) -> PendingToolCall:
        """Returns a call that is answered with an error and not run."""
        return cls._answered(name=name, arguments=arguments, now=now, reply=_not_run(outcome="error", text=reason))

    @classmethod
    def _answered(cls, *, name: str, arguments: str, now: float, reply: ToolReply) -> PendingToolCall:
        return cls(name=name, arguments=arguments, closed_at=now, dispatched_at=now, finished_at=now, reply=reply)

    async def run(self, tool: Tool, arguments: Mapping[str, Any], timeline: Timeline) -> None:
        """Runs the tool and keeps its reply. Raises ToolLost, and WrongPart for an answer that is no ToolReply."""
        self.dispatched_at = timeline.now()
        try:
            with no_foreign_cancel(f"tool {self.name!r}"):
                reply = await call("tool", tool, arguments)
            if not isinstance(reply, ToolReply):
                raise WrongPart(
                    f"the tool {self.name}, {place_of(tool)}, answered {reply!r:.100} to {arguments!r:.100}. "
                    'Fix: return ToolReply(outcome="ok", text=...)'
                )
            text = reply.text.encode(errors="replace").decode()  # half a surrogate pair has no tokens
            self.reply = replace(reply, text=text)  # now a plain str; the journal takes no subclass
        except WrongPart:
            raise
        except Exception as error:
            add_note(error, f"in the tool {self.name}, {place_of(tool)}, called with {arguments!r:.200}")
            raise
        finally:
            self.finished_at = timeline.now()
        if reply.outcome == "lost":
            raise ToolLost(self.reply.text or "the sandbox lost the call")

    def use(self, turn_finished_at: float) -> ToolUse:
        """Returns the record of the call, at the turn's end."""
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
            queue_s=reply.queue_s,
        )


@dataclass(kw_only=True, slots=True)
class TurnInProgress:
    start: int
    read: int  # the position of the first token that the parser has not read
    queued_at: float
    stream: TextStream
    started_at: float = 0.0
    finished_at: float | None = None  # None: cut short while it was generated
    read_chars: int = 0  # characters of the turn's text that the parser has read
    text: str = ""  # set once the turn has ended by itself
    replica: int = -1
    cached_tokens: int = 0
    finish: str | None = None
    placed: list[Placement] = field(default_factory=list)
    calls: list[PendingToolCall] = field(default_factory=list)
    parser: ToolCallParser = field(default_factory=ToolCallParser)


def _not_run(*, outcome: str, text: str) -> ToolReply:
    return ToolReply(outcome=outcome, text=text, executed=False)
