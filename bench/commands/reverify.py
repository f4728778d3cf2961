"""Says what another reward or another selection would have made of a run's recorded groups, without engines.

    rocstar reverify runs/quickstart reward=mine.py:strict
    rocstar reverify runs/quickstart smoothing=0.5
    rocstar reverify runs/quickstart algorithm=grpo rollouts=8

Each recorded trajectory is graded again if a reward is given, and each group is selected again. The rows say, step by
step, how many rewards changed, how many groups are flat, which trajectories are trained, and with which advantages,
beside what the run did. Draws use the seed of the run, so that only what the options change differs; how many groups
the run's own settings select as recorded is said, too. The last line is one JSON object.

What it cannot say: the trajectories are those that the recorded policy sampled, so what training on the other choice
would have changed later is not in it. `rollouts` below the recorded number takes the first of each group, which are
samples like any others; more than were recorded cannot be had.

A reward is a function or object of yours as recipes have them, called with the trajectory, or with those of a group if
it has `sees_group`; it may be async. An exception in it is reported with its line and the trajectory.

What was not measured is a dash in the table and null in JSON. Where the record of a step is damaged, a line, and
`damage` in JSON, say how many of its groups can be read.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import uvloop

from algo.group.advantages import Advantage
from algo.group.batch import Selection, lengths, rewards
from algo.group.roc import RoC
from algo.group.selection import KeepAll, RandomSubset
from bench.measuring.terminal import say, table
from bench.measuring.user_file import Failed, attribute_of, told
from bench.reselection import Counts, OtherRoC, Penalties, compared, unselected
from engine.console.options import Positional, parse
from engine.errors import first_error
from engine.ports import GroupReward, Reward, Selector
from engine.recording.damage import damage
from engine.recording.files import check_files
from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, with_tokens
from engine.stages.grading import graded, graded_together
from engine.telemetry.timeline import Timeline
from engine.types import Group, Trajectory
from engine.user_parts import WrongPart
from recipes.options import ADVANTAGES
from sandbox.printable import printable
from sandbox.require import at_least, positive, require, within

PROGRAM = "rocstar reverify"
Algorithm = Literal["roc", "grpo", "random"]


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, Positional("folder of a recorded run")]
    step: Annotated[int | None, "a step of the run; none: all that are recorded whole"] = None
    reward: Annotated[str | None, "another reward, FILE.py:NAME; none: the recorded rewards"] = None
    algorithm: Annotated[Algorithm | None, "who selects; none: as the run did"] = None
    smoothing: Annotated[float | None, f"RoC: what is added to a penalty; none: {RoC(keep=1).smoothing:g}"] = None
    penalties: Annotated[Penalties | None, "RoC: which penalties of a success count; none: both"] = None
    failures: Annotated[float | None, "RoC: share of the kept that are failures; none: their share of the group"] = None
    group_size: Annotated[int | None, "trajectories trained per group (G); none: as the run did"] = None
    rollouts: Annotated[int | None, "as if only so many of a group had been sampled; none: all"] = None
    advantage: Annotated[str | None, f"one of {', '.join(ADVANTAGES)}; none: as the run did"] = None
    graders: Annotated[int, "trajectories that are graded at once"] = 8
    grade_deadline_s: Annotated[float, "seconds in which a trajectory must be graded"] = 30.0

    def __post_init__(self) -> None:
        for name in ("group_size", "rollouts", "graders"):
            if (value := getattr(self, name)) is not None:
                require(name, value, at_least(1))
        if self.smoothing is not None:
            require("smoothing", self.smoothing, positive)
        require("grade_deadline_s", self.grade_deadline_s, positive)
        if self.failures is not None:
            require("failures", self.failures, within("[0, 1]"))
        if self.advantage is not None and self.advantage not in ADVANTAGES:
            raise ValueError(f"advantage must be one of {', '.join(ADVANTAGES)}, got {self.advantage!r}")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 if the user has to change something, 1 if a reward of the user's fails."""
    options = parse(Options, argv, program=PROGRAM, description=__doc__)
    try:
        answer = uvloop.run(reverify(options))
    except ValueError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except Failed as error:
        print(printable(f"{PROGRAM}: {error}"), file=sys.stderr)
        return 1
    print(answer["sentence"])
    for line in answer["notes"]:
        print(line)
    show(answer["rows"], answer["total"])
    print(json.dumps(answer))
    return 0


async def reverify(options: Options) -> dict[str, Any]:
    """Returns {"sentence", "notes", "damage", "rows", "total"}: a row for each step. Raises ValueError for a run, a
    reward or a step that is not there, and Failed if the reward raises something.
    """
    check_files(options.run)
    run = RecordedRun(options.run)
    newest = run.find(options.step)
    config = _config(options.run)
    reward = None if options.reward is None else load(options.reward)
    rows, lost, total = [], list[str](), Counts()
    steps = run.steps if options.step is None else [newest]
    for at, step in enumerate(steps):
        say(f"step {step}, {at + 1} of {len(steps)}")
        counts = await _of_step(run, step, options, config, reward)
        total += counts
        lost += damage(run, step, counts.groups, with_tokens=True)
        rows.append({"step": step, **counts.row()})
    if not total.groups:
        told_of = " ".join(lost) or f"the steps of {options.run} have no group."
        raise ValueError(f"{told_of} Fix: name another step or run; the steps of this one are {run.steps}")
    return {
        "sentence": sentence(total, len(rows), reward is not None),
        "notes": [*lost, *notes(total, options)],
        "damage": lost,
        "rows": rows,
        "total": total.row(),
    }


def _config(run: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((run / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}


def load(name: str) -> Reward | GroupReward:
    """Loads a reward by FILE.py:NAME; a class is called without arguments. Raises ValueError where there is none."""
    reward, path = attribute_of(name, "reward")
    if isinstance(reward, type):
        try:
            reward = reward()
        except Exception as error:
            raise ValueError(
                f"{name} cannot be made: {told(error, path)}. Fix: a class that needs no argument"
            ) from error
        if not callable(reward):
            raise ValueError(f"an object of {name} cannot be called. Fix: give the class a __call__")
    checked: Reward | GroupReward = reward
    return checked


async def _of_step(
    run: RecordedRun, step: int, options: Options, config: Mapping[str, Any], reward: Reward | GroupReward | None
) -> Counts:
    counts = Counts()
    known = _known_penalties(run, step)
    chosen = _selection(options, config, known or {})
    own = None
    with suppress(ValueError):  # the configuration of the run does not say how it selected
        own = _selection(Options(run=options.run), config, known or {})
    by_format = any(each is not None and isinstance(each.selector, OtherRoC) for each in (chosen, own))
    recorded = list(_groups(run, step, needs_text=reward is not None or (by_format and known is None)))
    other = [_first(group, options.rollouts) for group in recorded]
    largest = max((len(group.trajectories) for group in other), default=0)
    if options.group_size is not None and other and options.group_size > largest:
        raise ValueError(
            f"group_size={options.group_size} is more than a group of step {step} has. "
            f"Fix: group_size= at most {largest}"
        )
    if reward is not None:
        other = await _regraded(other, reward, options)
    selected = _scored([chosen(unselected(group)) for group in other], chosen.advantage)
    before = _scored(recorded, (own or chosen).advantage)
    for group, was, now in zip(recorded, before, selected, strict=True):
        counts += compared(group, was, now, own, known or {})
    return counts


def _known_penalties(run: RecordedRun, step: int) -> dict[tuple[str, int], tuple[float, float]] | None:
    """Returns p_err and p_format as the run has recorded them; None unless there are some of each group."""
    known = {}
    for recorded in run.groups(step):
        for member, reasons in zip(recorded.group.trajectories, recorded.reasons, strict=True):
            if member.error is not None:
                continue
            if "p_err" not in reasons:
                return None
            known[recorded.group.prompt.id, member.sample] = reasons["p_err"], reasons["p_format"]
    return known


def _groups(run: RecordedRun, step: int, *, needs_text: bool) -> Iterator[Group]:
    tokenizer = load_tokenizer(run.tokenizer) if needs_text else None
    if needs_text and tokenizer is None:
        raise ValueError(f"{run.folder} has no tokenizer, so the texts cannot be read. Fix: copy tokenizer.json there")
    for recorded in run.groups(step):
        tokens = run.tokens(step, recorded.number)
        if tokens is not None:
            yield with_tokens(recorded, tokens, tokenizer)


def _selection(options: Options, config: Mapping[str, Any], known: Mapping[tuple[str, int], Any]) -> Selection:
    """Returns the selection that the options ask for; what they leave open is as in the run's configuration. Raises
    ValueError if that does not say it.
    """

    def own(name: str) -> Any:
        key = next((key for key in config if key == name or key.endswith(f".{name}")), None)
        if key is None:
            raise ValueError(f"the configuration of {options.run} has no {name}. Fix: give it as {name}=...")
        return config[key]

    algorithm = options.algorithm or own("algorithm")
    if algorithm != "roc":
        for name in ("smoothing", "penalties", "failures"):
            if getattr(options, name) is not None:
                raise ValueError(f"{algorithm} has no {name}. Fix: leave out {name}=, or add algorithm=roc")
    if algorithm == "grpo" and options.group_size is not None:
        raise ValueError("grpo trains whole groups. Fix: rollouts= for smaller ones, in place of group_size=")
    keep = 0 if algorithm == "grpo" else options.group_size or int(own("group_size"))
    made: dict[str, Callable[[], Selector]] = {
        "roc": lambda: OtherRoC(
            keep=keep,
            smoothing=options.smoothing or RoC(keep=1).smoothing,
            penalties=options.penalties or "both",
            failures=options.failures,
            known=known,
        ),
        "random": lambda: RandomSubset(keep=keep),
        "grpo": KeepAll,
    }
    if algorithm not in made:
        raise ValueError(f"the run's algorithm {algorithm!r} is not known. Fix: algorithm= one of {', '.join(made)}")
    name = options.advantage or str(config.get("advantage") or "grpo")
    return Selection(selector=made[algorithm](), seed=int(config.get("seed", 0)), advantage=ADVANTAGES[name])


def _first(group: Group, rollouts: int | None) -> Group:
    members = sorted(group.trajectories, key=lambda member: member.sample)[:rollouts]
    return replace(group, trajectories=tuple(members)) if rollouts is not None else group


async def _regraded(groups: Sequence[Group], reward: Reward | GroupReward, options: Options) -> list[Group]:
    """Grades all trajectories again, so many at once. Raises WrongPart as in a run, and Failed, which names the line
    and the trajectory, for what else the reward raises.
    """
    timeline, limit = Timeline(), asyncio.Semaphore(options.graders)

    async def one(member: Trajectory, reward: Reward) -> Trajectory:
        async with limit:
            return await graded(member, reward, timeline, options.grade_deadline_s)

    async def grade(group: Group, scope: asyncio.TaskGroup) -> Group:
        if isinstance(reward, GroupReward):
            async with limit:
                members = await graded_together(group.trajectories, reward, timeline, options.grade_deadline_s)
        else:
            tasks = [scope.create_task(one(each, reward), name=f"grade-{each.sample}") for each in group.trajectories]
            members = tuple([await task for task in tasks])
        return replace(group, trajectories=members)

    try:
        async with asyncio.TaskGroup() as scope:
            tasks = [scope.create_task(grade(group, scope), name=f"group-{group.prompt.id}") for group in groups]
    except BaseExceptionGroup as failures:
        error = first_error(failures)
        if isinstance(error, WrongPart) or not isinstance(error, Exception):
            raise error from None
        file = Path(str(options.reward).rpartition(":")[0])
        raise Failed(" ".join([told(error, file), *getattr(error, "__notes__", [])])) from error
    return [task.result() for task in tasks]


def _scored(groups: Sequence[Group], advantage: Advantage) -> list[Group]:
    """Returns the groups with advantages also where those need all groups of the batch."""
    pending = [group for group in groups if group.kept and group.advantages_K is None]
    if not pending:
        return list(groups)
    scored = advantage.of_batch([rewards(group) for group in pending], [lengths(group) for group in pending])
    by_group = {id(group): values for group, values in zip(pending, scored, strict=True)}
    return [replace(group, advantages_K=by_group.get(id(group), group.advantages_K)) for group in groups]


def sentence(total: Counts, steps: int, is_graded: bool) -> str:
    row = total.row()
    parts = []
    if is_graded and not total.other_graded:
        parts.append(f"none of {total.trajectories:,} trajectories could be graded")
    elif is_graded:
        parts.append(
            f"{total.rewards_changed:,} of {total.other_graded:,} rewards change ({total.correct:,} were above 0, "
            f"{total.other_correct:,} are now)"
        )
    parts += [
        f"{total.other_flat:,} of {total.groups:,} groups have no signal ({total.flat:,} before)",
        f"{total.other_kept:,} trajectories are trained ({total.kept:,} before), {total.kept_others:,} of them others",
    ]
    if (mean := row["other_mean_advantage"]) is not None:
        parts.append(f"an advantage is {mean:.2f} in the mean ({_figure(row['mean_advantage'], 2)} before)")
    if (share := row["other_error_share"]) is not None:
        before = _figure(row["error_share"], 3)
        parts.append(f"trained ones with a reward above 0 have a p_err of {share:.3f} ({before} before)")
    return f"Over {steps} step{'s' * (steps > 1)}: {'; '.join(parts)}."


def _figure(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def notes(total: Counts, options: Options) -> Iterator[str]:
    """Yields what the figures rest on, and what they cannot say."""
    if not total.comparable:
        yield "How the run selected is not in its configuration, so its choice cannot be repeated for comparison."
    elif total.reproduced == total.comparable:
        yield f"The run's own settings select all {total.comparable:,} groups as recorded."
    else:
        yield (
            f"The run's own settings select {total.reproduced:,} of {total.comparable:,} groups as recorded; the "
            "others were chosen by other code or settings, so part of the difference is not the options'."
        )
    if total.dropped_later:
        yield f"{total.dropped_later:,} groups were dropped by a stage of the recipe, which is not run here."
    if total.ungraded:
        yield f"{total.ungraded:,} trajectories could not be graded and are left out, as in a run."
    if options.rollouts is not None or options.group_size is not None:
        yield "Another G sees the same policy: what it would have learnt from other groups is not in these figures."


def show(rows: Sequence[Mapping[str, float | None]], total: Mapping[str, float | None]) -> None:
    columns = {
        "rewards changed": ("rewards_changed", None),
        "reward > 0": ("correct_share", "other_correct_share"),
        "no signal": ("flat", "other_flat"),
        "trained": ("kept", "other_kept"),
        "others": ("kept_others", None),
        "tokens": ("tokens", "other_tokens"),
        "|advantage|": ("mean_advantage", "other_mean_advantage"),
        "p_err": ("error_share", "other_error_share"),
    }

    def figure(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"

    def shown(row: Mapping[str, float | None], name: str, other: str | None) -> str:
        texts = [figure(value) for value in (row[name], row[other or name])]
        return texts[0] if other is None else " -> ".join(texts)

    lines = [[f"{row['step']:.0f}", *(shown(row, *pair) for pair in columns.values())] for row in rows]
    lines.append(["all", *(shown(total, *pair) for pair in columns.values())])
    table("as it was -> with the other choice", ["step", *columns], lines)
