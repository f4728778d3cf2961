"""Runs a recorded trajectory on from one of its turns, in the jail: with the same seed or another, the same weights or
others.

    rocstar replay RUN step=8 group=0 sample=3 turn=1 [seed=7] [start=true | checkpoint=DIR]

The turns before are taken as they were recorded, token by token, with what their tools answered; turn N is sampled
anew, and what follows it. The recipe's own `train` does it, with the run's options, so that tools, sessions, budget,
chat and reward are the recorded ones: config.json names its file, which is run. One that is not of this checkout is run
only if `recipe` names it, as the run may be somebody else's. The weights are those in the run's `checkpoint/`; with
start=true, those that it began with. With the weights that sampled the turn and the run's seed, the tokens on the CPU
are the recorded ones. An agent of its own begins anew. The last line is one JSON object.
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
    """The trajectory, the recipe or the weights are not there; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a trajectory is gone on from. turn: from 0, the first that is sampled anew."""

    step: int
    group: int
    sample: int
    turn: int


def recorded(run: Path, place: Place) -> Trajectory:
    """Returns the trajectory as it was. Raises CannotGoOn, and BadInput for a record that cannot be read."""
    check_files(run)
    record = RecordedRun(run)
    step = record.find(place.step)
    groups = {each.number: each for each in record.groups(step)}
    tokens = record.tokens(step, place.group)
    held = groups.get(place.group)
    if held is None or tokens is None or not held.whole:
        whole = sorted(number for number, each in groups.items() if each.whole)
        raise CannotGoOn(
            f"{run} has no group {place.group} of step {place.step} with the numbers of its tokens. Fix: one of {whole}"
        )
    group = with_tokens(held, tokens, load_tokenizer(record.tokenizer))
    trajectories = {member.sample: member for member in group.trajectories}
    if place.sample not in trajectories:
        raise CannotGoOn(f"the group has no sample {place.sample}. Fix: one of {sorted(trajectories)}")
    trajectory = trajectories[place.sample]
    if not 0 <= place.turn < len(trajectory.turns):
        raise CannotGoOn(f"the trajectory has no turn {place.turn}. Fix: one of 0 to {len(trajectory.turns) - 1}")
    return trajectory


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
class Begun:
    """How a run was begun: its recipe, the options that it had, and where: paths among them may be relative."""

    recipe: Recipe
    options: list[str]
    directory: Path


def begun(run: Path, recipe: Path | None = None) -> Begun:
    """What config.json says of the run. recipe: a file to run in place of the one there. Raises CannotGoOn."""
    try:
        config = msgspec.json.decode((run / "config.json").read_bytes(), type=dict[str, Any])
        name, options = str(config["recipe"]), [str(word) for word in config["options"]]
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
    """The file of a recipe of this checkout. Raises CannotGoOn for any other: to read a run is not to trust it."""
    path = (ROOT / name).resolve()
    if not path.is_file():
        raise CannotGoOn(f"the run's recipe {name!r} is not there. Fix: give it as recipe=FILE")
    if not path.is_relative_to(RECIPES):
        raise CannotGoOn(
            f"the run was made by {str(path)!r}, which is no recipe of this checkout, and to go on runs that file. "
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
    """The recipe's `train` is run on one replica without a learner: what its stages would make groups with, its tools,
    sessions and agent, makes the trajectory, and its reward grades it.

    Raises CannotGoOn, what a replica or the sandbox raises that does not start, and what the recipe raises.
    """
    then = recorded(run, place)
    replayed: dict[str, Any] = {}

    async def work(job: Training) -> dict[str, Any]:
        if job.maker is None:
            raise CannotGoOn("the recipe has no stage that makes groups: there is nothing to go on with")
        if place.turn and isinstance(job.maker.rollouts, AgentRollouts):
            raise CannotGoOn("an agent of its own cannot be begun in the middle. Fix: turn 0, from where it runs anew")
        now = await job.maker.rollouts.run(then.prompt, place.sample, 0, log=_log(then, place))
        if not isinstance(job.maker.reward, GroupReward):
            now = await graded(now, job.maker.reward, job.timeline, job.config.group.grade_deadline_s)
        replayed["recorded"] = _told(then, place.turn, job.chat.decode)
        replayed["again"] = _told(now, place.turn, job.chat.decode)
        replayed["first_difference"] = first_difference(then, now)
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
    raise CannotGoOn("the recipe ended without running its stages")


def alone(config: TrainingConfig, weights: Path, seed: int | None) -> TrainingConfig:
    """One replica with these weights, which are whole: an adapter was merged when they were saved."""
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


def _log(then: Trajectory, place: Place) -> Log:
    """What a journal would hold of the trajectory up to the turn."""
    journal, piece = Journal(), before(then, place.turn)
    if piece is not None:
        tokens = int(piece.sampled_T.sum())
        journal.take(Grown(lease=0, attempt=0, sample=place.sample, piece=piece, tokens=tokens))
    return journal.log(0, 0, place.sample)


def _told(trajectory: Trajectory, turn: int, decode: Any) -> dict[str, Any]:
    """The turns from this one on, as the page shows them."""
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
    told = {"turns": turns, "stop": str(trajectory.stop), "tokens": len(trajectory.token_ids_T), "error": error}
    return told | {"reward": trajectory.reward}


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, Positional("folder of a recorded run")]
    step: Annotated[int, "number of the step, from 1"]
    group: Annotated[int, "number of the group in its step, from 0"]
    sample: Annotated[int, "number of the trajectory in its group, from 0"]
    turn: Annotated[int, "the first turn that is sampled anew, from 0"]
    seed: Annotated[int | None, "another seed; none: the run's"] = None
    checkpoint: Annotated[Path | None, "Hugging Face folder; none: the weights that the run has made"] = None
    start: Annotated[bool, "take the weights that the run began with"] = False
    recipe: Annotated[Path | None, "recipe file to run; none: the run's own, if it is of this checkout"] = None


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 where the trajectory cannot be replayed, 130 when it was interrupted."""
    options = parse(Options, argv, program="rocstar replay", description=__doc__)
    place = Place(step=options.step, group=options.group, sample=options.sample, turn=options.turn)
    try:
        run, ran = options.run.absolute(), begun(options.run, options.recipe)
        checkpoint = options.checkpoint and options.checkpoint.absolute()
        if ran.directory.is_dir():  # paths among the recipe's options may be relative
            os.chdir(ran.directory)
        found = uvloop.run(go_on(run, place, ran, seed=options.seed, checkpoint=checkpoint, start=options.start))
    except (CannotGoOn, ReplicaDied, SandboxUnavailable, TemplateError, ValueError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    print(json.dumps(found))
    return 0
