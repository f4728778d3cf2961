"""Shows a run: a live view on a terminal, and a line per step elsewhere.

Invariant: drawing costs the event loop at most a few milliseconds a second; it never blocks on the terminal's reader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from engine import metric_names as metric
from engine.fleet.fleet import Fleet
from engine.telemetry.metrics import is_step
from sandbox.printable import printable

_TICK_S = 0.25
SOLVED_SHARE, SOLVED_STEPS = 0.8, 3  # the hint comes after so many steps in a row above this share of the groups
_HINT = "nearly all groups solved: harder prompts or stop_flat_after save time"
_SPARKS = "▁▂▃▄▅▆▇█"


def spark(values: list[float], width: int = 40) -> str:
    """Returns the last `width` values, each from 0 to 1, as a line of bars.

    >>> spark([0.0, 0.5, 1.0])
    '▁▅█'
    """
    return "".join(_SPARKS[min(7, max(0, round(value * 7 + 0.01)))] for value in values[-width:])


class Display:
    """`with Display(...) as display`, `tick` as a task, then `phase` and `step` as the run goes on.

    Each tick reads from the fleet how much of each replica's KV cache is in use. lags_s: how late the event loop served
    each tick. on_lag: is told of each.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        fleet: Fleet,
        console: Console,
        on_lag: Callable[[float], None] = lambda lag_s: None,
    ) -> None:
        self._on_lag = on_lag
        self.lags_s: list[float] = []
        self._console = console
        self._title = title
        self._fleet = fleet
        self._usable_blocks: dict[int, int] = {}  # the most that a replica had free
        self._phase = "starting"
        self._metrics: dict[str, float] = {}
        self._limit = ""
        self._failed = ""
        self._solved_steps = 0  # steps in a row in which nearly nothing was left to learn
        self._rewards: list[float] = []
        self._errors: list[float] = []
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = self._progress.add_task(self._phase, total=steps)
        live = console.is_terminal and not console.is_dumb_terminal  # a dumb terminal shows it only at the end
        self._live = Live(console=console, auto_refresh=False, transient=False) if live else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.redraw()
        if self._live:
            self._live.stop()

    async def tick(self) -> None:
        """Redraws until cancelled, and measures the loop's lag."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            lag_s = max(0.0, time.perf_counter() - before - _TICK_S)
            self.lags_s.append(lag_s)
            self._on_lag(lag_s)
            self.redraw()

    def redraw(self) -> None:
        if self._live:
            self._live.update(self._view(), refresh=True)

    def phase(self, text: str) -> None:
        self._phase = text
        self._progress.update(self._bar, description=text)
        if not self._live:
            self._console.print(text, style="dim")

    def step(self, step: int, metrics: Mapping[str, float], *, silent: bool = False, failed: str = "") -> None:
        """Shows the metrics of a step. silent: prints no line. failed: a line about what failed by our fault."""
        self._failed = failed
        if is_step(metrics):
            self._metrics = {name: value for name, value in self._metrics.items() if name.startswith("eval/")}
            nearly_all = metrics.get(metric.GROUPS_SOLVED, 0) > SOLVED_SHARE * metrics.get(metric.GROUPS_ALL, 0)
            self._solved_steps = self._solved_steps + 1 if nearly_all else 0
            if metric.REWARD in metrics:
                self._rewards.append(metrics[metric.REWARD])
                self._errors.append(metrics[metric.TOOLS_ERROR_SHARE_CORRECT])
            self._progress.update(self._bar, completed=step)
        self._metrics.update(metrics)
        if not self._live and not silent:
            self._console.print(_line(step, metrics), highlight=False, soft_wrap=True, end=" " if failed else "\n")
            if failed:
                self._console.print(failed, style="red", markup=False, highlight=False, soft_wrap=True)
            if is_step(metrics) and self._solved_steps == SOLVED_STEPS:
                self._console.print(_HINT, style="dim", soft_wrap=True)

    def limit(self, sentence: str) -> None:
        """Sets the sentence that says what limits the run; only a live view shows it."""
        self._limit = sentence

    def _view(self) -> Panel:
        m = self._metrics
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right")
        grid.add_column()
        if is_step(m):
            grid.add_row("reward", f"{_figure(m, metric.REWARD)}  [green]{spark(self._rewards)}[/]")
            errors = f"{_figure(m, metric.TOOLS_ERROR_SHARE_CORRECT)}  [red]{spark(self._errors)}[/]"
            grid.add_row("tool errors in correct", errors)
            if self._failed:
                grid.add_row("failed", Text(self._failed, style="red"))
            if metric.DISTILL_KL in m:
                grid.add_row("KL to the teacher", f"{m[metric.DISTILL_KL]:.3f}")
            if metric.GROUPS_ALL in m:
                grid.add_row("groups", _groups(m))
            if self._solved_steps >= SOLVED_STEPS:
                grid.add_row("", f"[yellow]{_HINT}[/]")
            grid.add_row("throughput", _rates(m))
            grid.add_row("step", _split(m))
        if metric.EVAL_ACCURACY in m:
            grid.add_row("held-out accuracy", _accuracy(m))
        if self._limit:
            grid.add_row("limit", Text(printable(self._limit)))
        for index in range(self._fleet.config.replicas):
            sample = self._fleet.last.get(index)
            if index not in self._fleet.live:
                grid.add_row(f"replica {index}", "[red]down[/]")
            if sample is None:
                continue
            usable = self._usable_blocks[index] = max(sample.free_blocks, self._usable_blocks.get(index, 1))
            share = 1 - sample.free_blocks / usable
            filled = round(share * 30)
            bar = f"[cyan]{'█' * filled}[/][dim]{'░' * (30 - filled)}[/]"
            grid.add_row(f"replica {index} KV", f"{bar} {share:4.0%}  {sample.running} running")
        return Panel(Group(self._progress, Text(""), grid), title=Text(printable(self._title)), title_align="left")


def _accuracy(m: Mapping[str, float]) -> str:
    low, high = m[metric.EVAL_ACCURACY_LOW], m[metric.EVAL_ACCURACY_HIGH]
    return f"{m[metric.EVAL_ACCURACY]:.3f}  [{low:.3f}, {high:.3f}]  n={m[metric.EVAL_N]:.0f}"


def _groups(m: Mapping[str, float]) -> str:
    flat, groups, solved = m[metric.GROUPS_FLAT], m[metric.GROUPS_ALL], m[metric.GROUPS_SOLVED]
    return f"{flat:.0f} of {groups:.0f} flat, {solved:.0f} of them solved"


def _rates(m: Mapping[str, float]) -> str:
    """Returns the rates of a step; one that was begun before the run was resumed has only its goodput."""
    parts = [f"goodput {m[metric.TOKENS_GOODPUT]:.2f}"]
    if metric.TOKENS_PER_S in m:
        parts = [f"{m[metric.TOKENS_PER_S]:,.0f} tokens/s", f"{m[metric.TOOLS_CALLS_PER_S]:,.0f} tool calls/s", *parts]
    return "   ".join(parts)


def _split(m: Mapping[str, float]) -> str:
    after = f"learn {m[metric.TIME_LEARN_S]:.2f} + sync {m[metric.TIME_SYNC_S]:.2f}"
    if metric.ROLLOUT_TRAJECTORIES_RESUMED in m:
        return f"{m[metric.ROLLOUT_TRAJECTORIES_RESUMED]:.0f} trajectories from before the run was resumed + {after}"
    return f"{m[metric.TIME_STEP_S]:.2f} s = rollout {m[metric.TIME_ROLLOUT_S]:.2f} + {after}"


def _figure(m: Mapping[str, float], name: str) -> str:
    """Returns a metric as text, a dash if nothing was graded."""
    return f"{m[name]:.3f}" if name in m else "-"


def _line(step: int, m: Mapping[str, float]) -> str:
    parts = [f"step {step:3d}"]
    if is_step(m):
        errors = _figure(m, metric.TOOLS_ERROR_SHARE_CORRECT)
        parts.append(f"reward {_figure(m, metric.REWARD)}  tool errors in correct {errors}")
        if metric.DISTILL_KL in m:
            parts.append(f"KL to the teacher {m[metric.DISTILL_KL]:.3f}")
        if metric.GROUPS_ALL in m:
            parts.append(f"groups {_groups(m)}")
        parts.append(_rates(m))
        parts.append(_split(m))
    if metric.EVAL_ACCURACY in m:
        parts.append(f"held-out {_accuracy(m)}")
    return "  ".join(parts)
