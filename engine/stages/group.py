"""The life of a group: its rollouts start at once and are graded, and those that no longer matter are stopped.

A Reward grades each rollout as it ends. A GroupReward grades the members together, once they have all ended.

Invariants
- Each lease gives exactly one group, whatever its rollouts do and in whichever order they end.
- Once a group is put out, none of its rollouts runs any more: their tool calls are dead, their KV blocks are free.
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
    grade_deadline_s: seconds in which a trajectory must be graded, or a group by a GroupReward, without the wait for a
    grader.

    The rest is off by default. It buys time or fuller batches with a bias, and groups then depend on which rollout ends
    first, so that a seed no longer repeats a run.
    extra_samples: rollouts started beyond `samples`; the last ones are cancelled. This favours short trajectories.
    stop_flat_after: a group whose first so many rewards are all equal is stopped and dropped as flat. This loses rare
    successes and rare failures.
    refills: how many prompts may follow under a lease, one after another, while its group would be dropped. It is the
    dynamic sampling of DAPO (arXiv 2503.14476), bounded, and favours prompts that the policy solves sometimes.
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
    """The members of a group (samples, ascending); its other rollouts stop. drop: "flat" if it was stopped early."""

    members: tuple[int, ...]
    drop: str | None = None

    @property
    def waste_reason(self) -> str:
        """The reason under which the tokens of the other rollouts are counted."""
        return self.drop or "surplus"


class GroupProgress:
    """Decides which rollouts form a group. Pure: rewards go in as they come, and at some point a decision comes out.

    A group is decided when `samples` rollouts were graded, when its first `stop_flat_after` rewards are equal, or when
    every rollout has ended; failed ones then make up the number. If a GroupReward is to grade them, a rollout that did
    not fail counts as graded.

    >>> progress = GroupProgress(GroupConfig(samples=2, extra_samples=1))
    >>> progress.rollout_ended(2, 1.0), progress.rollout_ended(1, None), progress.rollout_ended(0, 0.0)
    (None, None, GroupDecision(members=(0, 2), drop=None))
    """

    def __init__(self, config: GroupConfig) -> None:
        self.decision: GroupDecision | None = None
        self._config = config
        self._rewards: dict[int, float] = {}  # sample -> reward, in the order in which the rollouts ended
        self._failed: list[int] = []

    def rollout_ended(self, sample: int, reward: float | None) -> GroupDecision | None:
        """Notes that a rollout ended; reward is None if it failed. Returns the decision if this decides the group."""
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
    """Returns the stage AdmittedPrompt -> Group, which puts out selected groups: with `kept`, or a reason for the drop.

    Each worker of the stage holds one lease at a time. What the journal holds is not done again.

    select: pure; sets `kept` and `advantages_K`, or `drop`, which calls for a refill. prompts: the stream from which
    refills are drawn, until it is exhausted. make_group: makes the groups in place of `rollouts`, such as on other
    machines (`engine.nodes.lead`). Raises ValueError for a GroupReward with `stop_flat_after`, which needs the rewards
    as the rollouts end.
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
        """Returns the group as selected. Raises WrongPart if the selection does not return a group."""
        where = f"{place_of(self.select)}, for the group of {group.prompt.id}"
        try:
            with no_exit("selection", self.select):
                selected = self.select(group)
        except Exception as error:
            add_note(error, f"in the selection {where}")
            raise
        if not isinstance(selected, Group):
            raise WrongPart(
                f"the selection {where}, returned {selected!r:.100}. Fix: return replace(group, kept=..., "
                'advantages_K=...), or replace(group, drop="why")'
            )
        return selected

    async def run(self, admitted: AdmittedPrompt) -> Group:
        """Makes groups of one prompt after another until one has something to train, or no refill is left."""
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
                return replace(group, waste=+waste, refills=refills)  # `+` removes the zeros
            waste[group.drop] += sum(member.sampled_tokens for member in group.trajectories)
            waste["forced"] += sum(member.forced_tokens for member in group.trajectories)
            self.timeline.instant("trajectories", f"{group.drop}: refilled", lease=admitted.lease, prompt=prompt.id)
            prompt, refills = following, refills + 1


@dataclass(kw_only=True)
class GroupMaker:
    """Makes groups of graded trajectories on the rollouts' own fleet."""

    rollouts: RolloutSource
    reward: Reward | GroupReward
    config: GroupConfig
    timeline: Timeline

    def __post_init__(self) -> None:
        top_p = getattr(getattr(self.rollouts, "config", None), "top_p", 1.0)
        if top_p != 1.0:  # replicas report the log-probabilities of top_p 1, so no check would notice another value
            raise ValueError(f"RolloutConfig.top_p must be 1 for rollouts that are trained, got {top_p}")
        self._grading = asyncio.Semaphore(self.config.graders)
        self._numbers = count()  # numbers the groups; a lease cannot, since a refill under it has another prompt

    async def __call__(self, prompt: Prompt, lease: int, refills: int, *, journal: Journal) -> Group:
        """Starts a rollout per sample in a scope of its own; the one that decides the group cancels the others.

        What the journal holds of the group is not done again.
        """
        progress, number = GroupProgress(self.config), next(self._numbers)
        logs = [journal.log(lease, refills, sample) for sample in range(self.config.started)]
        tallies = [Tally(log.tokens) for log in logs]
        in_flight = self.timeline.in_flight
        ended: dict[int, Trajectory] = {}

        async def run(sample: int) -> None:
            with in_flight.rollout(prompt.id, sample=sample, lease=lease) as watched:
                tallies[sample].watched = watched
                watched.tokens = tallies[sample].tokens  # those that the journal holds
                trajectory = await self._sample(prompt, sample, number, tallies[sample], logs[sample])
                in_flight.ends(watched, trajectory)
            if progress.decision is not None:
                return  # it ended just as it was cancelled
            ended[sample] = trajectory
            if progress.rollout_ended(sample, self._value(trajectory)) is not None:
                for other, task in tasks.items():
                    if other != sample:
                        task.cancel()

        # The rollouts that the journal holds end first, in the same order as before.
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
        """Returns a rollout that has ended, graded unless the whole group is graded together."""
        if log.finished is None or log.finished.error is not None:  # one that failed by our fault is tried again
            trajectory = await self.rollouts.run(prompt, sample, number, tally=tally, log=log)
        else:
            trajectory = replace(log.finished, prompt=prompt)
            if trajectory.reward is not None or isinstance(self.reward, GroupReward):
                return trajectory
        if not isinstance(self.reward, GroupReward):
            tally.watched.moves("grading")
            async with self._grading:
                trajectory = await graded(trajectory, self.reward, self.timeline, self.config.grade_deadline_s)
        log.end(trajectory, tally.tokens)
        return trajectory

    def _value(self, trajectory: Trajectory) -> float | None:
        """Returns the reward that `GroupProgress` gets for a rollout, None if it failed."""
        if isinstance(self.reward, GroupReward):
            return 0.0 if trajectory.error is None else None  # any number will do: the reward is not known yet
        return trajectory.reward


def _waste(decision: GroupDecision, ended: dict[int, Trajectory], tallies: list[Tally]) -> Counter[str]:
    """Returns the sampled tokens that are in none of the members, by reason."""
    waste: Counter[str] = Counter()
    for sample, tally in enumerate(tallies):
        if sample in decision.members:
            waste["superseded"] += tally.tokens - ended[sample].sampled_tokens - ended[sample].forced_tokens
        elif sample in ended and ended[sample].error is not None:
            waste["error"] += tally.tokens
        else:
            waste[decision.waste_reason] += tally.tokens
    return waste
