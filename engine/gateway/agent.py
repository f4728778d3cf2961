"""Agents of their own as a source of rollouts: a coroutine or a program that talks to the gateway as it likes.

    async def agent(prompt, endpoint):
        client = AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key)
        ...

    rollouts = await job.agents(agent)              # in place of job.rollouts(tools)

Invariants
- A trajectory has what the agent's requests sampled, to the token, and nothing else (`engine.gateway.session`).
- When it is out nothing of its agent runs: requests are aborted, the KV blocks free, processes dead.
- An agent that fails ends its trajectory with an error of its own boundary, never with a reward. One that was refused
  a turn for its budget has used that up, whatever it made of the refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from engine.errors import first_error
from engine.fleet.fleet import Superseded
from engine.gateway.gateway import Gateway
from engine.gateway.http.server import SESSION_PREFIX
from engine.gateway.session import Session, SessionRules
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.deadline import TrajectoryDeadline
from engine.rollout.rollout import RolloutConfig, Tally
from engine.run.journal import Journal, Log
from engine.types import Boundary, Prompt, RolloutError, StopReason, Trajectory

log = logging.getLogger(__name__)
_NO_JOURNAL = Journal()


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where one agent finds its model. The URLs name the session of its rollout; its key does too."""

    openai_url: str
    """For `OpenAI(base_url=...)`."""
    anthropic_url: str
    """For `Anthropic(base_url=...)`."""
    key: str
    model: str


Agent = Callable[[Prompt, Endpoint], Awaitable[str | None]]
"""Works on a prompt with the model of an endpoint. What it returns is its answer, in `Trajectory.answer`; None: the
reward reads what the model wrote."""


class AgentFailed(RuntimeError):
    """The agent could not do its work; the message says why in one line."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program as an agent: `Command(argv=("python", "agent.py"))`.

    It finds its model in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ROCSTAR_MODEL, and
    the prompt on its standard input, as JSON with `id`, `messages` and `metadata`; never the reference answer. The last
    line that it prints is its answer. It is not isolated: run a program that you do not trust in a container.
    """

    argv: tuple[str, ...]
    cwd: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to ours."""

    async def __call__(self, prompt: Prompt, endpoint: Endpoint) -> str | None:
        """Raises AgentFailed for a program that does not start or exits with another status than 0."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.argv,
                cwd=self.cwd,
                env={**os.environ, **self.environment, **_variables(endpoint)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a group of its own, which ends as a whole
            )
        except OSError as error:
            raise AgentFailed(f"{self.argv[0]}: {error.strerror}") from error
        task = {"id": prompt.id, "messages": prompt.messages, "metadata": prompt.metadata}
        try:
            output, errors = await process.communicate(json.dumps(task).encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise AgentFailed(f"{self.argv[0]} exited with status {process.returncode}: {_last_line(errors)}")
        return _last_line(output) or None


def _variables(endpoint: Endpoint) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": endpoint.openai_url,
        "OPENAI_API_KEY": endpoint.key,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_url,
        "ANTHROPIC_API_KEY": endpoint.key,
        "ROCSTAR_MODEL": endpoint.model,
    }


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass(slots=True)
class _Counts:
    """Over all AgentRollouts that come from one. failed: whether an agent's traceback was logged."""

    tokens: int = 0
    failed: bool = False


class AgentRollouts:
    """A `RolloutSource` that has an agent do the rollouts.

    config: its budgets hold as for rollouts of our own, but for calls, which are the agent's. address: of the server
    that gives the gateway to agents. seed: of the run.
    """

    def __init__(
        self, agent: Agent, config: RolloutConfig, gateway: Gateway, *, address: str, model: str, seed: int
    ) -> None:
        self.config = config
        self.seed = seed
        self._agent = agent
        self._gateway = gateway
        self._address = address
        self._model = model
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
        other = AgentRollouts(
            self._agent, config, self._gateway, address=self._address, model=self._model, seed=self.seed
        )
        other._counts = self._counts
        return other

    async def run(
        self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None, log: Log | None = None
    ) -> Trajectory:
        """One trajectory of prompt. Never raises for what the agent, the model or a replica did.

        What a journal holds of one that had not ended is done again: nobody knows where an agent was.
        """
        tally = tally or Tally()
        log = log or _NO_JOURNAL.log(0, 0, sample)
        deadline = TrajectoryDeadline(self.config.deadline_s)
        if log.pieces:
            log.begin(log.discarded, tally.tokens)

        def count(tokens: int) -> None:
            self._counts.tokens += tokens
            tally.tokens += tokens

        while True:
            key = f"{SESSION_PREFIX}{secrets.token_hex(8)}"
            session = self._gateway.open(key, self._rules(prompt, sample, group), on_tokens=count)
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
            max_tokens=config.max_tokens,
            max_response_tokens=config.max_response_tokens,
            max_turns=config.max_turns,
            fixed=True,
        )

    async def _attempt(self, session: Session, prompt: Prompt, deadline: TrajectoryDeadline) -> Trajectory:
        """Raises Superseded when it has to begin again."""
        answer, error = None, None
        try:
            async with deadline.timeout() as budget:
                answer = await self._agent(prompt, self._endpoint(session))
            stop = session.ended_by
        except TimeoutError as failure:
            stop = StopReason.DEADLINE
            if not budget.expired():
                stop, error = self._failed(session, prompt, failure)
        except Exception as failure:
            stop, error = self._failed(session, prompt, failure)
        if isinstance(session.failure, Superseded):
            raise session.failure
        if session.failure is not None:
            stop, error = StopReason.ERROR, RolloutError(boundary=Boundary.REPLICA, message=str(session.failure))
        if error is None and session.turns == 0 and stop is not StopReason.DEADLINE and session.stop is None:
            stop = StopReason.ERROR
            error = RolloutError(boundary=Boundary.AGENT, message="the agent ended without asking the model for a turn")
        trajectory = session.trajectory(prompt, stop, error)
        return replace(trajectory, answer=answer if isinstance(answer, str) else None)

    def _failed(self, session: Session, prompt: Prompt, failure: Exception) -> tuple[StopReason, RolloutError | None]:
        """What an agent's exception means."""
        if session.stop is not None:  # it was refused a turn, which is no fault
            return session.stop, None
        cause = first_error(failure) if isinstance(failure, ExceptionGroup) else failure
        if session.failure is None and not isinstance(cause, AgentFailed) and not self._counts.failed:
            self._counts.failed = True
            log.error("an agent failed, on prompt %s; later ones are counted only", prompt.id, exc_info=failure)
        message = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        return StopReason.ERROR, RolloutError(boundary=Boundary.AGENT, message=message[:500])

    def _endpoint(self, session: Session) -> Endpoint:
        url = f"{self._address}/sessions/{session.key}"
        return Endpoint(openai_url=f"{url}/v1", anthropic_url=url, key=session.key, model=self._model)
