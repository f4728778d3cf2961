"""Feeds recorded groups to an async stage of yours, without engines, learner or GPU.

    rocstar bench stage my.py:skip_easy feed=runs/quickstart [step=8] [seconds=10]

NAME is a stage as recipes have them, `async def stage(inbox, outbox)`. It gets the groups of the run's recorded steps
(of one step with `step`) over and over, as `job.group` would put them out, until the time is over or Ctrl-C. Its output
is counted; an exception of it ends the bench, with one line that names file and line. The table says how many items a
second it takes, where its seconds go, how long it holds the event loop up for an item, and which share of the loop that
is at the run's own pace.

Only groups whose tokens the record keeps with their numbers can be fed; the bench says how many those are. The loop is
asyncio's own, whose waiting can be measured; a run's uvloop spends some microseconds less on an item.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import selectors
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bench.measuring.terminal import say, table, written
from bench.measuring.user_file import attribute_of, told
from engine import metric_names as metric
from engine.console.options import Positional, parse
from engine.errors import first_error
from engine.pipeline.pipeline import Inbox, Outbox, Pipeline, Stage, StageFunction, StageStats
from engine.recording.damage import damage, groups_with_tokens, readable
from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, with_tokens
from engine.telemetry.host_meter import HostMeter
from engine.types import Group
from engine.user_parts import place_of
from sandbox.require import positive, require

PLOT = Path("runs/bench/stage.png")
NOTABLE = 0.05  # a line that blocks the loop for a smaller share of the time is not shown: it may be the machine
GRACE_S = 1.0  # what the stage holds when the time is over may come out within this time


@dataclass(frozen=True, kw_only=True)
class Options:
    stage: Annotated[str, Positional("the stage, FILE.py:NAME")]
    feed: Annotated[Path, "folder of a recorded run"]
    step: Annotated[int | None, "a step of the run; none: all that are recorded"] = None
    seconds: Annotated[float, "for which groups are fed"] = 10.0

    def __post_init__(self) -> None:
        require("seconds", self.seconds, positive)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """held_s: for how long the event loop did anything but wait. blocked_at: seconds for which the stage blocked the
    loop, by line.
    """

    stats: StageStats
    seconds: float
    cpu_s: float
    held_s: float
    blocked_at: dict[str, float]

    @property
    def held_per_item_s(self) -> float:
        return self.held_s / max(1, self.stats.items_in)


class TimedSelector(selectors.DefaultSelector):
    """The selector of an event loop, which sums the seconds for which the loop waited in it."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        began = time.perf_counter()
        try:
            return super().select(timeout)
        finally:
            self.waited_s += time.perf_counter() - began


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench stage", description=__doc__)
    stage = load(options.stage)
    run = RecordedRun(options.feed)
    feed = list(groups(run, options.step))
    steps = steps_of(run, options.step)
    read = {number: groups_with_tokens(run, number) for number in steps}
    recorded = sum(readable(run, number, read[number]).written or read[number] for number in steps)
    say(f"fed: {len(feed)} of the {recorded} groups of {len(steps)} step{'s' * (len(steps) > 1)} of {options.feed}")
    lost = [line for number in steps for line in damage(run, number, read[number], with_tokens=True)]
    for line in lost:
        print(line)
    if not feed and lost:
        raise ValueError(f"no group of {options.feed} can be fed: its record is damaged. Fix: feed= another run")
    if not feed:
        raise ValueError(f"{options.feed} keeps the tokens of no group. Fix: a run with record.token_groups above 0")
    try:
        measured, interrupted = fed(stage, feed, options.seconds)
    except Exception as error:
        cause = told(error, Path(options.stage.rpartition(":")[0]))
        fix = "correct this line of the stage" if cause.endswith(")") else "take groups from the inbox until it ends"
        fix = "" if "Fix:" in cause else f". Fix: {fix}"
        raise ValueError(f"the stage {place_of(stage)} failed: {cause}{fix}") from error
    if interrupted:
        say("interrupted: the figures are those until then")
    show(options.stage, measured, pace(options.feed))
    return 130 if interrupted else 0


def fed(stage: StageFunction, feed: Sequence[Group], seconds: float) -> tuple[Measured, bool]:
    """Feeds the stage and returns what was measured, and whether Ctrl-C ended it. Raises what the stage raises."""
    selector = TimedSelector()
    parts: list[Measured] = []
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        interrupted = False
        try:
            runner.run(measure(stage, feed, seconds, selector, parts))
        except KeyboardInterrupt:
            if not parts:
                raise
            interrupted = True
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
    return parts[0], interrupted


def load(name: str) -> StageFunction:
    """Loads a stage by FILE.py:NAME. Raises ValueError where there is no such function."""
    stage, _ = attribute_of(name, "stage")
    own = stage if inspect.isroutine(stage) or isinstance(stage, partial) else type(stage).__call__
    who = f"the stage {place_of(stage)}"
    if inspect.isasyncgenfunction(own):
        raise ValueError(f"{who} yields. Fix: put items out with await outbox.put(item)")
    if not inspect.iscoroutinefunction(own):
        raise ValueError(f"{who} is not async. Fix: async def {name.rpartition(':')[2]}(inbox, outbox)")
    try:
        inspect.signature(stage).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{who} cannot be called with an inbox and an outbox: {error}. Fix: let it take both"
        ) from error
    checked: StageFunction = stage
    return checked


def groups(run: RecordedRun, step: int | None = None) -> Iterator[Group]:
    """Yields the groups that are kept whole. Raises BadInput where the run has no such step."""
    tokenizer = load_tokenizer(run.tokenizer)
    for number in steps_of(run, step):
        for recorded in run.groups(number):
            tokens = run.tokens(number, recorded.number)
            if tokens is not None and recorded.whole:
                yield with_tokens(recorded, tokens, tokenizer)


def steps_of(run: RecordedRun, step: int | None) -> list[int]:
    """Returns the recorded steps that are fed. Raises BadInput where the run has no such step."""
    wanted = run.find(step)
    return run.steps if step is None else [wanted]


def pace(run: Path) -> float | None:
    """Returns the groups per second of the run's steps; None where its metrics do not say."""
    groups = seconds = 0.0
    with suppress(OSError, ValueError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            if metric.TIME_STEP_S in row:
                groups += row.get(metric.GROUPS_ALL, 0)
                seconds += row[metric.TIME_STEP_S]
    return groups / seconds if groups and seconds else None


async def measure(
    stage: StageFunction, feed: Sequence[Group], seconds: float, selector: TimedSelector, parts: list[Measured]
) -> None:
    """Sends the groups through the stage, over and over for so many seconds. Appends what was measured to `parts`, also
    if it is cancelled meanwhile.
    """
    began = time.perf_counter()

    async def source(inbox: Inbox, outbox: Outbox) -> None:
        said_s = 0.0
        while True:
            for group in feed:
                passed_s = time.perf_counter() - began
                if passed_s >= seconds:
                    return
                if passed_s - said_s >= 1.0:
                    said_s = passed_s
                    say(f"{passed_s:.0f} of {seconds:g} s: {pipeline.stats()[1].items_in:,} items")
                await outbox.put(group)

    pipeline = Pipeline([Stage(name="feed", run=source), Stage(name="yours", run=stage)])
    meter = HostMeter()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(meter.run(), name="host")
        await asyncio.sleep(0)
        began, cpu_s, waited_s = time.perf_counter(), time.thread_time(), selector.waited_s
        try:
            async with asyncio.timeout(seconds + GRACE_S):
                await pipeline.run()
        except TimeoutError:
            say("the stage had not put out all it held when the time was over")
        finally:
            took_s = time.perf_counter() - began
            measured = Measured(
                stats=pipeline.stats()[1],
                seconds=took_s,
                cpu_s=time.thread_time() - cpu_s,
                held_s=took_s - (selector.waited_s - waited_s),
                # A loop that waits is seen in the selector; where that looks like a block, it is the machine's doing.
                blocked_at={at: s for at, s in meter.blocked_at.items() if TimedSelector.__name__ not in at},
            )
            parts.append(measured)
            watching.cancel()


def show(name: str, measured: Measured, pace_per_s: float | None) -> None:
    """pace_per_s: groups per second of the run that was fed."""
    stats, held_s = measured.stats, measured.held_per_item_s
    rows = [
        ["items in", f"{stats.items_in:,} in {measured.seconds:.1f} s"],
        ["items out", f"{stats.items_out:,} ({stats.items_in - stats.items_out:,} dropped or held back)"],
        ["items per second", f"{stats.items_in / measured.seconds:,.0f}"],
        ["CPU per item", f"{1e6 * measured.cpu_s / max(1, stats.items_in):,.0f} us"],
        ["event loop held", f"{1e3 * held_s:,.3f} ms per item"],
        ["  here, fed at full speed", f"{100 * measured.held_s / measured.seconds:.1f} % of the time"],
        [
            "  at the run's pace",
            "its metrics do not say the pace"
            if pace_per_s is None
            else f"{100 * held_s * pace_per_s:.3g} % of the time ({pace_per_s:.2f} groups per second)",
        ],
        ["busy", f"{stats.busy_s:.3f} s"],
        ["blocked on input", f"{stats.blocked_in_s:.3f} s"],
        ["blocked on output", f"{stats.blocked_out_s:.3f} s"],
    ]
    rows += [
        [f"blocked the event loop at {place}", f"{at_s:.3f} s"]
        for place, at_s in measured.blocked_at.items()
        if at_s >= NOTABLE * measured.seconds
    ]
    table(name, ["", ""], rows)
    print(f"plot: {written(PLOT, partial(draw, name=name, measured=measured, pace_per_s=pace_per_s))}")
    if pace_per_s is not None and stats.items_in / measured.seconds < pace_per_s:
        print(f"The run makes {pace_per_s:.2f} groups per second, more than this stage takes: it would limit the run.")


def draw(path: Path, *, name: str, measured: Measured, pace_per_s: float | None) -> None:
    """Writes a PNG: what the stage's time went to, and which share of the event loop it takes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stats = measured.stats
    whole = max(1e-9, stats.busy_s + stats.blocked_in_s + stats.blocked_out_s)
    held = measured.held_s / measured.seconds
    bars: list[tuple[str, list[tuple[str, float]]]] = [
        (
            "the stage",
            [
                ("busy", stats.busy_s / whole),
                ("waits for input", stats.blocked_in_s / whole),
                ("waits for output", stats.blocked_out_s / whole),
            ],
        ),
        ("event loop, at full speed", [("held", held), ("free", 1 - held)]),
    ]
    if pace_per_s is not None:
        held = min(1.0, measured.held_per_item_s * pace_per_s)
        bars.append((f"event loop, at {pace_per_s:.2f} groups/s", [("held", held), ("free", 1 - held)]))
    colours = {
        "busy": "#0060c0",
        "waits for input": "0.8",
        "waits for output": "0.6",
        "held": "#b05000",
        "free": "0.93",
    }
    figure = Figure(figsize=(7, 0.9 + 0.5 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, (_, parts) in enumerate(bars):
        start = 0.0
        for part, share in parts:
            axes.barh(row, 100 * share, left=100 * start, height=0.6, color=colours[part])
            if share > 0.08:
                axes.text(
                    100 * (start + share / 2), row, f"{part} {100 * share:.0f} %", ha="center", va="center", fontsize=8
                )
            start += share
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_xlabel("% of the time", fontsize=8)
    axes.set_title(f"{name}: {stats.items_in / measured.seconds:,.0f} items per second", fontsize=9)
    figure.savefig(path, dpi=110)
