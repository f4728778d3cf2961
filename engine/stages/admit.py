"""The stages of a training run. Each factory returns a stage function for `engine.pipeline.pipeline.Stage`.

    admit -> engine.stages.group.groups -> batch -> (the recipe's learn stage)

Invariants
- Each admitted group reaches `batch` exactly once, trained or with a reason for its drop.
- A step's batch holds the groups of that step in admission order, whatever order they finished in.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.errors import no_foreign_cancel
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Inbox, Outbox, StageFunction
from engine.ports import GraderUnavailable, Reward
from engine.run.journal import Journal
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, Group, Prompt, RolloutError, StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """A group to make: a prompt and the lease it has."""

    prompt: Prompt
    lease: int


def admit(prompts: Iterator[Prompt], leases: Leases, steps: int, journal: Journal | None = None) -> StageFunction:
    """Puts out a ticket per group until `steps` steps are admitted. Raises ValueError when the prompts run out."""
    journal = journal or Journal()

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        for number in range(leases.first_step * leases.groups_per_step, total := steps * leases.groups_per_step):
            lease = await leases.acquire()
            prompt = journal.draw(lease, 0, prompts)
            if prompt is None:
                raise ValueError(f"the prompts ran out after {number} of {total} groups")
            await outbox.put(Ticket(prompt=prompt, lease=lease))

    return stage


async def graded(trajectory: Trajectory, reward: Reward, timeline: Timeline, deadline_s: float = 30.0) -> Trajectory:
    """The trajectory with its reward, or with a typed error when it could not be graded."""
    if trajectory.error is not None:
        return trajectory
    started, lane = timeline.now(), timeline.lanes["reward"].take()
    timeline.idle.flag("reward", 1, started)
    try:
        async with asyncio.timeout(deadline_s) as budget:
            with no_foreign_cancel("the reward"):
                value = float(await reward(trajectory))  # a bool or a NumPy number: a journal holds plain ones
        if not math.isfinite(value):
            raise ValueError(f"the reward of {trajectory.prompt.id}, sample {trajectory.sample} is {value}")
        return replace(trajectory, reward=value)
    except (GraderUnavailable, TimeoutError) as failure:
        if isinstance(failure, TimeoutError) and not budget.expired():
            raise  # a bug in the reward, not our deadline
        error = RolloutError(boundary=Boundary.REWARD, message=str(failure) or f"no grade within {deadline_s} s")
        return replace(trajectory, error=error, stop=StopReason.ERROR)
    finally:
        timeline.idle.flag("reward", -1, timeline.now())
        timeline.span("reward", trajectory.prompt.id, started, timeline.now(), lane, sample=trajectory.sample)
        timeline.lanes["reward"].give(lane)


def batch(leases: Leases) -> StageFunction:
    """Group -> list of the groups of one step, steps in order, groups in admission order."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        steps: dict[int, list[Group]] = defaultdict(list)
        following = leases.first_step
        async for group in inbox:
            steps[leases.step_of(group.lease)].append(group)
            while len(steps[following]) == leases.groups_per_step:
                await outbox.put(sorted(steps.pop(following), key=lambda member: member.lease))
                following += 1
        if left := sorted(step for step, groups in steps.items() if groups):
            raise RuntimeError(f"the groups ended within a step: steps {left}")

    return stage
