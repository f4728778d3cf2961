"""The gateway: sessions over a fleet, by key. `engine.gateway.http` makes them reachable.

Invariant: there are never more sessions than configured, and an idle one ends, which frees its KV blocks.
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
from engine.telemetry.in_flight import Watched
from engine.telemetry.timeline import Timeline
from sandbox.require import positive, require_fields

KINDS = 100  # kinds of refusals that are counted apart
SHOWN = 5  # kinds of refusals that a line names
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """How many sessions there may be, and whether clients may begin them.

    max_sessions: how many are open at once. idle_s: after so many seconds without a request, a session that a client
    began ends. rules: the rules of sessions that clients begin by using a new key; None: clients may not begin any.
    """

    max_sessions: int = 4096
    idle_s: float = 600.0
    rules: SessionRules | None = None

    def __post_init__(self) -> None:
        require_fields(self, positive, "max_sessions", "idle_s")


class TooManySessions(RuntimeError):
    """No other session can be opened now."""


class Gateway:
    """The open sessions. Owners use `open` and `close`; requests use `session` and `alone`.

    note: is called with each line that the user should see.
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
        """Counts refused requests by the part of the request that was wrong."""
        self.left_out: Counter[str] = Counter()
        """Counts offered tools of OpenAI's servers that were left out, by their kind."""
        self._dropped_agents = 0
        self._chats = Chats(chat)
        self._sessions: dict[str, Session] = {}
        self._owned: set[str] = set()
        self._groups = count(-1, -1)  # for sessions that clients begin; those of training count up from 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self,
        key: str,
        rules: SessionRules,
        *,
        on_tokens: Callable[[int], None] = lambda tokens: None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        watched: Watched | None = None,
    ) -> Session:
        """Opens a session that lasts until `close`.

        on_tokens: is called with the number of sampled tokens as they come. waiting: is entered while a request waits
        for a place on a replica. watched: is told what the session does. Raises ValueError for a key in use, and
        TooManySessions.
        """
        session = self._open(key, rules, on_tokens, waiting, watched)
        self._owned.add(key)
        return session

    def session(self, key: str) -> Session:
        """Returns the session of a key, a new one if clients may begin them. Raises KeyError and TooManySessions."""
        if key not in self._sessions:
            if self.config.rules is None:
                raise KeyError(key)
            return self._open(key, self._rules())
        return self._sessions[key]

    def find(self, key: str) -> Session | None:
        """Returns the session of a key, None if it is not open."""
        return self._sessions.get(key)

    def alone(self) -> Session:
        """Returns a session for a request that names none; the caller closes it.

        Raises BadRequest if clients may not begin sessions.
        """
        if self.config.rules is None:
            raise BadRequest("session", "each request must name the session that it belongs to")
        return self._made("", self._rules())

    def count_tokens(self, request: ChatRequest, session: Session | None = None) -> int:
        """Returns how many tokens the model would read. session: the one that goes on, if any. Raises BadRequest."""
        lineages = Lineages(self._chats, lambda: 0) if session is None else session.lineages
        try:
            return lineages.count(request.messages, request.tools)
        except (ValueError, TemplateError) as error:
            raise BadRequest("messages", str(error)) from error

    def refuse(self, message: str, kind: str, session: Session | None, *, fault: bool) -> None:
        """Counts a request that was answered with an error of the client's, and reports the first one of each kind.

        fault: whether the request was wrong, rather than beyond the budget of its session.
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

    def leave_out(self, kind: str) -> None:
        """Counts an offered tool that the model is not shown, and reports the first one of each kind."""
        if not self.left_out[kind]:
            self._note(f"OpenAI's tool {kind!r} was offered, which cannot be called here; more are only counted")
        self.left_out[kind] += 1

    def refused_line(self) -> str | None:
        """Returns a line with the number of refused requests and the commonest reasons; None if there were none."""
        if not self.refusals:
            return None
        kinds = ", ".join(f"{number} for {kind!r}" for kind, number in self.refusals.most_common(SHOWN))
        return f"{self.counts.refused} requests of agents were refused: {kinds}"

    def overruled_line(self) -> str | None:
        """Returns a line with the sampling fields that sessions overruled; None if there were none."""
        if not self.counts.overruled_fields:
            return None
        names = ", ".join(f"{number} by {name!r}" for name, number in self.counts.overruled_fields.most_common(SHOWN))
        return f"{self.counts.overruled} requests of agents asked for another sampling than the run's: {names}"

    def drop_agent(self, prompt_id: str, seconds: float) -> None:
        """Counts an agent that was dropped because it ran on for so long after its cancellation; reports the first."""
        self._dropped_agents += 1
        if self._dropped_agents == 1:
            self._note(
                f"an agent ran on for {seconds:g} s after it was cancelled, on prompt {prompt_id}, and was dropped; "
                "more are only counted. Fix: let CancelledError leave the agent"
            )

    def dropped_line(self) -> str | None:
        """Returns a line with the number of dropped agents; None if there were none."""
        if not self._dropped_agents:
            return None
        return f"{self._dropped_agents} agents ran on after they were cancelled, and were dropped"

    def close(self, key: str) -> None:
        """Closes a session; does nothing if it is not open."""
        self._owned.discard(key)
        session = self._sessions.pop(key, None)
        if session is not None:
            session.close()

    def close_unused(self, key: str) -> None:
        """Closes a session that a client began, if no request uses it and no turn was finished in it."""
        session = self._sessions.get(key)
        if session is not None and key not in self._owned and not session.users and not session.lineages.all:
            self.close(key)

    def expire(self) -> None:
        """Closes the sessions of clients that were idle for too long."""
        now = self.timeline.now()
        for key, session in [*self._sessions.items()]:
            if key not in self._owned and not session.in_flight and now - session.used_at > self.config.idle_s:
                self.close(key)

    def closing(self) -> None:
        """Closes all sessions."""
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
