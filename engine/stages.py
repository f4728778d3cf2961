"""The stages of a training run. Each factory returns a stage function for `engine.stage.Stage`.

    admit -> roll -> grade -> regroup -> apply(selection) -> batch -> (the recipe's learn stage)

Invariants
- Each admitted group reaches `batch` exactly once, trained or with a reason for its drop.
- A step's batch holds the groups of that step in admission order, whatever order they finished in.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.lease import Leases
from engine.ports import GraderUnavailable, Reward
from engine.rollout import Rollouts
from engine.stage import Inbox, Outbox, StageFunction
from engine.trace import Timeline
from engine.types import Boundary, Group, Prompt, RolloutError, StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """One rollout to do: sample number `sample` of `samples` for a leased prompt."""

    prompt: Prompt
    lease: int
    sample: int
    samples: int


def admit(prompts: Iterator[Prompt], leases: Leases, samples: int, steps: int) -> StageFunction:
    """Puts out `samples` tickets per prompt for `steps` steps, each prompt under a lease."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        for number in range(steps * leases.groups_per_step):
            lease = await leases.acquire()
            prompt = next(prompts, None)
            if prompt is None:
                raise ValueError(f"only {number} prompts for {steps} steps of {leases.groups_per_step}")
            for sample in range(samples):
                await outbox.put(Ticket(prompt=prompt, lease=lease, sample=sample, samples=samples))

    return stage


def roll(rollouts: Rollouts) -> StageFunction:
    """Ticket -> (ticket, trajectory). The number of workers bounds the concurrent trajectories."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        async for ticket in inbox:
            await outbox.put((ticket, await rollouts.run(ticket.prompt, ticket.sample, ticket.lease)))

    return stage


async def graded(trajectory: Trajectory, reward: Reward, timeline: Timeline, deadline_s: float = 30.0) -> Trajectory:
    """The trajectory with its reward, or with a typed error when it could not be graded."""
    if trajectory.error is not None:
        return trajectory
    started, lane = timeline.now(), timeline.lanes["reward"].take()
    timeline.idle.flag("reward", 1, started)
    try:
        async with asyncio.timeout(deadline_s) as budget:
            value = await reward(trajectory)
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


def grade(reward: Reward, timeline: Timeline) -> StageFunction:
    """(ticket, trajectory) -> (ticket, graded trajectory)."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        async for ticket, trajectory in inbox:
            await outbox.put((ticket, await graded(trajectory, reward, timeline)))

    return stage


def regroup() -> StageFunction:
    """(ticket, trajectory) -> Group, once all samples of a lease are there, ordered by sample."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        members: dict[int, list[Trajectory]] = defaultdict(list)
        async for ticket, trajectory in inbox:
            group = members[ticket.lease]
            group.append(trajectory)
            if len(group) == ticket.samples:
                ordered = tuple(sorted(members.pop(ticket.lease), key=lambda member: member.sample))
                await outbox.put(Group(prompt=ticket.prompt, trajectories=ordered, lease=ticket.lease))
        if members:
            raise RuntimeError(f"the rollouts ended with incomplete groups: leases {sorted(members)}")

    return stage


def apply(function: Callable[[Group], Group]) -> StageFunction:
    """A pure function on groups as a stage."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        async for group in inbox:
            await outbox.put(function(group))

    return stage


def batch(leases: Leases) -> StageFunction:
    """Group -> list of the groups of one step, steps in order, groups in admission order."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        steps: dict[int, list[Group]] = defaultdict(list)
        following = 0
        async for group in inbox:
            steps[leases.step_of(group.lease)].append(group)
            while len(steps[following]) == leases.groups_per_step:
                await outbox.put(sorted(steps.pop(following), key=lambda member: member.lease))
                following += 1
        if left := sorted(step for step, groups in steps.items() if groups):
            raise RuntimeError(f"the groups ended within a step: steps {left}")

    return stage
