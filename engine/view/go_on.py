"""Runs a recorded trajectory on from one of its turns, in the jail: with the same seed or another, the same weights or
others.

    python -m engine.view.go_on RUN --step 8 --group 0 --sample 3 --turn 1 [--seed 7] [--start | --checkpoint DIR]

The turns before are taken as they were recorded, token by token, with what their tools answered; turn N is sampled
anew, and what follows it. Budget, chat and tools are the recipe's: config.json names its file, which is run. One that
is not of this checkout is run only if --recipe names it, as the run may be somebody else's. The weights are the
run's `checkpoint/`, with --start those that it began with. With those that sampled the turn and the run's seed, the
tokens on the CPU are the recorded ones. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from tokenizers import Tokenizer

from engine.console.options import parse
from engine.ports import StatefulTool, Tool
from engine.recording.as_run import prompt_of, trajectory_of
from engine.recording.reader import RecordedRun
from engine.replica.port import ReplicaDied
from engine.rollout.chat_template import TemplateError
from engine.rollout.python_tool import PythonTool
from engine.run.journal import Journal
from engine.run.journal_records import Grown, Piece
from engine.serving import ServingConfig, serving
from engine.training import TrainingConfig
from engine.types import Trajectory
from sandbox import Sandbox, SandboxUnavailable
from sandbox.printable import printable

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = REPOSITORY / "recipes"


class CannotGoOn(ValueError):
    """The trajectory, the recipe or the weights are not there; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a trajectory is gone on from. turn: from 0, the first that is sampled anew."""

    step: int
    group: int
    sample: int
    turn: int


def recorded(run: Path, place: Place) -> Trajectory:
    """The trajectory as it was. Raises CannotGoOn."""
    record = RecordedRun(run)
    groups = {group.group: group for group in record.groups(place.step)}
    tokens = record.tokens(place.step, place.group)
    group = groups.get(place.group)
    if group is None or tokens is None or not group.whole:
        raise CannotGoOn(f"{run} has no whole group {place.group} of step {place.step}. Fix: one of {record.steps}")
    numbers = {member.sample: number for number, member in enumerate(group.trajectories)}
    if place.sample not in numbers:
        raise CannotGoOn(f"the group has no sample {place.sample}. Fix: one of {sorted(numbers)}")
    number = numbers[place.sample]
    tokenizer = _tokenizer(record.tokenizer) if record.tokenizer is not None else None
    found = trajectory_of(prompt_of(group), group.trajectories[number], tokens.trajectories[number], tokenizer)
    if not 0 <= place.turn < len(found.turns):
        raise CannotGoOn(f"the trajectory has no turn {place.turn}. Fix: one of 0 to {len(found.turns) - 1}")
    return found


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing narrower for a file that is none of its own
        raise CannotGoOn(
            f"{path} is no tokenizer: {error}. Fix: copy tokenizer.json of the checkpoint there"
        ) from error


def before(trajectory: Trajectory, turn: int) -> Piece | None:
    """What is taken over: everything to the end of the turn before this one; None at the first."""
    if not turn:
        return None
    end = trajectory.turns[turn - 1].end
    return Piece(
        token_ids_T=trajectory.token_ids_T[:end],
        sampled_T=trajectory.sampled_T[:end],
        logprobs_T=trajectory.logprobs_T[:end],
        versions_T=trajectory.versions_T[:end],
        turns=trajectory.turns[:turn],
        text="",
    )


def first_difference(one: Trajectory, other: Trajectory) -> int | None:
    """The first token that is not the same; None where all are."""
    a, b = one.token_ids_T.tolist(), other.token_ids_T.tolist()
    if a == b:
        return None
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, kw_only=True)
class Configured:
    """What a run was configured as. tools: what its model may call, of a sandbox."""

    training: TrainingConfig
    tools: Callable[[Sandbox], Sequence[Tool | StatefulTool]]


def configured(run: Path, recipe: Path | None = None) -> Configured:
    """What the run's recipe, or this one, makes of the run's options. Raises CannotGoOn."""
    try:
        config = msgspec.json.decode((run / "config.json").read_bytes())
        name, *words = config["argv"]
    except (OSError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise CannotGoOn(f"{run / 'config.json'} does not say which recipe it ran: {error}") from error
    path = recipe_of(str(name)) if recipe is None else recipe
    if not path.is_file():
        raise CannotGoOn(f"there is no recipe {str(path)!r}. Fix: --recipe FILE")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    values = parse(module.Config, [word for word in words if word.partition("=")[0] in _fields(module.Config)])
    stage = config.get("stage")
    training = values.training() if stage is None else values.training(int(stage), values.model)
    return Configured(training=training, tools=getattr(values, "tools", lambda sandbox: [PythonTool(sandbox)]))


def recipe_of(name: str) -> Path:
    """The file of a recipe of this checkout. Raises CannotGoOn for any other: to read a run is not to trust it."""
    files = [place.resolve() for place in (Path(name), REPOSITORY / name) if place.is_file()]
    for file in files:
        if file.is_relative_to(RECIPES):
            return file
    if not files:
        raise CannotGoOn(f"the run's recipe {name!r} is not there. Fix: give it as --recipe FILE")
    raise CannotGoOn(
        f"the run was made by {str(files[0])!r}, which is no recipe of this checkout, and to go on runs that file. "
        "Fix: if you trust it, python -m engine.view.go_on with --recipe FILE"
    )


def _fields(config_class: type[Any]) -> set[str]:
    from engine.console.options import _options

    names = {option.name for option in _options(config_class)}
    return names | {name.rpartition(".")[2] for name in names}


async def go_on(
    run: Path,
    place: Place,
    *,
    seed: int | None,
    checkpoint: Path | None = None,
    start: bool = False,
    recipe: Path | None = None,
) -> dict[str, Any]:
    """Raises CannotGoOn, and what a replica or the sandbox raises that does not start."""
    then, made = recorded(run, place), configured(run, recipe)
    training = made.training
    weights = checkpoint or (training.checkpoint if start else run / "checkpoint")
    if not (weights / "config.json").is_file():
        raise CannotGoOn(f"there are no weights in {weights}. Fix: --start, or --checkpoint DIR")
    config = ServingConfig(
        checkpoint=weights,
        rollout=training.rollout,
        replica=replace(training.replicas_config, checkpoint=str(weights)),
        replicas=1,
        chat=training.chat,
        sandbox=training.sandbox,
        seed=training.seed if seed is None else seed,
    )
    journal, piece = Journal(), before(then, place.turn)
    if piece is not None:
        tokens = int(piece.sampled_T.sum())
        journal.take(Grown(lease=0, attempt=0, sample=place.sample, piece=piece, tokens=tokens))
    async with serving(config) as parts:
        rollouts = parts.rollouts(made.tools(parts.sandbox) if training.sandbox is not None else [])
        now = await rollouts.run(then.prompt, place.sample, 0, log=journal.log(0, 0, place.sample))
        return {
            "recorded": _told(then, place.turn, parts.chat.decode),
            "again": _told(now, place.turn, parts.chat.decode),
            "first_difference": first_difference(then, now),
            "weights": str(weights),
        }


def _told(trajectory: Trajectory, turn: int, decode: Any) -> dict[str, Any]:
    """The turns from this one on, as the page shows them."""
    turns = [
        {
            "text": decode(trajectory.token_ids_T[each.start : each.end]),
            "tokens": each.end - each.start,
            "calls": [{"name": use.name, "outcome": use.outcome, "reply": use.response} for use in each.tool_uses],
        }
        for each in trajectory.turns[turn:]
    ]
    error = None if trajectory.error is None else trajectory.error.message
    return {"turns": turns, "stop": str(trajectory.stop), "tokens": len(trajectory.token_ids_T), "error": error}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.view.go_on", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a recorded run")
    for name, what in (
        ("step", "of the run, from 1"),
        ("group", "of the step, from 0"),
        ("sample", "of the group"),
        ("turn", "the first that is sampled anew, from 0"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, help=what)
    parser.add_argument("--seed", type=int, help="none: the run's")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder; none: what the run has made")
    parser.add_argument("--start", action="store_true", help="the weights that the run began with")
    parser.add_argument("--recipe", type=Path, help="the file to run; none: the run's, if it is of this checkout")
    options = parser.parse_args(argv)
    place = Place(step=options.step, group=options.group, sample=options.sample, turn=options.turn)
    try:
        weights = {"checkpoint": options.checkpoint, "start": options.start, "recipe": options.recipe}
        found = uvloop.run(go_on(options.run, place, seed=options.seed, **weights))
    except (CannotGoOn, ReplicaDied, SandboxUnavailable, TemplateError, ValueError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    from engine.telemetry.watchdog import exit_process

    exit_process(main())
