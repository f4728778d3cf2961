"""The training pipeline: every admitted group reaches `batch` once, in order, whatever finishes first."""

import asyncio
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Pipeline, Stage
from engine.ports import GraderUnavailable
from engine.run.journal import Journal
from engine.stages.admit import admit
from engine.stages.batch import batch_groups
from engine.stages.grading import graded
from engine.stages.group import GroupConfig, groups
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, Group, RolloutError, StopReason
from engine.user_parts import WrongPart
from tests.support.examples import examples
from tests.support.fakes import Clock, Prompts, a_prompt, a_trajectory, settle
from tests.support.held import HeldRollouts


async def one(trajectory):
    return 1.0


def timeline():
    return Timeline(Clock())


async def train(steps, groups_per_step, samples, max_staleness, choices):
    """Runs the whole pipeline; choices say which of the held rollouts ends next. Returns the batches."""
    leases, rollouts, batches = Leases(groups_per_step, max_staleness), HeldRollouts(), []
    config = GroupConfig(samples=samples)

    async def learn(inbox, outbox):
        async for batch in inbox:
            batches.append(batch)
            rollouts.version += 1
            for group in batch:
                leases.release(group.lease)

    def mark(group):
        return replace(group, drop="flat") if group.lease % 3 == 0 else replace(group, kept=(0,))

    prompts = Prompts()
    pipeline = Pipeline(
        [
            Stage(name="admit", run=admit(prompts, leases, steps)),
            Stage(name="groups", run=groups(rollouts, one, mark, prompts, config, timeline()), workers=leases.capacity),
            Stage(name="batch", run=batch_groups(leases)),
            Stage(name="learn", run=learn),
        ]
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pipeline.run())
        choices = list(choices)
        while not running.done():
            await settle(40)
            if rollouts.held:
                number = choices.pop() if choices else 0
                rollout = rollouts.held[number % len(rollouts.held)]
                rollout.say(2)
                rollout.end()
    return batches


@examples(25)
@given(
    steps=st.integers(1, 3),
    groups_per_step=st.integers(1, 3),
    samples=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    choices=st.lists(st.integers(0, 30), max_size=40),
)
def test_each_group_is_batched_once_and_in_order_and_none_is_too_old(
    steps, groups_per_step, samples, max_staleness, choices
):
    batches = asyncio.run(train(steps, groups_per_step, samples, max_staleness, choices))
    leases = [[group.lease for group in batch] for batch in batches]
    everything = list(range(steps * groups_per_step))
    assert leases == [everything[n * groups_per_step :][:groups_per_step] for n in range(steps)]
    for step, batch in enumerate(batches):
        for group in batch:
            assert [member.sample for member in group.trajectories] == list(range(samples))
            assert {member.prompt.id for member in group.trajectories} == {group.prompt.id} == {f"p{group.lease}"}
            assert group.rewards_G.tolist() == [1.0] * samples
            assert (group.drop is None) == (group.lease % 3 != 0), "dropped groups come along with their reason"
            versions = [int(member.versions_T.max()) for member in group.trajectories]
            assert min(versions) >= step - max_staleness


async def test_prompts_that_run_out_are_named():
    pipeline = Pipeline([Stage(name="admit", run=admit(iter([a_prompt()]), Leases(2, 1), 3))])
    with pytest.raises(ValueError, match="the prompts ran out after 1 of 6 groups"):
        await pipeline.run()


async def test_the_wait_for_a_lease_is_inside_what_measures_it():
    leases, inside, admitted = Leases(2, 0), [], []

    @contextmanager
    def waiting():
        inside.append("waits")
        yield
        inside.pop()

    async def take(inbox, outbox):
        async for prompt in inbox:
            admitted.append(prompt.lease)

    stages = [
        Stage(name="admit", run=admit(iter([a_prompt()] * 4), leases, 2, waiting=waiting)),
        Stage(name="take", run=take),
    ]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Pipeline(stages).run())
        await settle(20)
        assert (admitted, inside) == ([0, 1], ["waits"])
        leases.release(0)
        leases.release(1)
    assert (admitted, inside) == ([0, 1, 2, 3], [])


async def test_a_step_that_stays_incomplete_is_an_error():
    async def source(inbox, outbox):
        await outbox.put(Group(prompt=a_prompt(), trajectories=(a_trajectory(),), lease=0, drop="flat"))

    pipeline = Pipeline([Stage(name="source", run=source), Stage(name="batch", run=batch_groups(Leases(2, 0)))])
    with pytest.raises(RuntimeError, match=r"within a step: steps \[0\]"):
        await pipeline.run()


# Rewards


async def test_a_trajectory_with_an_error_is_not_graded():
    async def never(trajectory):
        raise AssertionError("graded")

    failed = a_trajectory(error=RolloutError(boundary=Boundary.SANDBOX, message="lost"))
    assert await graded(failed, never, timeline()) is failed


async def test_a_grader_that_is_gone_is_an_error_of_ours_and_never_a_reward():
    async def gone(trajectory):
        raise GraderUnavailable("the verifier died")

    found = await graded(a_trajectory(), gone, timeline())
    assert (found.reward, found.stop) == (None, StopReason.ERROR)
    assert found.error == RolloutError(boundary=Boundary.REWARD, message="the verifier died")


async def test_a_grader_that_hangs_is_given_up():
    async def hangs(trajectory):
        await asyncio.Event().wait()

    found = await graded(a_trajectory(), hangs, timeline(), deadline_s=0.01)
    assert found.error == RolloutError(boundary=Boundary.REWARD, message="no grade within 0.01 s")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_finite_stops_the_run(value):
    async def broken(trajectory):
        return value

    with pytest.raises(WrongPart, match=rf"broken \(test_stages.py:\d+\) answered {value} for p0, sample 0"):
        await graded(a_trajectory(), broken, timeline())


@pytest.mark.parametrize(
    "value", [True, 1, np.float64(1), np.float32(1), np.int64(1), np.bool_(True), np.ones(())], ids=repr
)
async def test_a_reward_of_any_kind_of_number_is_read_back_from_a_journal(tmp_path, value):
    async def numeric(trajectory):
        return value

    Journal(tmp_path).log(0, 0, 0).end(await graded(a_trajectory(), numeric, timeline()), 4)
    found = Journal(tmp_path).log(0, 0, 0).finished
    assert found is not None
    assert (type(found.reward), found.reward) == (float, 1.0)


@pytest.mark.parametrize("error", [LookupError("a bug"), TimeoutError("a bug")])
async def test_a_bug_in_a_reward_stops_the_run(error):
    async def broken(trajectory):
        raise error

    clock = timeline()
    with pytest.raises(type(error), match="a bug"):
        await graded(a_trajectory(), broken, clock)
    assert clock.idle._flags["reward"] == 0


async def test_a_reward_that_awaits_what_was_cancelled_is_a_bug_and_no_interruption():
    async def shared(trajectory):
        look_up = asyncio.get_running_loop().create_future()
        look_up.cancel()
        return await look_up

    with pytest.raises(RuntimeError, match="the reward: something that it awaits was cancelled"):
        await graded(a_trajectory(), shared, timeline())
