"""Rewards that see the whole group: when they are asked, what they see, and what becomes of a group that they fail."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from engine.pipeline.pipeline import Pipeline, Stage
from engine.ports import Grade, GraderUnavailable
from engine.run.journal import Journal
from engine.stages.admit import AdmittedPrompt
from engine.stages.grading import graded, graded_together
from engine.stages.group import GroupConfig, groups
from engine.telemetry import metrics
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, RolloutError
from engine.user_parts import WrongPart
from tests.support.fakes import Clock, Gate, a_prompt, a_trajectory, settle
from tests.support.held import HeldRollouts
from tests.unit.engine.stages.test_group import Leased

LOST = RolloutError(boundary=Boundary.SANDBOX, message="lost")


class Ranked:
    """Each member's share of the group's texts that are smaller numbers. asked: the samples of each group it saw."""

    sees_group = True

    def __init__(self, gate=None):
        self.asked = []
        self.gate = gate

    async def __call__(self, trajectories):
        self.asked.append([member.sample for member in trajectories])
        if self.gate is not None:
            await self.gate.passed()
        values = [float(member.text) for member in trajectories]
        return [sum(other < value for other in values) / len(values) for value in values]


def timeline():
    return Timeline(Clock(tick=0.001))


async def test_a_group_is_graded_once_when_all_its_members_have_ended():
    reward = Ranked()
    async with Leased(samples=3, reward=reward) as stage:
        await stage.end(2, 5.0)
        await stage.end(0, 1.0)
        assert reward.asked == []
        await stage.end(1, 3.0)
    [group] = stage.out
    assert reward.asked == [[0, 1, 2]]
    assert [member.reward for member in group.trajectories] == [0.0, 1 / 3, 2 / 3]
    assert (group.kept, group.drop) == ((0, 1, 2), None)


async def test_the_surplus_is_stopped_before_the_group_is_graded():
    gate = Gate()
    reward = Ranked(gate)
    async with Leased(samples=2, extra_samples=2, reward=reward) as stage:
        for rollout in stage.rollouts.held:
            rollout.say(10)
        await stage.end(3, 5.0)
        await stage.end(1, 1.0)
        await gate.started.wait()
        assert [rollout.sample for rollout in stage.rollouts.cancelled] == [0, 2]
        gate.release()
    [group] = stage.out
    assert reward.asked == [[1, 3]]
    assert [member.reward for member in group.trajectories] == [0.0, 0.5]
    assert group.waste == {"surplus": 20}


async def test_the_reward_does_not_see_a_member_that_failed():
    reward = Ranked()
    async with Leased(samples=3, reward=reward) as stage:
        await stage.end(0, 4.0)
        await stage.end(1, None)
        await stage.end(2, 2.0)
    [group] = stage.out
    assert reward.asked == [[0, 2]]
    assert [member.reward for member in group.trajectories] == [0.5, None, 0.0]
    assert group.trajectories[1].error == LOST
    assert group.kept == (0, 2)


async def test_a_group_that_failed_throughout_is_not_graded():
    reward = Ranked()
    async with Leased(samples=2, reward=reward) as stage:
        await stage.end(0, None)
        await stage.end(1, None)
    assert reward.asked == []
    assert stage.out[0].drop == "error"


async def test_a_failed_rollout_is_made_up_by_an_extra_one():
    reward = Ranked()
    async with Leased(samples=2, extra_samples=1, reward=reward) as stage:
        await stage.end(0, None, 7)
        await stage.end(1, 1.0, 1)
        assert reward.asked == []
        await stage.end(2, 2.0, 2)
    [group] = stage.out
    assert reward.asked == [[1, 2]]
    assert group.waste == {"error": 7}


async def test_a_grader_of_groups_that_is_gone_is_an_error_of_each_member_and_never_a_reward():
    class Gone(Ranked):
        async def __call__(self, trajectories):
            raise GraderUnavailable("the judge died")

    async with Leased(samples=2, reward=Gone()) as stage:
        await stage.end(0, 1.0, 3)
        await stage.end(1, 2.0, 3)
    [group] = stage.out
    wanted = RolloutError(boundary=Boundary.REWARD, message="the judge died")
    assert [(member.reward, member.error) for member in group.trajectories] == [(None, wanted)] * 2
    assert group.drop == "error"


async def test_a_member_without_a_grade_has_an_error_and_the_others_have_their_rewards():
    class Partly(Ranked):
        async def __call__(self, trajectories):
            return [1.0, None, Grade(reward=0.5, scores={"style": 2.0, "words": None})]

    async with Leased(samples=3, reward=Partly()) as stage:
        for sample in range(3):
            await stage.end(sample, 1.0)
    first, second, third = stage.out[0].trajectories
    assert (first.reward, second.reward, third.reward) == (1.0, None, 0.5)
    assert second.error.boundary == Boundary.REWARD
    assert third.scores == {"style": 2.0, "words": None}


async def test_a_group_has_a_deadline():
    class Hangs(Ranked):
        async def __call__(self, trajectories):
            await asyncio.Event().wait()

    clock = timeline()
    found = await graded_together([a_trajectory(0), a_trajectory(1)], Hangs(), clock, deadline_s=0.01)
    assert [member.error.boundary for member in found] == [Boundary.REWARD] * 2
    assert all("0.01 s" in member.error.message for member in found)
    assert clock.idle._flags["reward"] == 0


async def test_the_deadline_of_a_grade_is_the_groups_setting():
    async def hangs(trajectory):
        await asyncio.Event().wait()

    async with Leased(samples=1, reward=hangs, grade_deadline_s=0.01) as stage:
        await stage.end(0, 1.0)
    assert "0.01 s" in stage.out[0].trajectories[0].error.message
    with pytest.raises(ValueError, match="grade_deadline_s"):
        GroupConfig(samples=2, grade_deadline_s=0.0)


async def test_a_reward_that_gives_too_few_grades_is_a_bug():
    class Short(Ranked):
        async def __call__(self, trajectories):
            return [1.0]

    with pytest.raises(ValueError, match="p0 gave 1 grades for 2"):
        await graded_together([a_trajectory(0), a_trajectory(1)], Short(), timeline())


async def test_a_score_that_is_not_finite_stops_the_run():
    async def broken(trajectory):
        return Grade(reward=1.0, scores={"style": float("nan")})

    with pytest.raises(WrongPart, match=r"broken \(.*\) answered a score 'style' of nan for p0, sample 0"):
        await graded(a_trajectory(), broken, timeline())


async def test_stopping_flat_groups_early_needs_rewards_that_come_one_by_one():
    with pytest.raises(ValueError, match="stop_flat_after=2"):
        groups(HeldRollouts(), Ranked(), None, iter(()), GroupConfig(samples=4, stop_flat_after=2), timeline())


async def test_so_many_groups_are_graded_at_once():
    gate = Gate()
    reward = Ranked(gate)
    async with Leased(3, samples=1, graders=2, reward=reward, select=lambda group: group) as stage:
        for rollout in list(stage.rollouts.held):
            rollout.end(1.0)
        await settle()
        assert len(reward.asked) == 2
        gate.release()
    assert len(reward.asked) == 3


# The journal


class Life:
    """A process of a run of one group of two: what it samples is noted in `sampled`."""

    def __init__(self, folder, reward, ends=(1.0, 2.0)):
        self.journal = Journal(folder)
        self.reward, self.ends = reward, ends
        self.sampled, self.out = [], []

    async def run(self, prompt, sample, group, *, tally, log):
        """Stands for `Rollouts`."""
        if self.ends[sample] is None:
            await asyncio.Event().wait()
        self.sampled.append(sample)
        tally.tokens += 4
        return replace(a_trajectory(sample, prompt=prompt), text=str(self.ends[sample]))

    async def live(self):
        async def source(inbox, outbox):
            await outbox.put(AdmittedPrompt(prompt=self.journal.draw(0, 0, iter([a_prompt()])), lease=0))

        async def sink(inbox, outbox):
            self.out.extend([group async for group in inbox])

        config = GroupConfig(samples=2)
        stage = groups(self, self.reward, lambda group: group, iter(()), config, timeline(), self.journal)
        stages = [("source", source), ("groups", stage), ("sink", sink)]
        await Pipeline([Stage(name=name, run=run) for name, run in stages]).run()
        [group] = self.out
        return group

    async def die_when(self, reached):
        """Lives until `reached` is set, and is cut off there."""
        task = asyncio.create_task(self.live())
        await reached.wait()
        task.cancel()
        await asyncio.wait([task])
        self.journal.close()


async def test_what_waited_for_its_grade_is_graded_after_a_resume_and_not_sampled_again(tmp_path):
    gate = Gate()
    first = Life(tmp_path, Ranked(gate))
    await first.die_when(gate.started)
    assert first.sampled == [0, 1]
    second = Life(tmp_path, Ranked())
    group = await second.live()
    assert second.sampled == []
    assert second.reward.asked == [[0, 1]]
    assert [member.reward for member in group.trajectories] == [0.0, 0.5]
    assert [member.prompt.id for member in group.trajectories] == ["p0", "p0"]


async def test_a_member_that_ended_before_the_others_is_not_sampled_again(tmp_path):
    first = Life(tmp_path, Ranked(), ends=(None, 2.0))
    task = asyncio.create_task(first.live())
    await settle()
    task.cancel()
    await asyncio.wait([task])
    first.journal.close()
    assert first.sampled == [1]
    second = Life(tmp_path, Ranked())
    group = await second.live()
    assert second.sampled == [0]
    assert [member.reward for member in group.trajectories] == [0.0, 0.5]


async def test_a_group_that_was_decided_is_not_graded_again(tmp_path):
    wanted = await Life(tmp_path, Ranked()).live()
    second = Life(tmp_path, Ranked())
    group = await second.live()
    assert (second.sampled, second.reward.asked) == ([], [])
    assert [member.reward for member in group.trajectories] == [member.reward for member in wanted.trajectories]
    for one, other in zip(group.trajectories, wanted.trajectories, strict=True):
        np.testing.assert_array_equal(one.token_ids_T, other.token_ids_T)
        np.testing.assert_array_equal(one.logprobs_T, other.logprobs_T)


async def test_a_run_that_goes_on_with_a_reward_of_trajectories_grades_what_waited(tmp_path):
    gate = Gate()
    await Life(tmp_path, Ranked(gate)).die_when(gate.started)

    async def alone(trajectory):
        return float(trajectory.text)

    second = Life(tmp_path, alone)
    group = await second.live()
    assert second.sampled == []
    assert [member.reward for member in group.trajectories] == [1.0, 2.0]


async def test_scores_are_read_back_from_a_journal(tmp_path):
    async def scored(trajectory):
        return Grade(reward=1.0, scores={"style": np.float32(0.5), "words": None})

    first = await Life(tmp_path, scored).live()
    second = await Life(tmp_path, scored).live()
    assert first.trajectories[0].scores == second.trajectories[0].scores == {"style": 0.5, "words": None}


# What is reported


def test_scores_are_reported_by_name_and_those_that_are_missing_are_counted():
    members = [
        replace(a_trajectory(0, reward=1.0), scores={"style": 0.5, "words": None}),
        replace(a_trajectory(1, reward=0.0), scores={"style": 1.5, "words": None}),
        a_trajectory(2, error=LOST),
    ]
    found = metrics.scores("score/*", "score_missing/*", members)
    assert found == {"score/style": 1.0, "score_missing/words": 2}
    assert metrics.evaluation(members)["eval/score/style"] == 1.0
