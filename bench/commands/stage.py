"""Recorded groups through an async stage of yours, without engines, learner or GPU.

    python -m bench stage my.py:skip_easy --feed runs/quickstart [--step 8] [--times 20]

NAME is a stage as recipes have them, `async def stage(inbox, outbox)`. It gets the groups of the run's recorded steps
(of one step with --step), as `job.group` would put them out. What it puts out is counted; what it raises ends the
bench. The table says how many items a second it takes, where its seconds go, and at which lines it held the loop up.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.measuring.report import say, table
from engine.errors import BadInput
from engine.pipeline.pipeline import Inbox, Outbox, Pipeline, Stage, StageFunction, StageStats
from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, with_tokens
from engine.telemetry.host_meter import HostMeter
from engine.types import Group


class Unusable(ValueError):
    """What is no stage, in one line."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """stats: of the stage. blocked_at: seconds for which it held the event loop up, by line."""

    stats: StageStats
    seconds: float
    cpu_s: float
    blocked_at: dict[str, float]


def load(words: str) -> StageFunction:
    """Raises Unusable for what is not FILE.py:NAME with such a function."""
    file, _, name = words.partition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() and name else None
    if spec is None or spec.loader is None:
        raise Unusable(f"{words!r} is no stage. Fix: FILE.py:NAME, a file that is there and a function of it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        there = ", ".join(each for each in vars(module) if asyncio.iscoroutinefunction(getattr(module, each)))
        raise Unusable(f"{file} has no stage {name}. Fix: one of {there or 'none'}")
    stage: StageFunction = found
    return stage


def groups(run: RecordedRun, step: int | None = None) -> Iterator[Group]:
    """Those of the steps that are kept whole. Raises BadInput where there are none."""
    found = run.find(step)
    tokenizer = load_tokenizer(run.tokenizer)
    for number in run.steps if step is None else [found]:
        for recorded in run.groups(number):
            tokens = run.tokens(number, recorded.number)
            if tokens is not None and recorded.whole:
                yield with_tokens(recorded, tokens, tokenizer)


async def measure(stage: StageFunction, feed: Sequence[Group], times: int) -> Found:
    """The groups so many times through the stage."""

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
    return Found(
        stats=pipeline.stats()[1], seconds=seconds, cpu_s=time.thread_time() - cpu_s, blocked_at=meter.blocked_at
    )


def show(words: str, found: Found) -> None:
    stats = found.stats
    rows = [
        ["items in", str(stats.items_in)],
        ["items out", f"{stats.items_out} ({stats.items_in - stats.items_out} dropped or held back)"],
        ["items per second", f"{stats.items_in / found.seconds:,.0f}"],
        ["CPU per item", f"{1e6 * found.cpu_s / max(1, stats.items_in):,.0f} us"],
        ["busy", f"{stats.busy_s:.3f} s"],
        ["blocked on input", f"{stats.blocked_in_s:.3f} s"],
        ["blocked on output", f"{stats.blocked_out_s:.3f} s"],
    ]
    rows += [[f"held the event loop up at {place}", f"{seconds:.3f} s"] for place, seconds in found.blocked_at.items()]
    table(words, ["", ""], rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench stage", description=__doc__.splitlines()[0])
    parser.add_argument("stage", metavar="FILE.py:NAME")
    parser.add_argument("--feed", type=Path, required=True, metavar="RUN", help="folder of a recorded run")
    parser.add_argument("--step", type=int, help="of the run; none: all that are recorded")
    parser.add_argument("--times", type=int, default=20, help="how often each group is fed")
    options = parser.parse_args(argv)
    try:
        stage = load(options.stage)
        say(f"reading the groups of {options.feed}")
        feed = list(groups(RecordedRun(options.feed), options.step))
    except (Unusable, BadInput) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(options.stage, uvloop.run(measure(stage, feed, options.times)))
    return 0
