"""What recording costs: one quick start in which every other step is recorded.

    python -m bench recording [--quick] [--steps 60] [field=value ...]

Steps are taken in pairs, one of each pair is recorded, which one by chance; the first pair does not count. A pair are
neighbours, so that what the machine and the policy do in the long run is the same for both.

The learning rate is tiny, so that all steps are alike and none has nothing to train.

wall_share, cpu_share, node_share: how much longer a recorded step took than its neighbour, how much more CPU all
processes of the run used for it, and the node alone; median and a 95 % interval by bootstrap over the pairs. These
machines are noisy, so the cost is measured directly too: direct_share is the CPU of the recording's thread and of its
calls in the event loop, per second of CPU of all processes in recorded steps. loop_ms: how long its calls held the
event loop, per step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from algo.group.batch import make_batch, select_and_score
from algo.reward.math_reward import MathReward
from bench.measuring.processes import cpu_seconds
from bench.measuring.report import at_least, environment, fill, finish, interruptible, say
from engine.assembly.training import Training, training
from engine.console.options import parse
from engine.recording.recording import Recording
from engine.run.run_folder import RunFolder
from engine.stages.train import TrainStage
from engine.types import Batch, Group, LearnerNumbers
from recipes.quickstart import Config
from recipes.tiny.task import prompts

SKIP = 2  # first steps, in which caches and the allocator warm up
RESAMPLES = 10_000
ALIKE = ("checkpoint_every=1000", "learner.lr=1e-9")
PARTS = {
    "wall": "time of a step",
    "cpu": "CPU of all processes",
    "node": "CPU of the node",
    "learn": "the learner's turn",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """wall_s: without evaluations. cpu_s: of all processes; node_s: of the node's. loop_s, thread_s: of the recording
    itself.
    """

    recorded: bool
    wall_s: float
    cpu_s: float
    node_s: float
    learn_s: float
    loop_s: float
    thread_s: float
    bytes: int


class Spent(NamedTuple):
    """Since the start of the run."""

    cpu_s: float
    node_s: float
    bytes: int


class Switch:
    """In the place of a Recording in the learner's stage: one that is on for some steps only, and measured."""

    def __init__(self, job: Training, seed: int) -> None:
        assert job.recording is not None, "recording is on by default"
        self.steps: list[Step] = []
        self._job, self._recording = job, job.recording
        self._rng = random.Random(seed)
        self._on, self._next = True, False
        self._loop_s = self._thread_s = 0.0
        self._mark = self._spent()
        self._cut, post = self._recording.cut, self._recording._post
        self._post: Callable[..., None] = post
        vars(self._recording).update(cut=self.cut, _post=self._measured)

    def begin(self, step: int, groups: Sequence[Group], batch: Batch) -> list[int]:
        with self._timed():
            return self._recording.begin(step, groups, batch) if self._on else []

    def trained(self, numbers: Mapping[int, LearnerNumbers]) -> None:
        with self._timed():
            if self._on:
                self._recording.trained(numbers)
            else:
                self.cut()

    def cut(self) -> None:
        """What is not recorded is not kept for later either."""
        if self._on:
            self._cut()
        else:
            self._job.timeline.drain()

    def over(self, metrics: Mapping[str, float]) -> None:
        """A step is over. The next one of a pair is what this one was not."""
        spent = self._spent()
        before, self._mark = self._mark, spent
        self.steps.append(
            Step(
                recorded=self._on,
                wall_s=metrics["time/step_s"],
                cpu_s=spent.cpu_s - before.cpu_s,
                node_s=spent.node_s - before.node_s,
                learn_s=metrics["time/learn_s"],
                loop_s=self._loop_s,
                thread_s=self._thread_s,
                bytes=spent.bytes - before.bytes,
            )
        )
        self._loop_s = self._thread_s = 0.0
        self._on = not self._on if len(self.steps) % 2 else self._rng.random() < 0.5

    def _spent(self) -> Spent:
        cpu_s = sum(cpu_seconds(os.getpid()).values())
        return Spent(cpu_s=cpu_s, node_s=time.process_time(), bytes=_size(self._recording))

    @contextmanager
    def _timed(self) -> Any:
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


def _size(recording: Recording) -> int:
    return sum(path.stat().st_size for path in recording._folder.folder.rglob("*.*") if path.suffix in (".rec", ".seg"))


async def _train(config: Config, folder: Path, steps: list[Step], seed: int) -> None:
    """The quick start without evaluations between its steps. Fills `steps` as it goes."""
    with RunFolder.open(folder, "bench") as run:
        async with training(config.training(), run) as job:
            switch = Switch(job, seed)
            switch.steps = steps
            rollouts, reward = job.rollouts(config.tools(job.sandbox)), MathReward(integers_only=True)
            stage = job.train(make_batch)
            assert isinstance(stage.run, TrainStage)
            vars(stage.run)["recording"] = switch
            then = stage.run.on_trained

            async def on_trained(step: int, metrics: dict[str, float]) -> None:
                await then(step, metrics)
                switch.over(metrics)

            vars(stage.run)["on_trained"] = on_trained
            select = select_and_score(config.selector, config.seed)
            stream = prompts("train", config.seed)
            await job.run([job.admit(stream), job.group(rollouts, reward, select), job.batch(), stage])


def pairs(steps: Sequence[Step]) -> list[tuple[Step, Step]]:
    """(recorded, not recorded) of neighbours, those that warm up left out."""
    found = zip(islice(steps, SKIP, None, 2), islice(steps, SKIP + 1, None, 2), strict=False)
    return [(one, other) if one.recorded else (other, one) for one, other in found]


def share(found: Sequence[tuple[Step, Step]], name: str, seed: int = 0) -> tuple[float, float, float]:
    """Median of how much more of it a recorded step has than its neighbour, as a share, and a 95 % interval."""
    ratios = np.asarray([getattr(on, name) / getattr(off, name) - 1 for on, off in found])
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def metrics_of(steps: Sequence[Step]) -> dict[str, float]:
    found = pairs(steps)
    recorded = [on for on, _ in found]
    metrics: dict[str, float] = {"pairs": len(found)}
    for name in PARTS:
        middle, low, high = share(found, f"{name}_s")
        metrics |= {f"{name}_share": middle, f"{name}_share_low": low, f"{name}_share_high": high}
    cpu_s = sum(step.cpu_s for step in recorded)
    return metrics | {
        "step_s": sum(step.wall_s for step in recorded) / len(recorded),
        "step_cpu_s": cpu_s / len(recorded),
        "direct_share": sum(step.loop_s + step.thread_s for step in recorded) / cpu_s,
        "loop_ms": 1e3 * sum(step.loop_s for step in recorded) / len(recorded),
        "thread_ms": 1e3 * sum(step.thread_s for step in recorded) / len(recorded),
        "kb_per_step": sum(step.bytes for step in recorded) / len(recorded) / 1024,
    }


def show(options: argparse.Namespace, machine: dict[str, Any], steps: Sequence[Step]) -> None:
    found = metrics_of(steps)
    intervals = [[f"{what}, recorded against not", _interval(found, name)] for name, what in PARTS.items()]
    rows = [
        *intervals,
        ["CPU of the recording, of that of all processes", f"{found['direct_share']:.2%}"],
        ["of it in the event loop, per step", f"{found['loop_ms']:.1f} ms"],
        ["of it in the thread, per step", f"{found['thread_ms']:.1f} ms"],
        ["a step", f"{found['step_s']:.2f} s, {found['step_cpu_s']:.2f} s of CPU"],
        ["written per step", f"{found['kb_per_step']:.0f} kB"],
    ]
    title = f"What recording costs, {found['pairs']} pairs of steps"
    finish("recording", title, ("metric", "value"), rows, config=vars(options), metrics=found, environment=machine)


def _interval(found: Mapping[str, float], name: str) -> str:
    low, high = found[f"{name}_share_low"], found[f"{name}_share_high"]
    return f"{found[f'{name}_share']:+.1%} [{low:+.1%}, {high:+.1%}]"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench recording", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 steps")
    parser.add_argument("--steps", type=at_least(SKIP + 4))
    parser.add_argument("fields", nargs="*", metavar="field=value", help="of the quick start")
    options = parser.parse_intermixed_args(given)
    fill(options, steps=(10, 60))
    return options


def measure(options: argparse.Namespace, steps: list[Step]) -> None:
    say(f"a quick start of {options.steps} steps")
    config = parse(Config, [f"steps={options.steps}", *ALIKE, *options.fields])
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_train(config, Path(folder), steps, config.seed))


def main() -> None:
    options, machine = arguments(), environment()
    steps: list[Step] = []
    interruptible(lambda: measure(options, steps), lambda: show(options, machine, steps), steps)
