"""What does the event loop carry? The whole rollout side of a run over engines that compute nothing.

    rocstar bench loop [rounds=3] [replicas=8] [concurrent=2048] [tokens=300] [turns=2] [step_s=0.025] [profile=FILE]

Real vLLM engines (EngineCore, scheduler, KV cache, ZeroMQ) have a worker that answers at the pace of step_s and
computes nothing, asynchronously as on GPUs. Over them run our Replica, Fleet, KvAware and Rollouts, with tool calls,
grading, selection and recording. Only the CPU of the node's own process is counted, not what the engines take.

Modes, in interleaved rounds:
    rollouts   `concurrent` trajectories at a time
    sparse     an eighth of them, so that an engine step gives few tokens
    bare       the same turns by Replica.generate alone, as many at a time: the floor
    vllm       some of these turns by vLLM's AsyncLLM with its own output processor: a message and an output a token

Two shapes of the same turns tell what a token costs (turns included) and what an engine step costs beside its tokens:
they are the solution of cpu = tokens x token_s + steps x step_s for `rollouts` and `sparse`.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import uvloop

from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.reward.math_reward import MathReward
from bench.benches.loop.engines import StubConfig, asynchronous_scheduling, bare_turns, vllm_turns
from bench.benches.loop.script import Script
from bench.benches.rollout.load import Repeater, Schedule
from bench.benches.rollout.scale import Lags
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import Kind, microseconds, milliseconds, rate, ratio
from bench.measuring.metric import count as number_of
from bench.measuring.terminal import say
from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.ports import ToolRunner
from engine.recording.policy import RecordConfig
from engine.recording.recording import Recording
from engine.replica.config import prepare_environment
from engine.replica.port import KvSample
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.run.workspace import workspace
from engine.stages.grading import GRADE_DEADLINE_S, graded
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool
from engine.types import Group, Prompt, Trajectory
from recipes.tiny.task import SHIPPED, prompts, tool_call
from sandbox import TIERS, Limits, Sandbox, SandboxConfig
from sandbox.require import Rule, at_least, positive, require_fields
from sandbox.wire import ToolResult

SAMPLES = 16  # per prompt, as in the quick start
GROUPS = 8  # of a recorded step
SPARSE = 8  # so many times fewer trajectories at a time
VLLM_EVERY = 8  # AsyncLLM gets one trajectory of so many, since each of its tokens costs a lot
SEED = 0
LAG_EVERY_S = 0.02
CODE = "print(1)"


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "runs of each mode"] = 3
    replicas: Annotated[int, "engines"] = 4
    concurrent: Annotated[int, f"trajectories at a time, a multiple of {SAMPLES * SPARSE}"] = 1024
    trajectories: Annotated[int | None, f"trajectories of a run, a multiple of {SAMPLES}; none: twice as many"] = None
    tokens: Annotated[int, "of a turn, on average"] = 300
    turns: Annotated[int, "turns of a trajectory, each but the last with a tool call"] = 2
    step_s: Annotated[float, "seconds of an engine step"] = 0.025
    tools: Annotated[Literal["scripted", "jailed"], "who answers the calls: a script after tool_s, or the sandbox"] = (
        "scripted"
    )
    tool_s: Annotated[float, "seconds of a scripted call"] = 0.05
    asynchronous: Annotated[bool, "whether engines schedule a step before the one before has ended"] = True
    profile: Annotated[Path | None, "file that gets a cProfile of one run"] = None

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "replicas", "tokens", "turns")
        require_fields(self, positive, "step_s")
        require_fields(self, at_least(0), "tool_s")
        multiple = SAMPLES * SPARSE
        require_fields(
            self, Rule(f"a positive multiple of {multiple}", lambda it: it > 0 and it % multiple == 0), "concurrent"
        )
        if self.trajectories is not None:
            require_fields(
                self, Rule(f"a positive multiple of {SAMPLES}", lambda it: it > 0 and it % SAMPLES == 0), "trajectories"
            )

    @property
    def total(self) -> int:
        return self.trajectories or 2 * self.concurrent


METRICS = {
    "cpu_token_s": microseconds("CPU per token", "of the node's own process, everything included", form=".2f"),
    "token_s": microseconds("a token", "what it costs the node, turns included and engine steps not", form=".2f"),
    "step_s": milliseconds("an engine step", "what it costs the node beside its tokens", form=".3f", kind=Kind.CPU),
    "turn_s": microseconds("a turn beyond bare", "CPU of the node, over what bare engines take", form=",.0f"),
    "over_bare": ratio("over bare", "CPU of the node over that of bare engines in the same round"),
    "of_vllm": ratio("of vLLM's", "CPU of the node per token over that of AsyncLLM in the same round", form=".3f"),
    "full_tokens_per_s": rate("tokens/s of a full loop", "with which this shape takes one core"),
    "tokens_per_s": rate("tokens/s", "sampled"),
    "step_tokens": number_of("tokens a step", "of one engine, on average"),
    "lag_p99_s": milliseconds("lag, p99", "by which the event loop is late", form=".1f"),
    "lag_cpu_p99_s": milliseconds("lag in CPU, p99", "the same in CPU time", form=".1f", kind=Kind.CPU),
    "tokens": number_of("tokens", "of a run"),
    "turns": number_of("turns", "of a run"),
}


@dataclass(kw_only=True)
class Measured:
    """One run. cpu_s: of the node's own process. steps: of all engines."""

    tokens: int
    turns: int
    steps: int
    cpu_s: float
    wall_s: float
    lags: Lags = field(default_factory=Lags)

    def figures(self) -> dict[str, float]:
        return {
            "cpu_token_s": self.cpu_s / self.tokens,
            "full_tokens_per_s": self.tokens / self.cpu_s,
            "tokens_per_s": self.tokens / self.wall_s,
            "step_tokens": self.tokens / self.steps,
            "lag_p99_s": float(np.percentile(self.lags.wall_s, 99)),
            "lag_cpu_p99_s": float(np.percentile(self.lags.cpu_s, 99)),
            "tokens": self.tokens,
            "turns": self.turns,
        }


def costs(dense: Measured, sparse: Measured) -> tuple[float, float]:
    """Returns (seconds of a token, seconds of an engine step) that explain both. Raises BenchFailed for like shapes.

    >>> dense = Measured(tokens=1000, turns=1, steps=10, cpu_s=0.011, wall_s=1.0)
    >>> sparse = Measured(tokens=1000, turns=1, steps=100, cpu_s=0.02, wall_s=1.0)
    >>> [round(cost, 7) for cost in costs(dense, sparse)]
    [1e-05, 0.0001]
    """
    rows = np.array([[one.tokens, one.steps] for one in (dense, sparse)], float)
    if min(rows[:, 0] / rows[:, 1]) * 1.5 > max(rows[:, 0] / rows[:, 1]):
        raise BenchFailed("both shapes have as many tokens a step. Fix: more trajectories at a time, or more turns")
    token_s, step_s = np.linalg.solve(rows, [dense.cpu_s, sparse.cpu_s])
    return float(token_s), float(step_s)


def measure(options: Options, keep: Keep) -> None:
    prepare_environment()
    with workspace(), asynchronous_scheduling(options.asynchronous):
        uvloop.run(Loop(options, keep).run())


class Loop:
    """The parts of a run without its learner."""

    def __init__(self, options: Options, keep: Keep) -> None:
        self.options, self.keep = options, keep
        self.chat = ChatTemplate.load(SHIPPED)
        self.prompts = list(islice(prompts("train", SEED), options.total // SAMPLES))
        self.timeline = Timeline()
        self.replicas: list[Replica] = []
        self.steps = 0
        self.select = select_and_score(RoC(keep=SAMPLES // 2), SEED)
        most = max(len(self.chat.prompt_ids(prompt.messages)) for prompt in self.prompts)
        self.max_tokens = most + options.turns * (3 * options.tokens // 2 + 200)
        prompt_ids = self.chat.prompt_ids(self.prompts[0].messages)
        self.script = Script(
            step_s=options.step_s,
            tokens=options.tokens,
            calls=options.turns - 1,
            filler=self.chat._encode("I think about it. " * 10),
            call=self.chat._encode(tool_call(CODE)),
            answer=self.chat._encode(r"<answer>\boxed{13}</answer>"),
            end=self.chat.end_of_turn,
            ends=prompt_ids.count(self.chat.end_of_turn),
        )

    async def run(self) -> None:
        options = self.options
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            recording = Recording(
                folder, RecordConfig(), self.timeline, step=1, tokenizer=None, note=lambda line: say(line)
            )
            self.recording = await stack.enter_async_context(recording)
            balancer = KvAware(self.max_tokens, moves=0)  # a moved request goes on under another seed
            fleet = Fleet(FleetConfig(replicas=options.replicas), self._replica, balancer, self.timeline)
            await stack.enter_async_context(fleet)
            runner: ToolRunner = Repeater({(CODE, ""): ToolResult(outcome="ok", stdout="1")}, options.tool_s)
            if options.tools == "jailed":
                limits = Limits(wall_s=2.0, cpu_s=2.0, memory_bytes=512 << 20)
                runner = await stack.enter_async_context(
                    Sandbox(SandboxConfig(slots=8, limits=limits, tiers=TIERS[:1]))
                )
            budget = RolloutConfig(max_tokens=self.max_tokens, max_turns=options.turns, deadline_s=3600)
            self.rollouts = Rollouts(budget, self.chat, fleet, [PythonTool(runner)], self.timeline, SEED)
            gc.collect()
            gc.freeze()  # as in a run: what vLLM and torch brought along is not collected again and again
            gc.set_threshold(50_000, 20, 1_000_000)
            say("what the floor repeats is recorded")
            self.schedules = [Schedule.of(trajectory, SEED) for trajectory in await self._trajectories()]
            modes: dict[str, Callable[[], Awaitable[Measured]]] = {
                "rollouts": partial(self._rolled, options.concurrent),
                "sparse": partial(self._rolled, options.concurrent // SPARSE),
                "bare": self._bare,
                "vllm": self._vllm,
            }
            if options.profile:
                with cProfile.Profile(time.thread_time) as profile:
                    await modes["rollouts"]()
                profile.dump_stats(options.profile)
            await self._interleave(modes)

    async def _interleave(self, modes: Mapping[str, Callable[[], Awaitable[Measured]]]) -> None:
        order = random.Random(SEED)
        for number in range(self.options.rounds):
            measured: dict[str, Measured] = {}
            for name in order.sample(sorted(modes), len(modes)):
                for replica in self.replicas:
                    await replica._engine.reset_prefix_cache()
                gc.collect()
                measured[name] = await modes[name]()
                cost = measured[name].cpu_s / measured[name].tokens * 1e6
                say(f"round {number + 1} of {self.options.rounds}: {name:8} {cost:6.2f} us of the node's CPU a token")
            self.keep(figures(measured))

    async def _trajectories(self) -> list[Trajectory]:
        """Rolls everything out, ungraded and unrecorded."""
        jobs = iter(range(self.options.total))
        made: dict[int, Trajectory] = {}

        async def work() -> None:
            for number in jobs:
                group, sample = divmod(number, SAMPLES)
                made[number] = await self.rollouts.run(self.prompts[group], sample, group)

        await _together(work, self.options.concurrent)
        return [made[number] for number in sorted(made)]

    async def _rolled(self, concurrent: int) -> Measured:
        """Rolls out, grades, selects and records."""
        total = self.options.total * concurrent // self.options.concurrent
        jobs, groups = iter(range(total)), _Groups(self.prompts, self._record)
        reward = MathReward(integers_only=True)
        turns = 0

        async def work() -> None:
            nonlocal turns
            for number in jobs:
                group, sample = divmod(number, SAMPLES)
                trajectory = await self.rollouts.run(self.prompts[group], sample, group)
                turns += len(trajectory.turns)
                groups.add(group, await graded(trajectory, reward, self.timeline, GRADE_DEADLINE_S))

        before = self.rollouts.tokens_sampled
        measured = await self._measure(work, concurrent)
        measured.tokens, measured.turns = self.rollouts.tokens_sampled - before, turns
        return measured

    def _record(self, step: int, groups: Sequence[Group]) -> None:
        selected = [self.select(group) for group in groups]
        self.recording.begin(step, selected, make_batch(step, selected))
        self.recording.trained({})

    async def _bare(self) -> Measured:
        return await self._repeated(partial(bare_turns, end=self.script.end), self.schedules)

    async def _vllm(self) -> Measured:
        return await self._repeated(partial(vllm_turns, end=self.script.end), self.schedules[::VLLM_EVERY])

    async def _repeated(self, turns: Callable[..., Awaitable[int]], schedules: Sequence[Schedule]) -> Measured:
        """Generates schedules, each on the replica of its worker."""
        jobs, homes, tokens = iter(enumerate(schedules)), count(), 0

        async def work() -> None:
            nonlocal tokens
            replica = self.replicas[next(homes) % len(self.replicas)]
            for number, schedule in jobs:
                generated = await turns(replica, f"repeated-{number}", schedule)
                tokens += generated

        measured = await self._measure(work, self.options.concurrent)
        measured.tokens = tokens
        measured.turns = sum(len(schedule.turns) for schedule in schedules)
        return measured

    async def _measure(self, work: Callable[[], Awaitable[None]], concurrent: int) -> Measured:
        steps, cpu_s, wall_s, lags = self.steps, time.process_time(), time.perf_counter(), Lags()
        async with asyncio.TaskGroup() as watching:
            ticking = watching.create_task(lags.tick(LAG_EVERY_S), name="lags")
            await _together(work, concurrent)
            ticking.cancel()
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        return Measured(tokens=0, turns=0, steps=self.steps - steps, cpu_s=cpu_s, wall_s=wall_s, lags=lags)

    def _replica(self, index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> Replica:
        def stepped(replica: int, sample: KvSample) -> None:
            self.steps += sample.steps
            on_step(replica, sample)

        most = -(-self.options.concurrent // self.options.replicas)
        config = StubConfig(
            checkpoint=str(SHIPPED),
            max_model_len=self.max_tokens + 32,
            max_num_seqs=2 * most,
            kv_blocks=2 * most * -(-self.max_tokens // 32),
            script=self.script,
        )
        self.replicas.append(Replica(config, index, None, stepped))
        return self.replicas[-1]


class _Groups:
    """Puts trajectories together into groups, and GROUPS groups into a step."""

    def __init__(self, prompts: Sequence[Prompt], record: Callable[[int, Sequence[Group]], None]) -> None:
        self._prompts, self._record = prompts, record
        self._members: dict[int, list[Trajectory]] = {}
        self._whole: list[Group] = []
        self._step = 0

    def add(self, group: int, trajectory: Trajectory) -> None:
        members = self._members.setdefault(group, [])
        members.append(trajectory)
        if len(members) < SAMPLES:
            return
        ordered = tuple(sorted(self._members.pop(group), key=lambda member: member.sample))
        self._whole.append(Group(prompt=self._prompts[group], trajectories=ordered, lease=group))
        if len(self._whole) == GROUPS:
            self._step += 1
            self._record(self._step, self._whole)
            self._whole = []


async def _together(work: Callable[[], Awaitable[None]], count: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(work(), name=f"load-{number}")  # type: ignore[arg-type]


def figures(measured: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    """Returns the figures of a round, by mode."""
    rolled, floor, vllm = measured["rollouts"], measured["bare"], measured["vllm"]
    token_s, step_s = costs(rolled, measured["sparse"])
    shown = {name: one.figures() for name, one in measured.items()}
    floor_s = floor.cpu_s * rolled.tokens / floor.tokens
    shown["rollouts"] |= {
        "token_s": token_s,
        "step_s": step_s,
        "turn_s": (rolled.cpu_s - floor_s) / rolled.turns,
        "over_bare": rolled.cpu_s / floor_s,
        "of_vllm": rolled.cpu_s / rolled.tokens / (vllm.cpu_s / vllm.tokens),
    }
    return shown


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("cpu_token_s", "token_s", "step_s", "lag_p99_s"),
    quick={"rounds": "2", "replicas": "2", "concurrent": "256", "tokens": "100", "step_s": "0.01"},
)
