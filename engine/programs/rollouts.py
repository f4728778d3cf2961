"""Shows the rollouts that a run has written: `rocstar rollouts runs/quickstart step=8 only=wrong`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console, Group
from rich.panel import Panel

from engine.console.options import Positional, parse
from engine.console.shown import shown
from engine.recording.files import check_files
from engine.rollout.tool_call_parser import CLOSE
from engine.stages.write_rollouts import Rollout, path_of, read_rollouts, steps_of
from engine.telemetry.failures import plain
from sandbox.printable import printable


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, Positional("folder of the run")] = Path("runs/quickstart")
    step: Annotated[int | None, "none: the last one that was written"] = None
    only: Annotated[Literal["all", "right", "wrong", "kept"], "which trajectories"] = "all"
    prompt: Annotated[str, "only of this prompt's id"] = ""
    first: Annotated[int, "at most so many"] = 20


def rollouts(options: Options) -> Iterator[Rollout]:
    """Those that are asked for. Raises ValueError when the run has written none of the step, or a row is damaged."""
    check_files(options.run)
    steps = steps_of(options.run)
    step = options.step if options.step is not None else max(steps, default=0)
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{options.run / 'rollouts'} has no rollouts of step {step} (there: {there})")
    for row in read_rollouts(path_of(options.run, step)):
        right = (row.reward or 0.0) > 0
        wanted = {"all": True, "right": right, "wrong": not right, "kept": row.kept}[options.only]
        if wanted and options.prompt in ("", row.prompt_id):
            yield row


def panel(row: Rollout) -> Panel:
    """One trajectory, as a person reads it."""
    reward = "no grade" if row.reward is None else f"reward {row.reward:g}"
    trained = (
        f"advantage {row.advantage:+.2f}" if row.advantage is not None else f"not trained ({row.drop or 'not kept'})"
    )
    scores = [f"{name} {'-' if score is None else f'{score:g}'}" for name, score in row.scores.items()]
    body = [f"[bold]{shown(row.question)}[/]  [dim]answer: {shown(row.answer)}[/]", *_text(row)]
    if scores:
        body.append(shown("scores: " + ", ".join(scores)))
    if row.error is not None:
        body.append(f"[red]failed: {shown(plain(row.error))}[/]")
    title = f"step {row.step}  {row.prompt_id} #{row.sample}  {reward}  {trained}  {row.tokens} tokens  {row.stop}"
    return Panel(Group(*body), title=shown(title), title_align="left")


def _text(row: Rollout) -> Iterator[str]:
    """What the model wrote, with each reply below the call that it answers."""
    replies = [f"[dim]{shown(call.name)} ({shown(call.outcome)}):[/] {shown(call.reply)}" for call in row.calls]
    written, *rest = row.text.strip().split(CLOSE)
    for part, reply in zip(rest, replies, strict=False):
        yield shown((written + CLOSE).strip())
        yield reply
        written = part
    left = [written, *rest[len(replies) :]]
    yield from filter(None, [shown(CLOSE.join(left).strip())])
    yield from replies[len(rest) :]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 where the run has written none of them."""
    options = parse(Options, argv, program="rocstar rollouts", description=__doc__)
    console = Console()
    try:
        for row in islice(rollouts(options), options.first):
            console.print(panel(row))
    except ValueError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 1
    return 0
