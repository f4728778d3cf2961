"""Feeds recorded groups to an async stage of yours, without engines, learner or GPU.

    rocstar bench stage my.py:skip_easy feed=runs/quickstart [step=8] [times=20]

NAME is a stage as recipes have them, `async def stage(inbox, outbox)`. It gets the groups of the run's recorded steps
(of one step with `step`), as `job.group` would put them out. Its output is counted; an exception of it ends the bench.
The table says how many items a second it takes, where its seconds go, and at which lines it held the loop up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import uvloop

from bench.measuring.terminal import say, table
from engine.console.options import Positional, parse
from engine.pipeline.pipeline import Inbox, Outbox, Pipeline, Stage, StageFunction, StageStats
from engine.recipe import module_of
from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, with_tokens
from engine.telemetry.host_meter import HostMeter
from engine.types import Group
from sandbox.require import at_least, require


@dataclass(frozen=True, kw_only=True)
class Options:
    stage: Annotated[str, Positional("the stage, FILE.py:NAME")]
    feed: Annotated[Path, "folder of a recorded run"]
    step: Annotated[int | None, "a step of the run; none: all that are recorded"] = None
    times: Annotated[int, "how often each group is fed"] = 20

    def __post_init__(self) -> None:
        require("times", self.times, at_least(1))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """blocked_at: seconds for which the stage held the event loop up, by line."""

    stats: StageStats
    seconds: float
    cpu_s: float
    blocked_at: dict[str, float]


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench stage", description=__doc__)
    stage = load(options.stage)
    say(f"reading the groups of {options.feed}")
    feed = list(groups(RecordedRun(options.feed), options.step))
    show(options.stage, uvloop.run(measure(stage, feed, options.times)))
    return 0


def load(name: str) -> StageFunction:
    """Loads a stage by FILE.py:NAME. Raises ValueError where there is no such function."""
    file, _, function = name.partition(":")
    path = Path(file)
    if not (path.is_file() and path.suffix == ".py" and function):
        raise ValueError(f"{name!r} is no stage. Fix: FILE.py:NAME, a file that is there and a function of it")
    module = module_of(path, f"stage_{path.stem}")
    stage = getattr(module, function, None)
    if not callable(stage):
        there = [each for each in vars(module) if asyncio.iscoroutinefunction(getattr(module, each))]
        raise ValueError(f"{file} has no stage {function}. Fix: one of {', '.join(there) or 'none'}")
    checked: StageFunction = stage
    return checked


def groups(run: RecordedRun, step: int | None = None) -> Iterator[Group]:
    """Yields the groups that are kept whole. Raises BadInput where the run has no such step."""
    wanted = run.find(step)
    tokenizer = load_tokenizer(run.tokenizer)
    for number in run.steps if step is None else [wanted]:
        for recorded in run.groups(number):
            tokens = run.tokens(number, recorded.number)
            if tokens is not None and recorded.whole:
                yield with_tokens(recorded, tokens, tokenizer)


async def measure(stage: StageFunction, feed: Sequence[Group], times: int) -> Measured:
    """Sends the groups so many times through the stage."""

    async def source(inbox: Inbox, outbox: Outbox) -> None:
        for number in range(times):
            if number % max(1, times // 10) == 0:
                say(f"{number} of {times} times through the stage")
            for group in feed:
                await outbox.put(group)

    pipeline = Pipeline([Stage(name="feed", run=source), Stage(name="yours", run=stage)])
    meter = HostMeter()
    watching = asyncio.create_task(meter.run(), name="host")
    await asyncio.sleep(0)
    began, cpu_s = time.perf_counter(), time.thread_time()
    try:
        await pipeline.run()
    finally:
        watching.cancel()
    seconds = time.perf_counter() - began
    return Measured(
        stats=pipeline.stats()[1], seconds=seconds, cpu_s=time.thread_time() - cpu_s, blocked_at=meter.blocked_at
    )


def show(name: str, measured: Measured) -> None:
    stats = measured.stats
    rows = [
        ["items in", str(stats.items_in)],
        ["items out", f"{stats.items_out} ({stats.items_in - stats.items_out} dropped or held back)"],
        ["items per second", f"{stats.items_in / measured.seconds:,.0f}"],
        ["CPU per item", f"{1e6 * measured.cpu_s / max(1, stats.items_in):,.0f} us"],
        ["busy", f"{stats.busy_s:.3f} s"],
        ["blocked on input", f"{stats.blocked_in_s:.3f} s"],
        ["blocked on output", f"{stats.blocked_out_s:.3f} s"],
    ]
    rows += [[f"held the event loop up at {place}", f"{held_s:.3f} s"] for place, held_s in measured.blocked_at.items()]
    table(name, ["", ""], rows)
