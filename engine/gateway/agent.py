"""Agents with a loop of their own as a source of rollouts: coroutines or programs that use the gateway as they like.

    async def agent(prompt, endpoint):
        client = AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key)
        ...

    rollouts = await job.agents(agent)              # in place of job.rollouts(tools)

Invariants
- A trajectory holds exactly the tokens that the agent's requests sampled (`engine.gateway.session`).
- When a trajectory is returned, nothing of its agent runs: requests are aborted, KV blocks free, processes dead.
- A failed agent ends its trajectory with an error of the boundary `agent`, never with a reward. So does an agent
  without a finished turn, whatever ended it. An agent that was refused a later turn, or whose last turn was cut off at
  its budget, has used that up, whatever it made of it: clients raise for a cut turn.
- An agent that returns an answer after a call without a result has answered: many hand their answer in by a call.
- Only our deadline and our stop cancel an agent. Any other CancelledError or SystemExit that leaves it is its failure,
  and so is SystemExit in a task that it starts.
- An agent that ignores its cancellation takes no further step after STOP_S; it is counted and reported. Until then its
  session is closed, so it samples nothing.
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
from sandbox.require import at_least, none_or, require

TOLD_CHARS = 500  # in the message of an error
STOP_S = 10.0  # how long a cancelled agent may take to end: it may have to close a browser or a container
log = logging.getLogger(__name__)
_NO_JOURNAL = Journal()


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where an agent finds its model. The URLs name the session of its rollout.

    The key names the session too, unless the server requires a token; then the key is that token.
    """

    openai_url: str
    """The argument of `OpenAI(base_url=...)`."""
    anthropic_url: str
    """The argument of `Anthropic(base_url=...)`."""
    key: str
    model: str


Agent = Callable[[Prompt, Endpoint], Awaitable[str | None]]
"""Works on a prompt with the model of an endpoint.

It returns its answer, which becomes `Trajectory.answer`, or None if the reward should read what the model wrote. Any
other value is an error of the agent."""


class AgentFailed(RuntimeError):
    """The agent could not do its work. The message is one line with the reason."""


@dataclass(slots=True)
class _Counts:
    """Counts shared by all AgentRollouts that derive from one. failed: whether an agent's traceback was logged."""

    tokens: int = 0
    failed: bool = False


class AgentRollouts:
    """A `RolloutSource` that has an agent do the rollouts.

    config: its budgets hold as for our own rollouts, except those for calls, which the agent makes itself. address: the
    URL of the gateway's server. token: what that server requires, "" for nothing. seed: the run's. at_once: how many
    agents run at once, None for any number; the others wait, which does not count as their time. stop_s: how long a
    cancelled agent may take to end.
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
        require("at_once", at_once, none_or(at_least(1)))
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
        self._dropped: set[asyncio.Task[Any]] = set()
        self._counts = _Counts()

    @property
    def chat(self) -> ChatTemplate:
        return self._gateway.chat

    @property
    def tokens_sampled(self) -> int:
        """Tokens sampled so far, including those of the AgentRollouts that `with_config` made from this one."""
        return self._counts.tokens

    def with_config(self, config: RolloutConfig) -> AgentRollouts:
        """Returns a copy with other budgets or another temperature."""
        other = copy.copy(self)
        other.config = config
        return other

    async def run(
        self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None, log: Log | None = None
    ) -> Trajectory:
        """Returns one trajectory of a prompt. Never raises for a fault of the agent, the model or a replica.

        A trajectory that had not ended before a resume starts over, because the state of its agent is lost.
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
                tally.watched.moves("agent")
                session = self._gateway.open(
                    key, rules, on_tokens=count, waiting=deadline.paused, watched=tally.watched
                )
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
        """Runs the agent once. Raises Superseded if the trajectory has to begin again."""
        held = HeldCoroutine(self._ending(prompt, self._endpoint(session)))
        # Not in a TaskGroup, which would wait for an agent that ignores its cancellation; `_stop` ends it.
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
        if answer is not None:
            session.accept_last_calls()
        stop, typed_error = self._outcome(session, prompt, failure, out_of_time=budget.expired())
        trajectory = session.trajectory(prompt, stop, typed_error)
        return replace(trajectory, answer=answer)

    async def _stop(self, held: HeldCoroutine[Any], running: asyncio.Task[Any], prompt: Prompt) -> None:
        """Ends an agent that still runs."""
        running.cancel()
        try:
            await asyncio.wait([running], timeout=self._stop_s)
        finally:
            if not running.done():
                held.drop()
                running.cancel()
                self._dropped.add(running)  # kept alive until its next step, which may be far off
                running.add_done_callback(self._dropped.discard)
                self._gateway.drop_agent(prompt.id, self._stop_s)

    async def _ending(self, prompt: Prompt, endpoint: Endpoint) -> tuple[str | None, BaseException | None]:
        """Returns the agent's answer, or why it failed.

        It runs in a task of its own, so a cancellation inside the agent or its libraries does not reach ours: it ends
        the agent.
        """
        enter_agent()
        try:
            answer = await self._agent(prompt, endpoint)
            if answer is not None and not isinstance(answer, str):
                raise AgentFailed(f"it answered {reprlib.repr(answer)}. Fix: return a str, or None")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, which the `main` of a program may raise
            return None, error
        return None if answer is None else text(answer), None

    def _outcome(
        self, session: Session, prompt: Prompt, failure: BaseException | None, *, out_of_time: bool
    ) -> tuple[StopReason, RolloutError | None]:
        """Returns what an agent's end means for its trajectory. Without a finished turn the agent has failed."""
        if session.failure is not None:
            return StopReason.ERROR, RolloutError(boundary=Boundary.REPLICA, message=str(session.failure))
        if session.turns and out_of_time:
            return StopReason.DEADLINE, None
        if session.turns and session.stop is not None:  # a turn was refused, which is no fault
            return session.stop, None
        if session.turns and (failure is None or session.ended_by is StopReason.LENGTH):
            return session.ended_by, None
        if out_of_time:
            reason = f"no turn was finished within its deadline of {self.config.deadline_s:g} s"
        elif failure is not None:
            self._log_once(prompt, failure)
            reason = _told(failure)
        else:
            reason = "the agent ended without a finished turn"
        if session.last_refusal is not None:
            reason += f"; the last refused request: {session.last_refusal}"
        return StopReason.ERROR, RolloutError(boundary=Boundary.AGENT, message=reason[:TOLD_CHARS])

    def _log_once(self, prompt: Prompt, failure: BaseException) -> None:
        """Logs the traceback of the first failed agent, unless its message says everything."""
        if not isinstance(failure, AgentFailed) and not self._counts.failed:
            self._counts.failed = True
            log.error("an agent failed on prompt %s; later failures are only counted", prompt.id, exc_info=failure)

    def _endpoint(self, session: Session) -> Endpoint:
        url = f"{self._address}/sessions/{session.key}"
        key = self._token or session.key
        return Endpoint(openai_url=f"{url}/v1", anthropic_url=url, key=key, model=self._model)


def _told(failure: BaseException) -> str:
    """Returns an exception as one line."""
    if isinstance(failure, asyncio.CancelledError):
        return "CancelledError: something that the agent awaited was cancelled, not the agent itself"
    cause = first_error(failure) if isinstance(failure, BaseExceptionGroup) else failure
    try:
        message = str(cause)
    except Exception as error:
        message = f"its message raises {type(error).__name__}"
    return f"{type(cause).__name__}: {' '.join(text(message[:TOLD_CHARS]).split())}"


def _result(running: asyncio.Task[tuple[str | None, BaseException | None]]) -> tuple[str | None, BaseException | None]:
    """Returns an agent's answer, or why it failed; neither while it still runs."""
    if not running.done():
        return None, None
    if running.cancelled():  # before its first step
        return None, asyncio.CancelledError()
    return running.result()


def text(given: str) -> str:
    """Returns a text with each half of a surrogate pair replaced, since no file can hold one.

    >>> text("a" + chr(0xD800) + "b")
    'a?b'
    """
    return given.encode(errors="replace").decode()
