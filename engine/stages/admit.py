"""The first stage of a training run: it decides which prompts are rolled out, and how many at a time.

    admit -> engine.stages.group.groups -> engine.stages.batch.batch_groups -> engine.stages.train

Invariant: each admitted group reaches `batch` exactly once, to be trained or with a reason for its drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from engine.errors import BadInput
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Inbox, Outbox, StageFunction
from engine.run.journal import Journal
from engine.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedPrompt:
    """A group that is to be made: its prompt and its lease."""

    prompt: Prompt
    lease: int


def admit(
    prompts: Iterator[Prompt],
    leases: Leases,
    steps: int,
    journal: Journal | None = None,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StageFunction:
    """Returns the stage that puts out a prompt for each group of `steps` steps.

    It waits for each lease inside `waiting()`, which counts as no work, and raises BadInput when the prompts run out.
    """
    journal = journal or Journal()

    total = steps * leases.groups_per_step

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        for number in range(leases.first_step * leases.groups_per_step, total):
            with waiting(), inbox.waiting():
                lease = await leases.acquire()
            prompt = journal.draw(lease, 0, prompts)
            if prompt is None:
                raise BadInput(
                    f"the prompts ran out after {number} of {total} groups. Fix: fewer steps, or prompts without an "
                    "end, such as read_prompts(path, epochs=None)"
                )
            await outbox.put(AdmittedPrompt(prompt=prompt, lease=lease))

    return stage
