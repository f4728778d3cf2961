"""Shows the trajectories of a recorded step, or writes them as JSON lines; or the rollouts that are under way.

    rocstar rollouts runs/quickstart step=8 only=wrong
    rocstar rollouts runs/quickstart step=8 jsonl=true > step-8.jsonl
    rocstar rollouts runs/quickstart in_flight=true

A line of JSON is a trajectory and what became of it, with the names of `engine.recording.rollouts.Rollout` and
`engine.types`: its prompt, turns, tool uses, exact token ids and log-probabilities included. Where the record of the
step is damaged, a line on stderr says how many of its groups can be read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table

from engine.console.options import Positional, parse
from engine.console.shown import shown
from engine.errors import BadInput
from engine.recording.damage import damage, groups_with_tokens
from engine.recording.files import check_files
from engine.recording.in_flight import read
from engine.recording.reader import RecordedRun
from engine.recording.rollouts import Rollout, as_json, load_tokenizer, rollouts_of
from engine.rollout.tool_call_parser import CLOSE
from engine.telemetry.failures import plain
from engine.telemetry.in_flight import Snapshot
from engine.types import ToolUse
from sandbox.printable import printable
from sandbox.require import require, whole

PROMPTS = 4  # that are named where the wanted one is not there
SHOWN = 20  # trajectories, unless another number is asked for


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, Positional("folder of the run")] = Path("runs/quickstart")
    step: Annotated[int | None, "which step; none: the last one that is recorded"] = None
    only: Annotated[Literal["all", "right", "wrong", "kept"], "which trajectories"] = "all"
    prompt: Annotated[str, "id of a prompt; empty: all"] = ""
    first: Annotated[int | None, f"at most so many; none: {SHOWN}, and all as JSON lines"] = None
    jsonl: Annotated[bool, "print JSON lines"] = False
    in_flight: Annotated[bool, "show the rollouts that are under way, the newest first"] = False

    def __post_init__(self) -> None:
        if self.in_flight and (self.jsonl or self.step is not None):
            raise ValueError("in_flight must be given without step and jsonl, got both")
        if self.first is not None:
            require("first", self.first, whole(0))


def rollouts(options: Options) -> Iterator[Rollout]:
    """Yields those that are asked for. Raises BadInput if the run has no record of the step."""
    check_files(options.run)
    run = RecordedRun(options.run)
    step = run.find(options.step)
    lost = damage(run, step, read := groups_with_tokens(run, step), with_tokens=True)
    if lost and not read:
        raise BadInput(f"{lost[0]} Fix: step= takes another one of {run.steps}")
    for line in lost:
        print(printable(line), file=sys.stderr)
    for rollout in rollouts_of(run, step, load_tokenizer(run.tokenizer)):
        right = (rollout.trajectory.reward or 0.0) > 0
        wanted = {"all": True, "right": right, "wrong": not right, "kept": rollout.kept}[options.only]
        if wanted and options.prompt in ("", rollout.trajectory.prompt.id):
            yield rollout


def none_shown(options: Options) -> str:
    """Says why no trajectory of a step is shown, and what the step has. Raises BadInput without a record of it."""
    if options.first == 0:
        return "first=0 shows no trajectory. Fix: first=1"
    run = RecordedRun(options.run)
    step = run.find(options.step)
    drops = {each.group.prompt.id: each.group.drop for each in run.outlines(step)}
    prompts = list(drops)
    if options.prompt and options.prompt not in prompts:
        known = ", ".join(prompts[:PROMPTS]) + (", ..." if len(prompts) > PROMPTS else "")
        return f"step {step} has no prompt {options.prompt}. Fix: one of {known}"
    if options.only == "all":
        return f"the record of step {step} is damaged: no trajectory can be read. Fix: another step"
    asked = f"only={options.only}" + (f" and prompt={options.prompt}" if options.prompt else "")
    drop = drops.get(options.prompt)
    why = f", whose group was dropped ({drop})" if drop else ""
    return f"step {step} has no trajectory with {asked}{why}. Fix: only=all, or another step"


def _or_a_word(options: Options, first: int | None) -> Iterator[Rollout]:
    """Yields at most `first` of those that are asked for; says why there is none."""
    is_empty = True
    for rollout in islice(rollouts(options), first):
        is_empty = False
        yield rollout
    if is_empty:
        print(printable(none_shown(options)), file=sys.stderr)


def panel(rollout: Rollout) -> Panel:
    """Returns a panel that shows a trajectory to people."""
    trajectory = rollout.trajectory
    prompt = trajectory.prompt
    reward = "no grade" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    fate = f"advantage {rollout.advantage:+.2f}" if rollout.advantage is not None else _untrained(rollout)
    question = prompt.messages[-1]["content"] if prompt.messages else ""
    body = [f"[bold]{shown(question)}[/]  [dim]answer: {shown(prompt.answer)}[/]", *_text(rollout)]
    if trajectory.scores:
        scores = [f"{name} {'-' if score is None else f'{score:g}'}" for name, score in trajectory.scores.items()]
        body.append(shown("scores: " + ", ".join(scores)))
    if (error := trajectory.error) is not None:
        body.append(f"[red]failed: {shown(plain(f'{error.boundary}: {error.message}'))}[/]")
    title = f"step {rollout.step}  {prompt.id} #{trajectory.sample}  {reward}  {fate}"
    title += f"  {trajectory.sampled_tokens} tokens  {trajectory.stop}"
    return Panel(Group(*body), title=shown(title), title_align="left")


def _untrained(rollout: Rollout) -> str:
    """Says what became of a trajectory without an advantage; one that got it with the batch was trained."""
    return "trained" if rollout.kept else f"not trained ({rollout.drop or 'not kept'})"


def _text(rollout: Rollout) -> Iterator[str]:
    """Yields what the model wrote. An agent's further conversations come after the main one, each by its calls."""
    trajectory = rollout.trajectory
    yield from _conversation(trajectory.text, [use for turn in trajectory.turns for use in turn.tool_uses])
    for number, segment in enumerate(trajectory.segments, 2):
        uses = [use for turn in segment.turns for use in turn.tool_uses]
        sampled = int(segment.sampled_T.sum())
        yield f"[bold]conversation {number}[/]  [dim]turns: {len(segment.turns)}, sampled tokens: {sampled:,}[/]"
        for use in uses:
            yield f"{shown(use.name)} {shown(use.arguments)}"
            yield _response(use)


def _response(use: ToolUse) -> str:
    return f"[dim]{shown(use.name)} ({shown(use.outcome)}):[/] {shown(use.response)}"


def _conversation(text: str, uses: Sequence[ToolUse]) -> Iterator[str]:
    """Yields a text with each response below the call that it answers."""
    responses = [_response(use) for use in uses]
    written, *rest = text.strip().split(CLOSE)
    for part, response in zip(rest, responses, strict=False):
        yield shown((written + CLOSE).strip())
        yield response
        written = part
    unanswered = [written, *rest[len(responses) :]]
    yield from filter(None, [shown(CLOSE.join(unanswered).strip())])
    yield from responses[len(rest) :]


def under_way(snapshot: Snapshot, first: int, *, now: float) -> Table:
    """Returns a table of at most `first` rollouts. now: seconds since 1970."""
    counts = ", ".join(f"{count:,} {state}" for state, count in snapshot.counts.items() if count)
    total = sum(snapshot.counts.values())
    title = f"{total:,} rollouts under way {now - snapshot.at:.0f} s ago" + (f": {counts}" if counts else "")
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("rollout", "prompt", "state", "turn", "tokens", "replica", "seconds"):
        table.add_column(
            column, justify="right" if column in ("turn", "tokens", "replica", "seconds") else "left", no_wrap=True
        )
    for each in snapshot.under_way[:first]:
        step, group = divmod(each.lease, max(1, snapshot.groups_per_step))
        place = "evaluation" if each.lease < 0 else f"step {step + 1}, group {group}"
        table.add_row(
            f"{place} #{each.sample}",
            shown(each.prompt),
            each.state,
            str(each.turn or "-"),
            f"{each.tokens:,}",
            "-" if each.replica < 0 else str(each.replica),
            f"{snapshot.at - each.began:.1f}",
        )
    return table


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 if the run has no record of the step, or has not written what is under way."""
    options = parse(Options, argv, program="rocstar rollouts", description=__doc__)
    try:
        if options.jsonl:
            for rollout in _or_a_word(options, options.first):
                sys.stdout.buffer.write(as_json(rollout) + b"\n")
            return 0
        console = Console()
        if options.in_flight:
            check_files(options.run)
            if (snapshot := read(options.run)) is None:
                raise BadInput(f"{options.run} has not written which rollouts are under way. Fix: a run that trains")
            first = SHOWN if options.first is None else options.first
            console.print(under_way(snapshot, first, now=time.time()))
            return 0
        for rollout in _or_a_word(options, SHOWN if options.first is None else options.first):
            console.print(panel(rollout))
    except ValueError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0
