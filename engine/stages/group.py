"""The life of a group: its rollouts start at once, are graded, and those that no longer matter are stopped.

A Reward grades each rollout as it ends. A GroupReward grades the members together, once they have all ended.

Invariants
- Each lease gives exactly one group, whatever its rollouts do and in whichever order they end.
- When a group is out none of its rollouts runs any more: their tool calls are dead and their KV blocks are free.
- Every sampled token is in a trajectory of the group or in its waste, under one reason.
- Without extra samples, early stop and refills, groups do not depend on the order in which rollouts end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from engine.errors import add_note
from engine.pipeline.pipeline import Inbox, Outbox, StageFunction
from engine.ports import GroupReward, Reward
from engine.rollout.rollout import Tally
from engine.rollout.source import RolloutSource
from engine.run.journal import Journal, Log
from engine.stages.admit import AdmittedPrompt
from engine.stages.grading import GRADE_DEADLINE_S, graded, graded_together
from engine.telemetry.timeline import Timeline
from engine.types import Group, Prompt, Trajectory
from engine.user_parts import WrongPart, no_exit, place_of
from sandbox.require import at_least, positive, require


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """samples: trajectories per group. graders: trajectories graded at once, over all groups; the others wait.
    grade_deadline_s: seconds in which a trajectory must be graded, or a group by a GroupReward; without the wait for a
    grader.

    The rest is off by default. It buys time or fuller batches with a bias, and groups then depend on which rollout ends
    first, so that a seed no longer repeats a run.
    extra_samples: rollouts started beyond `samples`; those that are last are cancelled. Favours short trajectories.
    stop_flat_after: a group whose first so many rewards are all equal is stopped and dropped as flat. Loses rare
    successes and rare failures.
    refills: prompts that may follow one after another under a lease while a group would be dropped: the dynamic
    sampling of DAPO (arXiv 2503.14476), bounded. Favours prompts that the policy solves sometimes.
    """

    samples: int
    extra_samples: int = 0
    stop_flat_after: int | None = None
    refills: int = 0
    graders: int = 8
    grade_deadline_s: float = GRADE_DEADLINE_S

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("extra_samples", 0), ("refills", 0), ("graders", 1)):
            require(name, getattr(self, name), at_least(least))
        require("grade_deadline_s", self.grade_deadline_s, positive)
        if self.stop_flat_after is not None and not 2 <= self.stop_flat_after <= self.samples:
            raise ValueError(
                f"stop_flat_after must be from 2 to the {self.samples} samples of a group, got {self.stop_flat_after}"
            )

    @property
    def started(self) -> int:
        """Rollouts that a group starts: samples + extra_samples."""
        return self.samples + self.extra_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDecision:
    """A group is decided: members (samples, ascending) form it, the other rollouts stop.

    drop: "flat" when it was stopped early. others: the reason under which the tokens of the others are counted.
    """

    members: tuple[int, ...]
    drop: str | None = None

    @property
    def waste_reason(self) -> str:
        return self.drop or "surplus"


class GroupProgress:
    """Decides about one prompt's rollouts. Pure: the rewards go in as they come, at some point a decision comes out.

    A group is decided when `samples` rollouts were graded, when its first `stop_flat_after` rewards are equal, or when
    every rollout has ended: failed ones then fill up what is missing. Where a GroupReward is to grade them, a rollout
    that ended well counts as graded.

    >>> progress = GroupProgress(GroupConfig(samples=2, extra_samples=1))
    >>> progress.rollout_ended(2, 1.0), progress.rollout_ended(1, None), progress.rollout_ended(0, 0.0)
    (None, None, GroupDecision(members=(0, 2), drop=None))
    """

    def __init__(self, config: GroupConfig) -> None:
        self.decision: GroupDecision | None = None
        self._config = config
        self._rewards: dict[int, float] = {}  # by sample, in the order of their ends
        self._failed: list[int] = []

    def rollout_ended(self, sample: int, reward: float | None) -> GroupDecision | None:
        """A rollout ended; reward is None when it failed. Returns the decision if this decides the group."""
        assert self.decision is None, "the group is decided"
        assert 0 <= sample < self._config.started, sample
        assert sample not in self._rewards and sample not in self._failed, sample  # noqa: PT018
        if reward is None:
            self._failed.append(sample)
        else:
            self._rewards[sample] = reward
        self.decision = self._decide()
        return self.decision

    def _decide(self) -> GroupDecision | None:
        config, graded = self._config, len(self._rewards)
        if graded == config.samples or graded + len(self._failed) == config.started:
            return GroupDecision(members=tuple(sorted([*self._rewards, *self._failed][: config.samples])))
        if graded == config.stop_flat_after and len(set(self._rewards.values())) == 1:
            return GroupDecision(members=tuple(sorted(self._rewards)), drop="flat")
        return None


# Makes the group of one prompt: (prompt, lease, refills before it).
MakeGroup = Callable[[Prompt, int, int], Awaitable[Group]]


def groups(
    rollouts: RolloutSource,
    reward: Reward | GroupReward,
    select: Callable[[Group], Group],
    prompts: Iterator[Prompt],
    config: GroupConfig,
    timeline: Timeline,
    journal: Journal | None = None,
    make_group: MakeGroup | None = None,
) -> StageFunction:
    """AdmittedPrompt -> Group, selected: with `kept`, or with the reason for its drop.

    select: pure; sets `kept` and `advantages_K`, or `drop`, which calls for a refill. prompts: what refills are drawn
    from; when it is exhausted there are none. Each worker of the stage holds one lease at a time. What the
    journal holds is not done again. make_group: makes the groups in place of `rollouts`, on other machines, say
    (`engine.nodes.lead`). Raises ValueError for a GroupReward with `stop_flat_after`, which needs the rewards as the
    rollouts end.
    """
    if isinstance(reward, GroupReward) and config.stop_flat_after is not None:
        raise ValueError(
            f"stop_flat_after={config.stop_flat_after} needs rewards before the group is complete, and "
            f"{type(reward).__name__} grades whole groups. Fix: leave stop_flat_after out"
        )
    journal = journal or Journal()
    maker = GroupMaker(rollouts=rollouts, reward=reward, config=config, timeline=timeline)
    runner = _GroupRunner(
        make_group=make_group or partial(maker, journal=journal),
        select=select,
        prompts=prompts,
        config=config,
        timeline=timeline,
        journal=journal,
    )

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        async for admitted in inbox:
            await outbox.put(await runner.run(admitted))

    return stage


@dataclass(frozen=True, kw_only=True)
class _GroupRunner:
    make_group: MakeGroup
    select: Callable[[Group], Group]
    prompts: Iterator[Prompt]
    config: GroupConfig
    timeline: Timeline
    journal: Journal

    def _selected(self, group: Group) -> Group:
        """Raises WrongPart for a selection that gives another thing than the group."""
        where = f"{place_of(self.select)}, for the group of {group.prompt.id}"
        try:
            with no_exit("selection", self.select):
                found = self.select(group)
        except Exception as error:
            add_note(error, f"in the selection {where}")
            raise
        if not isinstance(found, Group):
            raise WrongPart(
                f"the selection {where}, returned {found!r:.100}. Fix: return replace(group, kept=..., "
                'advantages_K=...), or replace(group, drop="why")'
            )
        return found

    async def run(self, admitted: AdmittedPrompt) -> Group:
        """Prompt after prompt, until one gives something to train or no refill is left."""
        prompt, waste, refills = admitted.prompt, Counter[str](), 0
        while True:
            group = self.journal.decided(admitted.lease, refills) or await self.make_group(
                prompt, admitted.lease, refills
            )
            waste.update(group.waste)
            if group.drop is None:
                group = self._selected(group)
            more = group.drop is not None and refills < self.config.refills
            following = self.journal.draw(admitted.lease, refills + 1, self.prompts) if more else None
            if group.drop is None or following is None:
                return replace(group, waste=+waste, refills=refills)  # without zeros
            waste[group.drop] += sum(member.sampled_tokens for member in group.trajectories)
            waste["forced"] += sum(member.forced_tokens for member in group.trajectories)
            self.timeline.instant("trajectories", f"{group.drop}: refilled", lease=admitted.lease, prompt=prompt.id)
            prompt, refills = following, refills + 1


@dataclass(kw_only=True)
class GroupMaker:
    """Groups of graded trajectories on the rollouts' own fleet. journal: what it holds of a group is not done again."""

    rollouts: RolloutSource
    reward: Reward | GroupReward
    config: GroupConfig
    timeline: Timeline

    def __post_init__(self) -> None:
        top_p = getattr(getattr(self.rollouts, "config", None), "top_p", 1.0)
        if top_p != 1.0:  # the log-probabilities of replicas are those of top_p 1, and no check could see another
            raise ValueError(f"only what top_p 1 sampled can be trained (RolloutConfig.top_p), got {top_p}")
        self._grading = asyncio.Semaphore(self.config.graders)
        self._numbers = count()  # not the lease: the siblings of a refill have another prompt

    async def __call__(self, prompt: Prompt, lease: int, refills: int, *, journal: Journal) -> Group:
        """Starts a rollout per sample in a scope of its own; the one that decides the group cancels the others."""
        progress, number = GroupProgress(self.config), next(self._numbers)
        logs = [journal.log(lease, refills, sample) for sample in range(self.config.started)]
        tallies = [Tally(log.tokens) for log in logs]
        ended: dict[int, Trajectory] = {}

        async def run(sample: int) -> None:
            trajectory = await self._sample(prompt, sample, number, tallies[sample], logs[sample])
            if progress.decision is not None:
                return  # its end and its cancellation crossed
            ended[sample] = trajectory
            if progress.rollout_ended(sample, self._value(trajectory)) is not None:
                for other, task in tasks.items():
                    if other != sample:
                        task.cancel()

        # Those that the journal holds end first, in the order in which they did.
        order = dict.fromkeys([*journal.ended(lease, refills), *range(self.config.started)])
        async with asyncio.TaskGroup() as scope:
            name = f"rollout-{number}"
            tasks = {sample: scope.create_task(run(sample), name=f"{name}-{sample}") for sample in order}
        decision = progress.decision
        assert decision is not None, prompt.id
        members = tuple(ended[sample] for sample in decision.members)
        if isinstance(self.reward, GroupReward):
            async with self._grading:
                members = await graded_together(members, self.reward, self.timeline, self.config.grade_deadline_s)
            for member in members:
                logs[member.sample].end(member, tallies[member.sample].tokens)
        waste = _waste(decision, ended, tallies)
        group = Group(prompt=prompt, trajectories=members, lease=lease, drop=decision.drop, waste=waste)
        journal.decide(group, refills)
        return group

    async def _sample(self, prompt: Prompt, sample: int, number: int, tally: Tally, log: Log) -> Trajectory:
        """A rollout that has ended: graded, unless that is done for the whole group."""
        if log.finished is None or log.finished.error is not None:  # what failed by our fault gets another chance
            trajectory = await self.rollouts.run(prompt, sample, number, tally=tally, log=log)
        else:
            trajectory = replace(log.finished, prompt=prompt)
            if trajectory.reward is not None or isinstance(self.reward, GroupReward):
                return trajectory
        if not isinstance(self.reward, GroupReward):
            async with self._grading:
                trajectory = await graded(trajectory, self.reward, self.timeline, self.config.grade_deadline_s)
        log.end(trajectory, tally.tokens)
        return trajectory

    def _value(self, trajectory: Trajectory) -> float | None:
        """What the decision about the group is told of a rollout."""
        if isinstance(self.reward, GroupReward):
            return 0.0 if trajectory.error is None else None  # that there is one: its reward is not known yet
        return trajectory.reward


def _waste(decision: GroupDecision, ended: dict[int, Trajectory], tallies: list[Tally]) -> Counter[str]:
    """Sampled tokens by reason that are in none of the members."""
    waste: Counter[str] = Counter()
    for sample, tally in enumerate(tallies):
        if sample in decision.members:
            waste["superseded"] += tally.tokens - ended[sample].sampled_tokens - ended[sample].forced_tokens
        elif sample in ended and ended[sample].error is not None:
            waste["error"] += tally.tokens
        else:
            waste[decision.waste_reason] += tally.tokens
    return waste
