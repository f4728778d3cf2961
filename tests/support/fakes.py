"""Hand-written stand-ins: a clock, a replica, a sandbox. They only do what a test tells them.

Nothing here sleeps. A fake says `started` when the code under test has reached it and goes on when it is `released`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.ports import Reward, ToolReply
from engine.recording.rollouts import Rollout
from engine.replica.port import Delta, GrammarRefused, KvSample, ReplicaDied, Sampling
from engine.rollout.chat_template import ChatTemplate
from engine.routes import Routes
from engine.telemetry.timeline import Timeline
from engine.types import Floats, Prompt, StopReason, TokenScores, ToolUse, Trajectory, Turn
from sandbox.wire import Limits, ToolResult


class Clock:
    """A monotonic clock that a test moves by hand; `tick` seconds pass with each reading."""

    def __init__(self, now: float = 0.0, tick: float = 0.0) -> None:
        self.now = now
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


async def settle(turns: int = 30) -> None:
    """Lets every task run until it waits for something that a test controls."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Gate:
    """A place in a script where a replica says `started` and waits until it is released."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self._open = asyncio.Event()

    def release(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.started.set()
        await self._open.wait()


class SlowReward(Gate):
    """Grades what waits when it is released; counts how many wait, and how many did at most."""

    def __init__(self, reward: Reward) -> None:
        super().__init__()
        self.running = self.most = 0
        self._reward = reward

    async def __call__(self, trajectory: Trajectory) -> float:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.passed()
        self.running -= 1
        return await self._reward(trajectory)


class Die:
    """A place in a script where the replica dies, the first time that it is reached."""

    reached = False


Script = Iterable["str | Gate | Die"]


def route_of(token: int, replica: int) -> list[int]:
    """The experts that a scripted replica chooses for a token, which tell it from another replica."""
    return [token % 97, 100 + replica]


class ScriptedReplica:
    """Satisfies `engine.replica.port.ReplicaPort` without an engine.

    script: what each turn generates, by (token ids so far, seed): pieces of text, gates, deaths. A turn that went on
    from another replica gets the tokens so far, as from vLLM. Without a script, tokens follow from (ids, seed) alone,
    so that a turn which goes on under `seed + tokens so far` is the same; draws_from_the_start: they follow from the
    seed and the place in the request, as vLLM's, so that it is not. One token per delta; the last one has `finish`.
    """

    def __init__(
        self,
        index: int = 0,
        on_step: Callable[[int, KvSample], None] = lambda index, sample: None,
        *,
        chat: ChatTemplate | None = None,
        script: Callable[[list[int], Sampling], Script] | None = None,
        blocks: int = 1000,
        draws_from_the_start: bool = False,
    ) -> None:
        self.index = index
        self.died = asyncio.Event()
        self.in_flight = 0
        self.pid = 1000 + index
        self.cause = ""
        self.usable_blocks = blocks
        self.version = 0  # what the node knows, as on each delta
        self.engine_version: int | None = None  # what the engine really samples with, as in the last delta's spans
        self.requests: list[tuple[list[int], Sampling, str]] = []
        self.aborted: list[str] = []
        self.weights: list[tuple[str, int]] = []
        self.events: list[str] = []
        self.canary = np.zeros(3, np.float32)
        self.scored: list[tuple[list[int], int]] = []
        self.score_gate: Gate | None = None
        self.dies_of_scoring = False
        self.start_error: Exception | None = None
        self.fail_updates = 0
        self.update_gate: Gate | None = None
        self.asleep = False
        self.sleep_gate: Gate | None = None
        self.start_gate: Gate | None = None
        self.abort_gate: Gate | None = None
        self.stalls = False
        self.ends: list[int] = []  # end tokens of the model's own
        self.forces: frozenset[int] = frozenset()  # tokens that a grammar decides about, in turns that have one
        self.refuses: str | None = None  # why it samples by no grammar
        self.returns_routes = False  # it then reports `route_of` each position
        self.salt = 0  # replicas of different ones sample different tokens
        self._draws_from_the_start = draws_from_the_start
        self._aborts: dict[str, asyncio.Event] = {}
        self._on_step = on_step
        self._chat = chat
        self._script = script

    async def start(self) -> None:
        if self.start_gate is not None:
            await self.start_gate.passed()
        if self.start_error is not None:
            raise self.start_error
        self.events.append("start")

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        self._alive()
        assert sampling.max_tokens > 0, sampling
        assert not self.asleep
        if sampling.grammar is not None and self.refuses is not None:
            raise GrammarRefused(self.refuses)
        self.requests.append((list(token_ids), sampling, request_id))
        self.in_flight += 1
        aborted = self._aborts[request_id] = asyncio.Event()
        sent, finished = 0, False
        spans: list[tuple[int, int, int]] = []
        seen, routed = list(token_ids), sampling.routes_from
        try:
            async for token, last in self._tokens(list(token_ids), sampling, aborted):
                self._alive()
                sent += 1
                finish = "stop" if last else "length" if sent == sampling.max_tokens else None
                finished = finish is not None
                if finish:
                    del self._aborts[request_id]
                spans.append((self.version if self.engine_version is None else self.engine_version, sent - 1, sent))
                exact = tuple(spans) if finish else ()
                forced = () if sampling.grammar is None else [token in self.forces]
                delta = Delta([token], [logprob_of(token)], finish, len(token_ids), self.version, exact, forced)
                if self.returns_routes:
                    ids = [route_of(each, self.index) for each in seen[routed:]]
                    routes = Routes.of(np.array(ids, np.uint8).reshape(-1, 1, 2))
                    delta = replace(delta, routes=routes, routes_from=routed)
                    routed = len(seen)
                    seen.append(token)
                yield delta
                if finish:
                    return
            assert aborted.is_set(), "the script ended without the end-of-turn token"
            yield Delta([], [], "abort", len(token_ids), self.version, tuple(spans))
        finally:
            self.in_flight -= 1
            self._aborts.pop(request_id, None)
            if not finished:
                self.aborted.append(request_id)

    async def abort(self, request_id: str) -> None:
        if self.abort_gate is not None:
            await self.abort_gate.passed()
        self._alive()
        if request_id in self._aborts:
            self._aborts[request_id].set()

    async def _tokens(
        self, token_ids: list[int], sampling: Sampling, aborted: asyncio.Event
    ) -> AsyncIterator[tuple[int, bool]]:
        """Ends without the last token when the request is aborted."""
        if self._script is None:
            prompt = len(token_ids)
            while True:
                seed, draws = sampling.seed, len(token_ids) - prompt
                if seed is not None:
                    seed = (seed + self.salt) * (1000 if self._draws_from_the_start else 1) + draws
                token = next_token(token_ids, seed, sampling.stop_token_ids)
                if await self._aborted(asyncio.sleep(0), aborted):
                    return
                yield token, token in sampling.stop_token_ids
                token_ids.append(token)
        assert self._chat is not None
        for piece in self._script(token_ids, sampling):
            if isinstance(piece, Gate):
                if await self._aborted(piece.passed(), aborted):
                    return
            elif isinstance(piece, Die):
                if not piece.reached:
                    piece.reached = True
                    self.die()
                    self._alive()
            else:
                for token in self._chat._encode(piece):
                    if aborted.is_set():
                        return
                    yield token, token in (*sampling.stop_token_ids, *self.ends)

    async def _aborted(self, operation, aborted: asyncio.Event) -> bool:
        """The operation; True when the request was aborted first, ReplicaDied when the replica died."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in (operation, self.died.wait(), aborted.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        self._alive()
        return aborted.is_set()

    def _alive(self) -> None:
        if self.died.is_set():
            raise ReplicaDied(f"replica {self.index} is dead")

    def die(self) -> None:
        self.died.set()

    def step(
        self, free_blocks: int, running: int = 0, waiting: int = 0, preempted: int = 0, prefilled: int = 0
    ) -> None:
        self._on_step(self.index, KvSample(free_blocks, running, waiting, preempted, prefilled))

    async def update_weights(self, path: str, version: int) -> None:
        self._alive()
        if self.update_gate is not None:
            await self.update_gate.passed()
        if self.fail_updates:
            self.fail_updates -= 1
            self.died.set()
            raise ReplicaDied(f"replica {self.index}: weight update {version} failed")
        self.weights.append((path, version))
        self.version = version
        if self.asleep:
            self.events.append(f"update {version}")

    async def sleep(self) -> None:
        self._alive()
        if self.sleep_gate is not None:
            await self.sleep_gate.passed()
        self.asleep = True
        self.events.append("sleep")

    async def wake(self, part: str) -> None:
        self._alive()
        if self.asleep:
            self.asleep = part == "weights"
            self.events.append(f"wake {part}")

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> Floats:
        self._alive()
        assert not self.asleep
        return self.canary

    async def score(self, token_ids: Sequence[int], start: int, top: int = 0) -> TokenScores:
        """Gives each token `logprob_of`, and the likeliest ones the same in the order of their ids."""
        self._alive()
        self.scored.append((list(token_ids), start))
        self.in_flight += 1
        try:
            if self.score_gate is not None:
                await self.score_gate.passed()
                if self.dies_of_scoring:
                    self.die()
                self._alive()
        finally:
            self.in_flight -= 1
        ids = list(token_ids)[start:]
        return TokenScores(
            logprobs_T=np.float32([logprob_of(token) for token in ids]),
            top=top,
            top_ids=np.int32([*range(top)] * len(ids)),
            top_logprobs=np.float32([logprob_of(token) for token in range(top)] * len(ids)),
        )

    def stalled(self, now: float) -> str | None:
        return "it stalls" if self.stalls else None

    def kill(self) -> None:
        self.events.append("kill")
        self.die()

    async def shutdown(self) -> None:
        self.events.append("shutdown")
        self.died.set()


def next_token(token_ids: Sequence[int], seed: int | None, stop_token_ids: Sequence[int], vocabulary: int = 50) -> int:
    """A token that depends on the whole prefix and on the seed at this token: the same on every replica."""
    number = zlib.crc32(repr((list(token_ids), seed)).encode())
    return stop_token_ids[0] if stop_token_ids and number % 7 == 0 else 3 + number % vocabulary


def logprob_of(token: int) -> float:
    """What a scripted replica says of a token: tests recognise it in the buffer."""
    return -(token + 1) / 1024


class Replicas:
    """A factory for `Fleet` that keeps every replica it made; `prepare` is called on each before it starts."""

    def __init__(self, prepare: Callable[[ScriptedReplica], None] = lambda replica: None, **options) -> None:
        self.made: list[ScriptedReplica] = []
        self._prepare = prepare
        self._options = options

    def __call__(self, index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> ScriptedReplica:
        replica = ScriptedReplica(index, on_step, **self._options)
        self.made.append(replica)
        self._prepare(replica)
        return replica


def fleet_of(
    replicas: Replicas,
    count: int = 1,
    *,
    balancer=None,
    timeline: Timeline | None = None,
    canary=(),
    note=lambda line: None,
    **config,
) -> Fleet:
    """A fleet of scripted replicas with the node's own balancer."""
    settings = FleetConfig(replicas=count, **config)
    balancer = balancer or KvAware(max_tokens=1000)
    return Fleet(settings, replicas, balancer, timeline or Timeline(Clock(tick=0.001)), canary, note)


class ScriptedRunner:
    """A ToolRunner: answers with `answer(code)` once released; free-running unless `hold` is set."""

    def __init__(self, answer: Callable[[str], ToolResult] | None = None, hold: bool = False) -> None:
        self.calls: list[tuple[str, str, Limits | None]] = []
        self.displayed: list[bool] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.started = asyncio.Event()
        self._released = asyncio.Event()
        self._answer = answer or (lambda code: ToolResult(outcome="ok", stdout=code, jailed=True))
        if not hold:
            self._released.set()

    def release(self) -> None:
        self._released.set()

    async def run(
        self, code: str, stdin: str = "", limits: Limits | None = None, *, display: bool = False
    ) -> ToolResult:
        self.calls.append((code, stdin, limits))
        self.displayed.append(display)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.started.set()
        try:
            await self._released.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return self._answer(code)


class ScriptedSession(ScriptedRunner):
    """A Session: cells run one at a time, in the order of the calls."""

    def __init__(self, answer: Callable[[str], ToolResult] | None, hold: bool) -> None:
        super().__init__(answer, hold)
        self.open = True
        self._turn = asyncio.Lock()

    async def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> ToolResult:
        assert self.open, "a cell of a session that is closed"
        async with self._turn:
            return await super().run(code, stdin, limits)


class ScriptedSessions:
    """A SessionRunner that keeps every session it made; they answer as a ScriptedRunner does."""

    def __init__(self, answer: Callable[[str], ToolResult] | None = None, hold: bool = False) -> None:
        self.made: list[ScriptedSession] = []
        self._options = answer, hold

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ScriptedSession]:
        session = ScriptedSession(*self._options)
        self.made.append(session)
        try:
            yield session
        finally:
            assert session.running == 0, "a session is closed while a cell runs"
            session.open = False


class Echo:
    """A tool that answers at once with its arguments, as an object of the simplest kind."""

    name = "echo"

    async def __call__(self, arguments) -> ToolReply:
        return ToolReply(outcome="ok", text=str(dict(arguments)))


def a_prompt(number: int = 0, text: str = "What is 6 * 7?") -> Prompt:
    return Prompt(id=f"p{number}", messages=({"role": "user", "content": text},), answer="42")


def a_use(outcome: str = "ok", *, executed: bool = True, at: float = 0.0, took: float = 0.5) -> ToolUse:
    return ToolUse(
        name="python",
        arguments="{}",
        outcome=outcome,
        response="",
        closed_at=at,
        dispatched_at=at,
        finished_at=at + took,
        overlap_s=took / 2,
        executed=executed,
        jailed=executed,
    )


def a_trajectory(
    sample: int = 0,
    *,
    prompt: Prompt | None = None,
    reward: float | None = None,
    sampled: int = 4,
    given: int = 3,
    version: int = 0,
    uses: Sequence[ToolUse] = (),
    stop: StopReason = StopReason.ANSWER,
    error=None,
) -> Trajectory:
    """One turn: `given` prompt tokens, then `sampled` sampled ones."""
    total = given + sampled
    turn = Turn(
        start=given,
        end=total,
        tool_uses=tuple(uses),
        replica=0,
        cached_tokens=1,
        queued_at=0.0,
        started_at=0.0,
        finished_at=1.0,
    )
    mask = np.arange(total) >= given
    return Trajectory(
        prompt=prompt or a_prompt(),
        sample=sample,
        seed=1,
        temperature=1.0,
        token_ids_T=np.arange(total, dtype=np.int32),
        sampled_T=mask,
        logprobs_T=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions_T=np.where(mask, version, -1).astype(np.int32),
        turns=(turn,),
        text="",
        stop=stop,
        started_at=0.0,
        finished_at=1.0,
        error=error,
        reward=reward,
    )


def a_rollout(trajectory: Trajectory, **fields: Any) -> Rollout:
    """It was recorded, and nothing of its group was trained."""
    values: dict[str, Any] = {"kept": False, "advantage": None, "drop": "flat", "reasons": {}, "node": ""}
    return Rollout(**({"step": 1, "group": 0, "trajectory": trajectory} | values | fields))


class Prompts:
    """An endless iterator of prompts that counts what was taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self):
        return self

    def __next__(self) -> Prompt:
        self.taken += 1
        return a_prompt(self.taken - 1)


def conversation(chat: ChatTemplate, *turns: Sequence[str | Gate | Die]) -> Callable[[list[int], Sampling], Script]:
    """A script that plays the given turns; a turn that went on from another replica continues where its tokens end."""
    opening = "<|im_start|>assistant\n"

    def script(token_ids: list[int], sampling: Sampling) -> Script:
        before, _, done = chat.decode(token_ids).rpartition(opening)
        for piece in turns[before.count(opening)]:
            if not isinstance(piece, str):
                if not done:
                    yield piece
            elif done.startswith(piece):
                done = done[len(piece) :]
            else:
                assert piece.startswith(done), (piece, done)
                yield piece[len(done) :]
                done = ""

    return script
