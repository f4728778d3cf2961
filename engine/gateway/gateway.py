"""The gateway: sessions over a fleet, by key. `engine.gateway.http` is how they are reached.

Invariant: a session that nobody uses ends, and its KV blocks are free; there are never more than the configured ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from engine.fleet.fleet import Fleet
from engine.gateway.lineage import Chats, Lineages
from engine.gateway.requests import BadRequest, ChatRequest
from engine.gateway.session import Counts, Session, SessionRules
from engine.rollout.chat_template import ChatTemplate, TemplateError
from engine.telemetry.timeline import Timeline

KINDS = 100  # of refusals that are told apart
SHOWN = 5  # of these, in a line
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """max_sessions: open at once. idle_s: after so many seconds without a request one that clients began ends.

    rules: of sessions that clients begin themselves, by a key that is not open; None: they may not.
    """

    max_sessions: int = 4096
    idle_s: float = 600.0
    rules: SessionRules | None = None

    def __post_init__(self) -> None:
        for name in ("max_sessions", "idle_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class TooManySessions(RuntimeError):
    """No other session can be opened now."""


class Gateway:
    """`open` and `close` are for who owns a session, `session` and `alone` for requests that name one or none.

    note: told in a line what the user should know.
    """

    def __init__(
        self,
        fleet: Fleet,
        chat: ChatTemplate,
        timeline: Timeline,
        config: GatewayConfig,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        self.fleet = fleet
        self.chat = chat
        self.timeline = timeline
        self.config = config
        self.counts = Counts()
        self._note = note
        self.refusals: Counter[str] = Counter()
        """Requests that were refused, by the part of the request that was wrong."""
        self._dropped_agents = 0
        self._chats = Chats(chat)
        self._sessions: dict[str, Session] = {}
        self._owned: set[str] = set()
        self._groups = count(-1, -1)  # of sessions that clients begin: those of training count from 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self,
        key: str,
        rules: SessionRules,
        *,
        on_tokens: Callable[[int], None] = lambda tokens: None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Session:
        """A session that lasts until `close`. on_tokens: told how many tokens were sampled, as they come. waiting:
        entered while a request waits for a place on a replica. Raises ValueError for a key that is in use, and
        TooManySessions.
        """
        session = self._open(key, rules, on_tokens, waiting)
        self._owned.add(key)
        return session

    def session(self, key: str) -> Session:
        """The session of this key, or where clients may begin them a new one. Raises KeyError and TooManySessions."""
        if key not in self._sessions:
            if self.config.rules is None:
                raise KeyError(key)
            return self._open(key, self._rules())
        return self._sessions[key]

    def find(self, key: str) -> Session | None:
        """The session of this key, if it is open."""
        return self._sessions.get(key)

    def alone(self) -> Session:
        """For a request that names no session; the caller closes it. Raises BadRequest where each must name one."""
        if self.config.rules is None:
            raise BadRequest("session", "each request must name the session that it belongs to")
        return self._made("", self._rules())

    def count_tokens(self, request: ChatRequest) -> int:
        """How many tokens the model would read. Raises BadRequest."""
        try:
            return len(Lineages(self._chats, lambda: 0).open(request.messages, request.tools, 0.0).ids)
        except (ValueError, TemplateError) as error:
            raise BadRequest("messages", str(error)) from error

    def refuse(self, message: str, kind: str, session: Session | None, *, fault: bool) -> None:
        """A request was answered with an error of the client's. The first one of a kind is logged, and all are counted.
        fault: it was a wrong request, not one beyond the budget of its session.
        """
        if session is not None:
            session.last_refusal = message
        if not fault:
            return
        if kind not in self.refusals and len(self.refusals) >= KINDS:
            kind = "others"
        if not self.refusals[kind]:
            self._note(f"a client's request was refused: {message[:300]!r}; more of this kind are only counted")
        self.refusals[kind] += 1
        if session is None:
            self.counts.refused += 1
        else:
            session.count_up(refused=1)

    def refused_line(self) -> str | None:
        """How many requests were refused and why, most often first; None: none was."""
        if not self.refusals:
            return None
        kinds = ", ".join(f"{number} for {kind!r}" for kind, number in self.refusals.most_common(SHOWN))
        return f"{self.counts.refused} requests of agents were refused: {kinds}"

    def drop_agent(self, prompt_id: str, seconds: float) -> None:
        """Counts an agent that went on for so long after it was cancelled, and was dropped. The first one is told."""
        self._dropped_agents += 1
        if self._dropped_agents == 1:
            self._note(
                f"an agent went on for {seconds:g} s after it was cancelled, on prompt {prompt_id}, and was dropped; "
                "more are only counted. Fix: let CancelledError leave the agent"
            )

    def dropped_line(self) -> str | None:
        """How many agents were dropped; None: none was."""
        if not self._dropped_agents:
            return None
        return f"{self._dropped_agents} agents went on after they were cancelled, and were dropped"

    def close(self, key: str) -> None:
        """Nothing if it is not open."""
        self._owned.discard(key)
        session = self._sessions.pop(key, None)
        if session is not None:
            session.close()

    def expire(self) -> None:
        """Ends the sessions of clients that have been idle for too long."""
        now = self.timeline.now()
        for key, session in [*self._sessions.items()]:
            if key not in self._owned and not session.in_flight and now - session.used_at > self.config.idle_s:
                self.close(key)

    def closing(self) -> None:
        """Ends all sessions."""
        for key in [*self._sessions]:
            self.close(key)

    def _rules(self) -> SessionRules:
        assert self.config.rules is not None
        return replace(self.config.rules, group=next(self._groups))

    def _open(self, key: str, rules: SessionRules, *owner: Any) -> Session:
        if key in self._sessions:
            raise ValueError(f"session {key!r} is open already")
        if len(self._sessions) >= self.config.max_sessions:
            self.expire()
        if len(self._sessions) >= self.config.max_sessions:
            raise TooManySessions(f"{len(self._sessions)} sessions are open, the most that there may be")
        session = self._sessions[key] = self._made(key, rules, *owner)
        return session

    def _made(self, key: str, rules: SessionRules, *owner: Any) -> Session:
        return Session(key, rules, self.fleet, self._chats, self.timeline, self.counts, *owner)
