"""What does recording a run cost? One quick start in which every other step is recorded.

    rocstar bench recording [rounds=120] [field=value of the quick start ...]

Steps are taken in pairs, of which one is recorded; a pair is a round, and the first one does not count. Both steps of a
pair do the same work: the same prompts, the same seeds, and a learning rate so tiny that the policy stays as it is. As
many pairs begin with the recorded step as end with it, in an order drawn by chance, so what a second step of the same
prompts saves concerns both alike, as do trends of the machine.

A pair beside which others used more than 5 % of the machine does not count. Where the machine is not quiet when the
bench begins, or half of twenty pairs did not count, the bench ends with an error and no figures.

The direct figures are the CPU of the recording's thread and of its calls in the event loop; what it costs elsewhere,
such as the learner's answers to it, is in the ratios only.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import uvloop

from algo.reward.math_reward import MathReward
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import Kind, Metric, milliseconds, ratio, seconds, share
from bench.measuring.processes import cpu_seconds
from bench.measuring.terminal import say
from engine import metric_names as metric
from engine.assembly.training import Training, training
from engine.console.options import Rest, parse
from engine.recipe import Run
from engine.recording.groups import Explain
from engine.recording.recording import Recording
from engine.run.run_folder import RunFolder
from engine.stages.train import TrainStage
from engine.telemetry.others import OthersMeter
from engine.types import Batch, Group, LearnerNumbers, Prompt
from recipes.quickstart import Config
from recipes.tiny.task import prompts, python_tool
from sandbox.require import at_least, require_fields

SKIP = 2  # first steps, in which caches and the allocator warm up
QUIET = 0.05  # share of the machine that others may use beside a pair
LOOK_S = 3.0  # for which the machine is watched before the bench begins
ENOUGH = 20  # pairs after which it is known whether most are disturbed
ALIKE = ("checkpoint_every=1000", "learner.lr=1e-9")


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "pairs of steps"] = 120
    fields: Annotated[tuple[str, ...], Rest("options of the quick start")] = ()

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds")


METRICS = {
    "wall_ratio": ratio("time of a step", "a recorded step over its neighbour", form=".3f"),
    "cpu_ratio": ratio("CPU of all processes", "a recorded step over its neighbour", form=".3f"),
    "node_ratio": ratio("CPU of the node", "a recorded step over its neighbour", form=".3f"),
    "learn_ratio": ratio("the learner's turn", "a recorded step over its neighbour", form=".3f"),
    "direct_share": share("CPU of the recording", "share of that of all processes in a recorded step", kind=Kind.CPU),
    "direct_node_share": share(
        "of the node's", "CPU of the recording, share of the node's in such a step", kind=Kind.CPU
    ),
    "loop_s": milliseconds("in the event loop", "time for which the recording's calls held it, per step"),
    "thread_s": milliseconds("in the thread", "CPU of the recording's thread, per step", kind=Kind.CPU),
    "step_s": seconds("a recorded step", "without evaluations"),
    "step_cpu_s": Metric(title="its CPU", doc="of all processes", kind=Kind.CPU, unit=" s"),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step took. wall_s: without evaluations. cpu_s: of all processes. loop_s, thread_s: of the recording."""

    recorded: bool
    wall_s: float
    cpu_s: float
    node_s: float
    learn_s: float
    loop_s: float
    thread_s: float


class Spent(NamedTuple):
    """CPU since the start of the run."""

    cpu_s: float
    node_s: float


class Switch:
    """Stands in the place of a Recording in the learner's stage, is on for some steps only, and measures it."""

    def __init__(self, job: Training, order: Iterator[bool], then: Callable[[Step], None]) -> None:
        assert job.recording is not None, "recording is on by default"
        self._job, self._recording, self._then = job, job.recording, then
        self._order = order
        self._on = next(order)
        self._loop_s = self._thread_s = 0.0
        self._mark = self._spent()
        self._cut: Callable[[], None] = self._recording.cut
        self._post: Callable[..., None] = self._recording._post
        vars(self._recording).update(cut=self.cut, _post=self._measured)

    def begin(self, step: int, groups: Sequence[Group], batch: Batch, explain: Explain | None = None) -> list[int]:
        with self._timed():
            return self._recording.begin(step, groups, batch, explain) if self._on else []

    def trained(self, numbers: Mapping[int, LearnerNumbers]) -> None:
        with self._timed():
            if self._on:
                self._recording.trained(numbers)
            else:
                self.cut()

    def cut(self) -> None:
        """Cuts the timeline. Steps that are not recorded are not kept for later either."""
        if self._on:
            self._cut()
        else:
            self._job.timeline.drain()

    def over(self, metrics: Mapping[str, float]) -> None:
        """Counts a step that is over."""
        spent = self._spent()
        before, self._mark = self._mark, spent
        step = Step(
            recorded=self._on,
            wall_s=metrics[metric.TIME_STEP_S],
            cpu_s=spent.cpu_s - before.cpu_s,
            node_s=spent.node_s - before.node_s,
            learn_s=metrics[metric.TIME_LEARN_S],
            loop_s=self._loop_s,
            thread_s=self._thread_s,
        )
        self._loop_s = self._thread_s = 0.0
        self._on = next(self._order)
        self._then(step)

    def _spent(self) -> Spent:
        cpu_s = sum(cpu_seconds(os.getpid()).values())
        return Spent(cpu_s=cpu_s, node_s=time.process_time())

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._loop_s += time.perf_counter() - started

    def _measured(self, job: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            started = time.thread_time()
            try:
                job(*args)
            finally:
                self._thread_s += time.thread_time() - started

        self._post(run)


def order_of_pairs(seed: int) -> Iterator[bool]:
    """Yields which steps are recorded: one of each pair, of every two pairs the first in one and the second in one."""
    rng = random.Random(seed)
    while True:
        first = rng.random() < 0.5
        yield from (first, not first, not first, first)


def twice(prompts: Iterator[Prompt], count: int) -> Iterator[Prompt]:
    """Yields so many prompts, the same ones again, and so on: the two steps of a pair have the same work."""
    while True:
        those = list(islice(prompts, count))
        yield from those
        yield from those


class Pairs:
    """Keeps a round for each whole pair of steps after those that warm up, if nobody disturbed it.

    others: the share of the machine that others have used since it was called last; None where that is not known.
    Raises BenchFailed where too few pairs count.
    """

    def __init__(self, keep: Keep, others: Callable[[], float | None]) -> None:
        self._keep, self._others = keep, others
        self._steps: list[Step] = []
        self._pairs = self._disturbed = 0

    def add(self, step: Step) -> None:
        self._steps.append(step)
        count = len(self._steps) - SKIP
        if count % 2:
            return
        others = self._others()
        if count <= 0:
            return
        self._pairs += 1
        if others is not None and others > QUIET:
            self._disturbed += 1
            say(f"pair {self._pairs} does not count: others used {100 * others:.0f} % of the machine")
            if self._disturbed >= ENOUGH / 2 and self._disturbed >= self._pairs / 2:
                raise BenchFailed(f"{self._disturbed} of {self._pairs} pairs were disturbed. Fix: run it alone")
            return
        first, second = self._steps[-2:]
        self._keep({"": figures(*((first, second) if first.recorded else (second, first)))})


def figures(on: Step, off: Step) -> dict[str, float]:
    """Compares a recorded step with its neighbour."""
    return {
        **{f"{name}_ratio": getattr(on, f"{name}_s") / getattr(off, f"{name}_s") for name in ("wall", "cpu", "node")},
        "learn_ratio": on.learn_s / off.learn_s,
        "direct_share": (on.loop_s + on.thread_s) / on.cpu_s,
        "direct_node_share": (on.loop_s + on.thread_s) / on.node_s,
        "loop_s": on.loop_s,
        "thread_s": on.thread_s,
        "step_s": on.wall_s,
        "step_cpu_s": on.cpu_s,
    }


def measure(options: Options, keep: Keep) -> None:
    meter = OthersMeter()
    time.sleep(LOOK_S)
    if (others := meter.share() or 0.0) > QUIET:
        raise BenchFailed(
            f"others use {100 * others:.0f} % of the machine, above {100 * QUIET:.0f} %. Fix: run it alone"
        )
    steps = SKIP + 2 * options.rounds
    say(f"a quick start of {steps} steps")
    config = parse(Config, [f"steps={steps}", *ALIKE, *options.fields])
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_train(config, Path(folder), Pairs(keep, meter.share)))


async def _train(config: Config, folder: Path, pairs: Pairs) -> None:
    """Runs the quick start without evaluations between its steps."""
    with RunFolder.open(folder, "bench") as opened:
        async with training(config.training(), Run(folder=opened)) as job:
            switch = Switch(job, order_of_pairs(config.seed), pairs.add)
            rollouts, reward = job.rollouts([python_tool(job.sandbox)]), MathReward(integers_only=True)
            stage = job.train(config.make_batch)
            assert isinstance(stage.run, TrainStage)
            stage.run.recording = cast(Recording, switch)
            then = stage.run.on_trained

            async def on_trained(step: int, metrics: dict[str, float]) -> None:
                await then(step, metrics)
                switch.over(metrics)

            stage.run.on_trained = on_trained
            stream = twice(prompts("train", config.seed), config.prompts_per_step)
            await job.run([job.admit(stream), job.group(rollouts, reward, config.select), job.batch(), stage])


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("node_ratio", "wall_ratio", "cpu_ratio", "direct_share"),
    quick={"rounds": "10"},
)
