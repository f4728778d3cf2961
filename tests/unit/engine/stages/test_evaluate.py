"""Evaluation: all held-out prompts under one version, beside training, and loud when it fails."""

import asyncio
import os
from contextlib import AsyncExitStack

import numpy as np
import pytest

from algo.eval_stats import avg_at_k
from engine.fleet.canary import CanaryFailed
from engine.ports import GraderUnavailable
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.stages.evaluate import Evaluation, Evaluator
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights
from tests.support.fakes import Clock, Gate, Replicas, SlowReward, a_prompt, conversation, fleet_of, settle
from tests.support.node import ANSWER, CHAT

PROMPTS = [a_prompt(0, "problem 0"), a_prompt(1, "problem 1")]


async def even(trajectory):
    return float((trajectory.prompt.id == "p0") == (trajectory.sample == 0))


class Setup:
    """Scripted replicas, an evaluation of PROMPTS x samples on them, and the evaluator."""

    def __init__(self, folder, samples=2, prepare=lambda replica: None, turns=(ANSWER,), reward=even, waiting=2):
        self.learner, self.pins = folder / "learner", folder / "pins"
        self.learner.mkdir(), self.pins.mkdir()
        timeline = Timeline(Clock(tick=0.001))
        self.replicas = Replicas(prepare, chat=CHAT, script=conversation(CHAT, list(turns)))
        self.fleet = fleet_of(self.replicas, timeline=timeline, canary=[[1, 2, 3, 4]])
        rollouts = Rollouts(RolloutConfig(max_tokens=400), CHAT, self.fleet, [], timeline, seed=3)
        self.evaluation = Evaluation(PROMPTS, samples, rollouts, reward, avg_at_k, timeline)
        self.done = []
        self.evaluator = Evaluator(
            self.evaluation, self.fleet, lambda *found: self.done.append(found), self.pins, waiting
        )

    async def __aenter__(self):
        self._stack = AsyncExitStack()
        self._stack.callback(self._check)
        await self._stack.enter_async_context(self.fleet)
        await self._stack.enter_async_context(self.evaluator)
        return self

    async def __aexit__(self, *error):
        await self._stack.__aexit__(*error)

    def _check(self):
        assert list(self.pins.iterdir()) == [], "no weights are left pinned"

    def weights(self, version, canary=0.0):
        path = self.learner / f"weights-{version}"
        path.write_bytes(b"")
        return PublishedWeights(str(path), version, np.full(3, canary, np.float32))

    def submit(self, version, canary=0.0):
        """The learner removes the file at once."""
        self.evaluator.submit(version, weights := self.weights(version, canary))
        os.unlink(weights.path)


async def evaluate_once(folder, canary=0.0, **options):
    async with Setup(folder, **options) as node:
        node.submit(1, canary)
        await node.evaluator.drain()


async def test_an_evaluation_is_pinned_to_its_version_and_repeats_its_seeds(tmp_path):
    async with Setup(tmp_path) as node:
        node.submit(3)
        await node.evaluator.drain()
        node.submit(5)
        await node.evaluator.drain()
        (step, metrics, first), (_, _, second) = node.done
        assert (step, metrics["eval/accuracy"], metrics["eval/n"], metrics["eval/k"]) == (3, 0.5, 4, 2)
        assert metrics["eval/accuracy_low"] < 0.5 < metrics["eval/accuracy_high"]
        order = [(member.prompt.id, member.sample) for member in first]
        assert order == [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)]
        assert [set(member.versions_T[member.sampled_T]) for member in (first[0], second[0])] == [{3}, {5}]
        assert [member.seed for member in first] == [member.seed for member in second]


async def test_an_evaluation_keeps_no_routes(tmp_path):
    def prepare(replica):
        replica.returns_routes = True

    async with Setup(tmp_path, prepare=prepare) as node:
        node.submit(3)
        await node.evaluator.drain()
    [(_, _, trajectories)] = node.done
    assert [member.routes for member in trajectories] == [None] * 4


async def test_what_is_submitted_meanwhile_waits_and_the_oldest_makes_room(tmp_path):
    gate = Gate()
    async with Setup(tmp_path, turns=(gate, ANSWER), samples=1) as node:
        for version in (1, 2, 3, 4):
            node.submit(version)
            await settle()  # the first one is under way
        gate.release()
        await node.evaluator.drain()
        assert [step for step, *_ in node.done] == [1, 3, 4]


async def test_a_replica_that_dies_during_an_evaluation_gets_its_weights_again(tmp_path):
    gate = Gate()
    async with Setup(tmp_path, turns=(gate, ANSWER), samples=1) as node:
        node.submit(1)
        await gate.started.wait()
        node.replicas.made[0].die()
        await settle()
        gate.release()
        await node.evaluator.drain()
        (path, version) = node.replicas.made[1].weights[-1]
        assert version == 1
        assert path in map(str, node.pins.iterdir())
        assert [step for step, *_ in node.done] == [1]


async def test_a_token_of_another_version_ends_the_owner(tmp_path):
    def prepare(replica):
        replica.engine_version = 7

    with pytest.raises(RuntimeError, match=r"evaluation of version 1: p0 has tokens of \{7\}"):
        await evaluate_once(tmp_path, prepare=prepare)


async def test_weights_that_fail_the_canary_end_the_owner(tmp_path):
    with pytest.raises(CanaryFailed, match="weight update 1"):
        await evaluate_once(tmp_path, canary=0.5)


async def test_no_graded_problem_at_all_is_an_error(tmp_path):
    async def gone(trajectory):
        raise GraderUnavailable("the verifier died")

    with pytest.raises(RuntimeError, match=r"no problem was graded .*the verifier died"):
        await evaluate_once(tmp_path, reward=gone)


async def test_a_problem_that_our_infrastructure_failed_does_not_count(tmp_path):
    async def partly(trajectory):
        if trajectory.prompt.id == "p0" and trajectory.sample == 1:
            raise GraderUnavailable("the verifier died")
        return 1.0

    async with Setup(tmp_path, reward=partly) as node:
        node.submit(1)
        await node.evaluator.drain()
        assert node.done[0][1]["eval/accuracy"] == 1.0
        assert node.done[0][1]["eval/n"] == 3, "graded trajectories"


async def test_between_the_steps_it_gives_the_same(tmp_path):
    async with Setup(tmp_path) as node:
        node.submit(3)
        await node.evaluator.drain()
        metrics, trajectories = await node.evaluation.run(3)
        _, theirs, beside = node.done[0]
        assert {**metrics, "time/eval_s": 0} == {**theirs, "time/eval_s": 0}
        for one, other in zip(trajectories, beside, strict=True):
            np.testing.assert_array_equal(one.token_ids_T, other.token_ids_T)


async def test_so_many_are_graded_at_once(tmp_path):
    """Each grade has a deadline: what waits for a busy grader would miss it, and its problem would not count."""
    slow = SlowReward(even)
    async with Setup(tmp_path, samples=6, reward=slow) as node:
        node.submit(1)
        await settle(500)
        assert slow.running == 8
        slow.release()
        await node.evaluator.drain()
    assert slow.most == 8
    assert node.done[0][1]["eval/n"] == 12


class First:
    """The first sample of each problem is right. asked: the samples of each problem that it saw."""

    sees_group = True

    def __init__(self, gone=()):
        self.gone = gone
        self.asked = []
        self.running = self.most = 0
        self.gate = Gate()

    async def __call__(self, trajectories):
        prompt = trajectories[0].prompt.id
        self.asked.append((prompt, [member.sample for member in trajectories]))
        self.running += 1
        self.most = max(self.most, self.running)
        await self.gate.passed()
        self.running -= 1
        if prompt in self.gone:
            raise GraderUnavailable("the judge died")
        return [float(member.sample == 0) for member in trajectories]


async def test_the_samples_of_a_problem_are_graded_together_by_a_reward_of_groups(tmp_path):
    reward = First()
    reward.gate.release()
    async with Setup(tmp_path, samples=3, reward=reward) as node:
        metrics, trajectories = await node.evaluation.run(0)
    assert sorted(reward.asked) == [("p0", [0, 1, 2]), ("p1", [0, 1, 2])]
    assert [member.reward for member in trajectories] == [1.0, 0.0, 0.0] * 2
    assert (metrics["eval/accuracy"], metrics["eval/n"]) == (pytest.approx(1 / 3), 6)


async def test_a_problem_whose_group_could_not_be_graded_does_not_count(tmp_path):
    reward = First(gone=("p1",))
    reward.gate.release()
    async with Setup(tmp_path, samples=2, reward=reward) as node:
        metrics, _ = await node.evaluation.run(0)
    assert (metrics["eval/accuracy"], metrics["eval/n"]) == (0.5, 2)


async def test_so_many_problems_are_graded_together_at_once(tmp_path):
    reward = First()
    async with Setup(tmp_path, samples=1, reward=reward) as node:
        node.evaluation = Evaluation(
            PROMPTS, 1, node.evaluation._rollouts, reward, avg_at_k, node.evaluation._timeline, graders=1
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(node.evaluation.run(0))
            await reward.gate.started.wait()
            await settle()
            reward.gate.release()
    assert (reward.most, len(reward.asked)) == (1, 2)


async def test_a_grade_of_an_evaluation_has_the_deadline_that_it_was_given(tmp_path):
    async def hangs(trajectory):
        await asyncio.Event().wait()

    async with Setup(tmp_path, samples=1) as node:
        parts = node.evaluation._rollouts, hangs, avg_at_k, node.evaluation._timeline
        with pytest.raises(RuntimeError, match=r"no problem was graded .*0\.01 s"):
            await Evaluation(PROMPTS, 1, *parts, grade_deadline_s=0.01).run(0)


@pytest.mark.parametrize(("samples", "waiting"), [(0, 2), (1, 0)])
def test_nothing_to_evaluate_is_refused(tmp_path, samples, waiting):
    with pytest.raises(ValueError, match="at least 1, got"):
        Setup(tmp_path, samples=samples, waiting=waiting)
