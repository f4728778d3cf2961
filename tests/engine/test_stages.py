"""The training pipeline: every admitted group reaches `batch` once, in order, whatever finishes first."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import stages
from engine.lease import Leases
from engine.ports import GraderUnavailable
from engine.stage import Pipeline, Stage
from engine.trace import Timeline
from engine.types import Boundary, RolloutError, StopReason
from tests.fakes import Clock, Prompts, a_prompt, a_trajectory, settle


class HeldRollouts:
    """Stands for `Rollouts`: every rollout waits until the test lets it end."""

    def __init__(self, error=lambda sample: None):
        self.held = []
        self.groups = {}  # lease -> version at admission
        self.version = 0
        self._error = error

    async def run(self, prompt, sample, group):
        self.groups.setdefault(group, self.version)
        future = asyncio.get_running_loop().create_future()
        self.held.append(future)
        await future
        return a_trajectory(sample, prompt=prompt, version=self.version, error=self._error(sample))


async def one(trajectory):
    return 1.0


def timeline():
    return Timeline(Clock())


async def train(steps, groups_per_step, samples, max_staleness, choices, workers=8):
    """Runs the whole pipeline; choices say which of the held rollouts ends next. Returns (batches, rollouts)."""
    leases, rollouts, batches = Leases(groups_per_step, max_staleness), HeldRollouts(), []

    async def learn(inbox, outbox):
        async for groups in inbox:
            batches.append(groups)
            rollouts.version += 1
            for group in groups:
                leases.release(group.lease)

    def mark(group):
        return replace(group, drop="flat") if group.lease % 3 == 0 else replace(group, kept=(0,))

    pipeline = Pipeline(
        [
            Stage(name="admit", run=stages.admit(Prompts(), leases, samples, steps)),
            Stage(name="roll", run=stages.roll(rollouts), workers=workers),
            Stage(name="grade", run=stages.grade(one, timeline()), workers=2),
            Stage(name="regroup", run=stages.regroup()),
            Stage(name="select", run=stages.apply(mark)),
            Stage(name="batch", run=stages.batch(leases)),
            Stage(name="learn", run=learn),
        ]
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pipeline.run())
        choices = list(choices)
        while not running.done():
            await settle(40)
            assert leases.outstanding <= leases.capacity
            if rollouts.held:
                number = choices.pop() if choices else 0
                rollouts.held.pop(number % len(rollouts.held)).set_result(None)
    return batches, rollouts


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 3),
    groups_per_step=st.integers(1, 3),
    samples=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    workers=st.integers(1, 12),
    choices=st.lists(st.integers(0, 30), max_size=40),
)
def test_each_group_is_batched_once_and_in_order_and_none_is_too_old(
    steps, groups_per_step, samples, max_staleness, workers, choices
):
    batches, rollouts = asyncio.run(train(steps, groups_per_step, samples, max_staleness, choices, workers))
    leases = [[group.lease for group in groups] for groups in batches]
    everything = list(range(steps * groups_per_step))
    assert leases == [everything[n * groups_per_step :][:groups_per_step] for n in range(steps)]
    for step, groups in enumerate(batches):
        for group in groups:
            assert [member.sample for member in group.trajectories] == list(range(samples))
            assert {member.prompt.id for member in group.trajectories} == {group.prompt.id} == {f"p{group.lease}"}
            assert group.rewards_G.tolist() == [1.0] * samples
            assert (group.drop is None) == (group.lease % 3 != 0), "dropped groups come along with their reason"
            assert rollouts.groups[group.lease] >= step - max_staleness


async def test_prompts_that_run_out_are_named():
    pipeline = Pipeline([Stage(name="admit", run=stages.admit(iter([a_prompt()]), Leases(2, 1), 1, 3))])
    with pytest.raises(ValueError, match="only 1 prompts for 3 steps of 2"):
        await pipeline.run()


def feed(*items):
    async def stage(inbox, outbox):
        for item in items:
            await outbox.put(item)

    return stage


async def test_groups_and_steps_that_stay_incomplete_are_an_error():
    ticket = stages.Ticket(prompt=a_prompt(), lease=3, sample=0, samples=2)
    source = Stage(name="source", run=feed((ticket, a_trajectory())))
    with pytest.raises(RuntimeError, match=r"incomplete groups: leases \[3\]"):
        await Pipeline([source, Stage(name="regroup", run=stages.regroup())]).run()
    full = stages.Ticket(prompt=a_prompt(), lease=0, sample=0, samples=1)
    source = Stage(name="source", run=feed((full, a_trajectory())))
    regroup, batch = Stage(name="regroup", run=stages.regroup()), Stage(name="batch", run=stages.batch(Leases(2, 0)))
    with pytest.raises(RuntimeError, match=r"within a step: steps \[0\]"):
        await Pipeline([source, regroup, batch]).run()


# Rewards


async def test_a_trajectory_with_an_error_is_not_graded():
    async def never(trajectory):
        raise AssertionError("graded")

    failed = a_trajectory(error=RolloutError(boundary=Boundary.SANDBOX, message="lost"))
    assert await stages.graded(failed, never, timeline()) is failed


async def test_a_grader_that_is_gone_is_an_error_of_ours_and_never_a_reward():
    async def gone(trajectory):
        raise GraderUnavailable("the verifier died")

    found = await stages.graded(a_trajectory(), gone, timeline())
    assert (found.reward, found.stop) == (None, StopReason.ERROR)
    assert found.error == RolloutError(boundary=Boundary.REWARD, message="the verifier died")


async def test_a_grader_that_hangs_is_given_up():
    async def hangs(trajectory):
        await asyncio.Event().wait()

    found = await stages.graded(a_trajectory(), hangs, timeline(), deadline_s=0.01)
    assert found.error == RolloutError(boundary=Boundary.REWARD, message="no grade within 0.01 s")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_finite_stops_the_run(value):
    async def broken(trajectory):
        return value

    with pytest.raises(ValueError, match=f"the reward of p0, sample 0 is {value}"):
        await stages.graded(a_trajectory(), broken, timeline())


@pytest.mark.parametrize("error", [LookupError("a bug"), TimeoutError("a bug")])
async def test_a_bug_in_a_reward_stops_the_run(error):
    async def broken(trajectory):
        raise error

    clock = timeline()
    with pytest.raises(type(error), match="a bug"):
        await stages.graded(a_trajectory(), broken, clock)
    assert clock.idle._flags["reward"] == 0
