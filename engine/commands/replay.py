"""Replays a recorded trajectory from one of its turns, its tools in the jail, with the same seed and weights or others.

    rocstar replay RUN step=8 group=0 sample=3 turn=1 [seed=7] [start=true | checkpoint=DIR]

The turns before it are taken as they were recorded, token by token, with the replies of their tools; turn N and what
follows are sampled anew. The recipe's own `train` does it, with the run's options, so that tools, sessions, budget,
chat and reward are the recorded ones. config.json names the recipe's file, which is run. A file outside this checkout
is run only if `recipe` names it, as the run may be somebody else's. The weights are those in the run's `checkpoint/`;
with start=true, those that it began with. On the CPU, the weights that sampled the turn and the run's seed give the
recorded tokens again. A user's agent begins anew. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvloop

from engine.assembly.config import TrainingConfig
from engine.assembly.devices import DevicePlan
from engine.assembly.training import Training, opened
from engine.console.options import Positional, parse
from engine.errors import BadInput
from engine.gateway.agent import AgentRollouts
from engine.ports import GroupReward
from engine.recipe import ROOT, Recipe, Run, load_recipe
from engine.recording.files import check_files
from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, with_tokens
from engine.replica.port import ReplicaDied
from engine.rollout.chat_template import TemplateError
from engine.run.journal import Journal, Log
from engine.run.journal_records import Grown, Piece
from engine.run.run_folder import RunFolder
from engine.run.workspace import workspace
from engine.stages.grading import graded
from engine.types import Trajectory
from sandbox import SandboxUnavailable
from sandbox.printable import printable

RECIPES = ROOT / "recipes"


class CannotGoOn(ValueError):
    """The trajectory, the recipe or the weights are missing; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The turn that a replay begins with. turn: its number, from 0; it is the first that is sampled anew."""

    step: int
    group: int
    sample: int
    turn: int


def recorded(run: Path, place: Place) -> Trajectory:
    """Returns the recorded trajectory. Raises CannotGoOn, and BadInput for a record that cannot be read."""
    check_files(run)
    record = RecordedRun(run)
    step = record.find(place.step)
    groups = {each.number: each for each in record.groups(step)}
    tokens = record.tokens(step, place.group)
    group_record = groups.get(place.group)
    if group_record is None or tokens is None or not group_record.whole:
        whole = sorted(number for number, each in groups.items() if each.whole)
        raise CannotGoOn(
            f"{run} has no group {place.group} of step {place.step} with the numbers of its tokens. Fix: one of {whole}"
        )
    group = with_tokens(group_record, tokens, load_tokenizer(record.tokenizer))
    trajectories = {member.sample: member for member in group.trajectories}
    if place.sample not in trajectories:
        raise CannotGoOn(f"the group has no sample {place.sample}. Fix: one of {sorted(trajectories)}")
    trajectory = trajectories[place.sample]
    if not 0 <= place.turn < len(trajectory.turns):
        raise CannotGoOn(f"the trajectory has no turn {place.turn}. Fix: one of 0 to {len(trajectory.turns) - 1}")
    return trajectory


def before(trajectory: Trajectory, turn: int) -> Piece | None:
    """Returns the part that is kept: everything to the end of the turn before this one; None at the first."""
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
    """Returns the index of the first token that differs; None if none does."""
    a, b = one.token_ids_T.tolist(), other.token_ids_T.tolist()
    if a == b:
        return None
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, kw_only=True)
class Begun:
    """How a run was begun: its recipe, its options, and its directory, as paths among the options may be relative."""

    recipe: Recipe
    options: list[str]
    directory: Path


def begun(run: Path, recipe: Path | None = None) -> Begun:
    """Returns what config.json says of the run. recipe: a file to run in place of its own. Raises CannotGoOn."""
    if not (run / "config.json").is_file():
        raise CannotGoOn(f"{run} is no folder of a run. Fix: name one, such as runs/quickstart")
    try:
        config = msgspec.json.decode((run / "config.json").read_bytes(), type=dict[str, Any])
        name, options = str(config["recipe"]), [str(option) for option in config["options"]]
        directory = Path(config["directory"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise CannotGoOn(f"{run / 'config.json'} does not say which recipe it ran: {error!r}") from error
    try:
        return Begun(
            recipe=load_recipe(recipe_of(name) if recipe is None else recipe.resolve()),
            options=options,
            directory=directory,
        )
    except BadInput as error:
        raise CannotGoOn(str(error)) from error


def recipe_of(name: str) -> Path:
    """Returns the file of a recipe of this checkout. Raises CannotGoOn for others: a run need not be trusted."""
    path = (ROOT / name).resolve()
    if not path.is_file():
        raise CannotGoOn(f"the run's recipe {name!r} is not there. Fix: give it as recipe=FILE")
    if not path.is_relative_to(RECIPES):
        raise CannotGoOn(
            f"the run was made by {str(path)!r}, which is not a recipe of this checkout, and a replay runs that file. "
            "Fix: if you trust it, rocstar replay with recipe=FILE"
        )
    return path


class _Replayed(Exception):
    """Ends the recipe when the trajectory has."""


async def go_on(
    run: Path,
    place: Place,
    ran: Begun,
    *,
    seed: int | None,
    checkpoint: Path | None = None,
    start: bool = False,
) -> dict[str, Any]:
    """Runs the recipe's `train` on one replica without a learner. The rollouts of its stages make the trajectory, and
    its reward grades it, unless it grades whole groups.

    Raises CannotGoOn, what a replica or the sandbox raises that does not start, and what the recipe raises.
    """
    old = recorded(run, place)
    replayed: dict[str, Any] = {}

    async def work(job: Training) -> dict[str, Any]:
        if job.maker is None:
            raise CannotGoOn("the recipe has no stage that makes groups, so nothing can be replayed")
        if place.turn and isinstance(job.maker.rollouts, AgentRollouts):
            raise CannotGoOn("an agent of yours cannot be begun in the middle. Fix: turn=0, from which it runs anew")
        new = await job.maker.rollouts.run(old.prompt, place.sample, 0, log=_log(old, place))
        if not isinstance(job.maker.reward, GroupReward):
            new = await graded(new, job.maker.reward, job.timeline, job.config.group.grade_deadline_s)
        replayed["recorded"] = _shown(old, place.turn, job.chat.decode)
        replayed["again"] = _shown(new, place.turn, job.chat.decode)
        replayed["first_difference"] = first_difference(old, new)
        replayed["weights"] = str(job.config.checkpoint)
        raise _Replayed

    def opens(config: TrainingConfig, folder: RunFolder, **given: Any) -> AbstractAsyncContextManager[Training]:
        weights = checkpoint or (config.checkpoint if start else run / "checkpoint")
        if not (weights / "config.json").is_file():
            raise CannotGoOn(f"there are no weights in {weights}. Fix: start=true, or checkpoint=DIR")
        return opened(alone(config, weights, seed), folder, **{**given, "sinks": ()}, work=work)

    with workspace(Path(tempfile.gettempdir())) as scratch, RunFolder.open(scratch, "replay") as folder:
        try:
            await ran.recipe.train(parse(ran.recipe.config, ran.options), Run(folder=folder, opens=opens))
        except _Replayed:
            return replayed
    raise CannotGoOn("the recipe ended without running its stages. Fix: return await job.run([...])")


def alone(config: TrainingConfig, weights: Path, seed: int | None) -> TrainingConfig:
    """Returns the configuration for one replica. weights: whole, since an adapter is merged when they are saved."""
    one = config.devices.tensor_parallel
    devices = DevicePlan(devices=config.devices.devices[: 2 * one], learner_ranks=one, replicas=1, tensor_parallel=one)
    replica = None if config.replica is None else replace(config.replica, checkpoint=str(weights))
    return replace(
        config,
        checkpoint=weights,
        replica=replica,
        devices=devices,
        seed=config.seed if seed is None else seed,
        max_staleness=0,
    )


def _log(trajectory: Trajectory, place: Place) -> Log:
    """Returns what a journal would hold of the trajectory before the turn."""
    journal, piece = Journal(), before(trajectory, place.turn)
    if piece is not None:
        tokens = int(piece.sampled_T.sum())
        journal.take(Grown(lease=0, attempt=0, sample=place.sample, piece=piece, tokens=tokens))
    return journal.log(0, 0, place.sample)


def _shown(trajectory: Trajectory, turn: int, decode: Any) -> dict[str, Any]:
    """Returns the turns from this one on, as the page shows them."""
    turns = [
        {
            "text": decode(trajectory.token_ids_T[each.start : each.end]),
            "tokens": each.end - each.start,
            "tool_uses": [
                {"name": use.name, "outcome": use.outcome, "response": use.response} for use in each.tool_uses
            ],
        }
        for each in trajectory.turns[turn:]
    ]
    error = None if trajectory.error is None else trajectory.error.message
    shown = {"turns": turns, "stop": str(trajectory.stop), "tokens": len(trajectory.token_ids_T), "error": error}
    return shown | {"reward": trajectory.reward}


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, Positional("folder of a recorded run")]
    step: Annotated[int, "number of the step, from 1"]
    group: Annotated[int, "number of the group in its step, from 0"]
    sample: Annotated[int, "number of the trajectory in its group, from 0"]
    turn: Annotated[int, "the first turn that is sampled anew, from 0"]
    seed: Annotated[int | None, "another seed; none: the run's"] = None
    checkpoint: Annotated[Path | None, "Hugging Face folder; none: the weights that the run trained"] = None
    start: Annotated[bool, "take the weights that the run began with"] = False
    recipe: Annotated[Path | None, "recipe file to run; none: the run's own, if it is of this checkout"] = None


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 if the trajectory cannot be replayed, 130 if it was interrupted."""
    options = parse(Options, argv, program="rocstar replay", description=__doc__)
    place = Place(step=options.step, group=options.group, sample=options.sample, turn=options.turn)
    try:
        run, ran = options.run.absolute(), begun(options.run, options.recipe)
        checkpoint = options.checkpoint and options.checkpoint.absolute()
        if ran.directory.is_dir():  # paths among the recipe's options may be relative
            os.chdir(ran.directory)
        replayed = uvloop.run(go_on(run, place, ran, seed=options.seed, checkpoint=checkpoint, start=options.start))
    except (CannotGoOn, ReplicaDied, SandboxUnavailable, TemplateError, ValueError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    print(json.dumps(replayed))
    return 0
