"""The stage that collects the groups of a step.

Invariant: a step's batch holds the groups of that step in the order of their admission, whichever finished first.
"""

from __future__ import annotations

from collections import defaultdict

from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Inbox, Outbox, StageFunction
from engine.types import Group
from engine.user_parts import WrongPart


def batch_groups(leases: Leases) -> StageFunction:
    """Returns the stage Group -> list of the groups of one step. Steps come in order, and so do a step's groups.

    Raises WrongPart for a group that has neither `kept` nor `drop`.
    """

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        steps: dict[int, list[Group]] = defaultdict(list)
        following = leases.first_step
        async for group in inbox:
            if not group.kept and group.drop is None:
                raise WrongPart(
                    f"the group of prompt {group.prompt.id} came with neither kept nor drop. Fix: in the selection, or "
                    'in a stage after it, replace(group, kept=..., advantages_K=...) or replace(group, drop="why")'
                )
            steps[leases.step_of(group.lease)].append(group)
            while len(steps[following]) == leases.groups_per_step:
                await outbox.put(sorted(steps.pop(following), key=lambda member: member.lease))
                following += 1
        if unfinished := sorted(step for step, groups in steps.items() if groups):
            raise RuntimeError(f"the groups ended within a step: steps {unfinished}")

    return stage
