"""Agents of their own as a source of rollouts: a coroutine or a program that talks to the gateway as it likes.

    async def agent(prompt, endpoint):
        client = AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key)
        ...

    rollouts = await job.agents(agent)              # in place of job.rollouts(tools)

Invariants
- A trajectory has what the agent's requests sampled, to the token, and nothing else (`engine.gateway.session`).
- When it is out nothing of its agent runs: requests are aborted, the KV blocks free, processes dead.
- An agent that fails ends its trajectory with an error of its own boundary, never with a reward. So does one without a
  finished turn, whatever ended it. One that was refused a later turn for its budget has used that up, whatever it made
  of the refusal.
- Only our own deadline and stop cancel an agent: any other CancelledError, or SystemExit, leaving it is its failure. So
  is SystemExit in a task that it starts.
- An agent that goes on although it was cancelled takes no further step after STOP_S, which is counted and said.
  Meanwhile its session is closed, so that it samples nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import reprlib
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import first_error
from engine.fleet.fleet import Superseded
from engine.gateway.gateway import Gateway
from engine.gateway.held_coroutine import HeldCoroutine, enter_agent
from engine.gateway.http.server import SESSION_PREFIX
from engine.gateway.session import Session, SessionRules
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.deadline import TrajectoryDeadline
from engine.rollout.rollout import RolloutConfig, Tally
from engine.run.journal import Journal, Log
from engine.types import Boundary, Prompt, RolloutError, StopReason, Trajectory

TOLD_CHARS = 500  # of an error
STOP_S = 10.0  # for a cancelled agent to end: it may have a browser or a container to put away
log = logging.getLogger(__name__)
_NO_JOURNAL = Journal()


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where one agent finds its model. The URLs name the session of its rollout; its key does too, unless the server
    asks for a token, which is then the key.
    """

    openai_url: str
    """For `OpenAI(base_url=...)`."""
    anthropic_url: str
    """For `Anthropic(base_url=...)`."""
    key: str
    model: str


Agent = Callable[[Prompt, Endpoint], Awaitable[str | None]]
"""Works on a prompt with the model of an endpoint. What it returns is its answer, in `Trajectory.answer`; None: the
reward reads what the model wrote. Anything else is an error of the agent."""


class AgentFailed(RuntimeError):
    """The agent could not do its work; the message says why in one line."""


@dataclass(slots=True)
class _Counts:
    """Over all AgentRollouts that come from one. failed: whether an agent's traceback was logged."""

    tokens: int = 0
    failed: bool = False


class AgentRollouts:
    """A `RolloutSource` that has an agent do the rollouts.

    config: its budgets hold as for rollouts of our own, but for calls, which are the agent's. address: of the server
    that gives the gateway to agents; token: what that server asks for, "" for nothing. seed: of the run. at_once: how
    many agents run at once, None for any number; the wait of the others is not their time. stop_s: how long an agent
    that was cancelled may take to end.
    """

    def __init__(
        self,
        agent: Agent,
        config: RolloutConfig,
        gateway: Gateway,
        *,
        address: str,
        model: str,
        seed: int,
        token: str = "",
        at_once: int | None = None,
        stop_s: float = STOP_S,
    ) -> None:
        if at_once is not None and at_once < 1:
            raise ValueError(f"at_once must be at least 1, or None for any number, got {at_once}")
        self.config = config
        self.seed = seed
        self._agent = agent
        self._gateway = gateway
        self._address = address
        self._model = model
        self._token = token
        self._places: contextlib.AbstractAsyncContextManager[None] = (
            contextlib.nullcontext() if at_once is None else asyncio.Semaphore(at_once)
        )
        self._stop_s = stop_s
        self._left: set[asyncio.Task[Any]] = set()
        self._counts = _Counts()

    @property
    def chat(self) -> ChatTemplate:
        return self._gateway.chat

    @property
    def tokens_sampled(self) -> int:
        """With those of AgentRollouts that `with_config` made of it."""
        return self._counts.tokens

    def with_config(self, config: RolloutConfig) -> AgentRollouts:
        """The same with other budgets or another temperature."""
        other = copy.copy(self)
        other.config = config
        return other

    async def run(
        self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None, log: Log | None = None
    ) -> Trajectory:
        """One trajectory of prompt. Never raises for what the agent, the model or a replica did.

        What a journal holds of one that had not ended is done again: nobody knows where an agent was.
        """
        tally = tally or Tally()
        log = log or _NO_JOURNAL.log(0, 0, sample)
        if log.pieces:
            log.begin(log.discarded, tally.tokens)

        def count(tokens: int) -> None:
            self._counts.tokens += tokens
            tally.tokens += tokens

        async with self._places:
            deadline = TrajectoryDeadline(self.config.deadline_s)
            while True:
                key = f"{SESSION_PREFIX}{secrets.token_hex(8)}"
                rules = self._rules(prompt, sample, group)
                session = self._gateway.open(key, rules, on_tokens=count, waiting=deadline.paused)
                try:
                    trajectory = await self._attempt(session, prompt, deadline)
                except Superseded:
                    log.begin(log.discarded + session.sampled_tokens, tally.tokens)
                    continue
                finally:
                    self._gateway.close(key)
                    await session.settled()
                return replace(trajectory, discarded_tokens=log.discarded)

    def _rules(self, prompt: Prompt, sample: int, group: int) -> SessionRules:
        config = self.config.limited_for(prompt)
        return SessionRules(
            group=group,
            seed=self.seed,
            prompt_id=prompt.id,
            sample=sample,
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
            max_response_tokens=config.max_response_tokens,
            max_turns=config.max_turns,
            fixed=True,
        )

    async def _attempt(self, session: Session, prompt: Prompt, deadline: TrajectoryDeadline) -> Trajectory:
        """Raises Superseded when it has to begin again."""
        held = HeldCoroutine(self._ending(prompt, self._endpoint(session)))
        # In no TaskGroup, which would wait for an agent that goes on: `_stop` ends it.
        running = asyncio.create_task(held, name=f"agent-{session.key}")
        try:
            with suppress(TimeoutError):
                async with deadline.timeout() as budget:
                    await asyncio.wait([running])
        finally:
            answer, failure = _result(running)
            session.close()
            await self._stop(held, running, prompt)
        if isinstance(session.failure, Superseded):
            raise session.failure
        stop, typed_error = self._outcome(session, prompt, failure, out_of_time=budget.expired())
        trajectory = session.trajectory(prompt, stop, typed_error)
        return replace(trajectory, answer=answer)

    async def _stop(self, held: HeldCoroutine[Any], running: asyncio.Task[Any], prompt: Prompt) -> None:
        """Ends an agent, if it has not ended."""
        running.cancel()
        try:
            await asyncio.wait([running], timeout=self._stop_s)
        finally:
            if not running.done():
                held.drop()
                running.cancel()
                self._left.add(running)  # until its next step, which may be far where it waits for a task like itself
                running.add_done_callback(self._left.discard)
                self._gateway.drop_agent(prompt.id, self._stop_s)

    async def _ending(self, prompt: Prompt, endpoint: Endpoint) -> tuple[str | None, BaseException | None]:
        """The agent's answer, or why it failed. In a task of its own, where any cancellation is an end of the agent:
        what it or its libraries cancel inside does not reach ours.
        """
        enter_agent()
        try:
            answer = await self._agent(prompt, endpoint)
            if answer is not None and not isinstance(answer, str):
                raise AgentFailed(f"it answered {reprlib.repr(answer)}. Fix: return a str, or None")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too, of a program's `main` that is used as a coroutine
            return None, error
        return None if answer is None else text(answer), None

    def _outcome(
        self, session: Session, prompt: Prompt, failure: BaseException | None, *, out_of_time: bool
    ) -> tuple[StopReason, RolloutError | None]:
        """What an agent's end means for its trajectory: without a finished turn it has failed, whatever ended it."""
        if session.failure is not None:
            return StopReason.ERROR, RolloutError(boundary=Boundary.REPLICA, message=str(session.failure))
        if session.turns and out_of_time:
            return StopReason.DEADLINE, None
        if session.turns and session.stop is not None:  # it was refused a turn, which is no fault
            return session.stop, None
        if session.turns and failure is None:
            return session.ended_by, None
        if out_of_time:
            reason = f"no turn was finished within its deadline of {self.config.deadline_s:g} s"
        elif failure is not None:
            self._log_once(prompt, failure)
            reason = _told(failure)
        else:
            reason = "the agent ended without a finished turn"
        if session.last_refusal is not None:
            reason += f"; the last request that was refused: {session.last_refusal}"
        return StopReason.ERROR, RolloutError(boundary=Boundary.AGENT, message=reason[:TOLD_CHARS])

    def _log_once(self, prompt: Prompt, failure: BaseException) -> None:
        """The traceback of an agent's first failure, unless the failure says all there is."""
        if not isinstance(failure, AgentFailed) and not self._counts.failed:
            self._counts.failed = True
            log.error("an agent failed, on prompt %s; later ones are counted only", prompt.id, exc_info=failure)

    def _endpoint(self, session: Session) -> Endpoint:
        url = f"{self._address}/sessions/{session.key}"
        key = self._token or session.key
        return Endpoint(openai_url=f"{url}/v1", anthropic_url=url, key=key, model=self._model)


def _told(failure: BaseException) -> str:
    """An exception in one line."""
    if isinstance(failure, asyncio.CancelledError):
        return "CancelledError: something that it awaits was cancelled, and it was not"
    cause = first_error(failure) if isinstance(failure, BaseExceptionGroup) else failure
    try:
        message = str(cause)
    except Exception as error:
        message = f"its message raises {type(error).__name__}"
    return f"{type(cause).__name__}: {' '.join(text(message[:TOLD_CHARS]).split())}"


def _result(running: asyncio.Task[tuple[str | None, BaseException | None]]) -> tuple[str | None, BaseException | None]:
    """An agent's answer, or why it failed; neither while it has not ended."""
    if not running.done():
        return None, None
    if running.cancelled():  # before its first step
        return None, asyncio.CancelledError()
    return running.result()


def text(given: str) -> str:
    """The same without halves of surrogate pairs, which no file can hold.

    >>> text("a" + chr(0xD800) + "b")
    'a?b'
    """
    return given.encode(errors="replace").decode()
