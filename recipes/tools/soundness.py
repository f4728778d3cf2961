"""Checks tasks and questions before anything is trained on them: does the reference pass, and does doing nothing fail?

A verdict has a `fault` if the task would train something wrong or nothing at all, and a `note` if that is not known or
costs it its grade. `recipes/tools/check.py` prints both; a run ends at its start for a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.errors import BadInput
from engine.ports import GraderUnavailable
from engine.types import Prompt
from recipes.tools.hidden_tests import HiddenTests
from recipes.tools.snapshot import Bounds
from recipes.tools.sql_reward import SqlReward, WrongReference
from recipes.tools.workspace import snapshot_of

AT_ONCE = 32  # prompts that are checked at a time
NAMED = 10  # faults that an error names


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a check found about a task, "" where there is nothing to say."""

    task: str
    fault: str = ""
    note: str = ""


Check = Callable[[Prompt], Awaitable[Verdict]]


def task_check(grader: HiddenTests) -> Check:
    """Returns a check of hidden tests: they run, pass on the reference, and fail on what the task begins with.

    Without a reference, tests that do not run on the beginning are only noted: they may import what is to be written.
    """

    async def check(prompt: Prompt) -> Verdict:
        try:
            beginning = await grader.report(prompt, snapshot_of(prompt, Bounds()))
            reference = await grader.report_of_reference(prompt)
        except (ValueError, GraderUnavailable) as error:
            return Verdict(task=prompt.id, fault=str(error))
        if reference is not None and not reference.ran:
            return Verdict(task=prompt.id, fault=f"the tests do not run: {reference.complaint}")
        if reference is not None and reference.complaint:
            return Verdict(task=prompt.id, fault=f"the tests fail on the reference: {reference.complaint}")
        if not beginning.complaint:
            return Verdict(task=prompt.id, fault="the tests pass on the workspace as it begins")
        if reference is not None:
            return Verdict(task=prompt.id)
        doubt = (
            "" if beginning.ran else f", and the tests do not run on the workspace as it begins: {beginning.complaint}"
        )
        return Verdict(task=prompt.id, note=f"there is no reference{doubt}")

    return check


def question_check(reward: SqlReward) -> Check:
    """Returns a check of questions about a database: the reference runs, and asks for something."""

    async def check(prompt: Prompt) -> Verdict:
        try:
            return Verdict(task=prompt.id, note=await reward.ungraded(prompt))
        except (WrongReference, ValueError, GraderUnavailable) as error:
            return Verdict(task=prompt.id, fault=str(error).removeprefix(f"prompt {prompt.id}: "))

    return check


async def verdicts_of(prompts: Iterable[Prompt], check: Check) -> list[Verdict]:
    """Returns the verdicts on prompts in their order; AT_ONCE are checked at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: Prompt) -> Verdict:
        async with slots:
            return await check(prompt)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(each), name=f"check-{each.id}") for each in prompts]
    return [task.result() for task in tasks]


def require_sound(verdicts: Sequence[Verdict]) -> None:
    """Raises BadInput, which names the tasks with a fault."""
    faults = [verdict for verdict in verdicts if verdict.fault]
    if not faults:
        return
    named = "; ".join(f"{verdict.task}: {verdict.fault}" for verdict in faults[:NAMED])
    more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    raise BadInput(
        f"{len(faults)} of {len(verdicts)} tasks are broken: {named}{more}. Fix: correct them or leave them out "
        "(recipes/tools/check.py names all), or give check=false"
    )
