"""A teacher scores each turn as soon as it is whole, and never makes a score up."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from engine.replica.port import ReplicaDied
from engine.run.journal import Journal
from engine.teacher.teacher import Teacher, TeacherLost
from engine.types import Boundary, Group, RolloutError, Segment, StopReason, TokenScores
from tests.support.fakes import Gate, Replicas, ScriptedRunner, a_prompt, a_trajectory, fleet_of, logprob_of, settle
from tests.support.node import ANSWER, END, Setup, call


class Scorer(Gate):
    """Gives token t the log-probability -t / 8; waits until it is released if it is told to hold."""

    def __init__(self, hold=False):
        super().__init__()
        self.asked = []
        self.hold = hold
        self.error = None

    async def score(self, token_ids, start, top=0):
        self.asked.append((list(token_ids), start))
        if self.hold:
            await self.passed()
        if self.error is not None:
            raise self.error
        ids = np.asarray(token_ids[start:], np.int32)
        return TokenScores(
            logprobs_T=(-ids / 8).astype(np.float32),
            top=top,
            top_ids=np.tile(np.arange(top, dtype=np.int32), len(ids)),
            top_logprobs=np.zeros(top * len(ids), np.float32),
        )


def teacher_of(scorer, **options):
    return Teacher(scorer, **{"name": "t", "top": 0, "deadline_s": 60.0, "tokens": 1000, "known": 1000, **options})


def check(part):
    """The sampled tokens have the scores of the scorer, the others none."""
    scores = part.teacher.logprobs_T
    np.testing.assert_array_equal(scores[part.sampled_T], (-part.token_ids_T[part.sampled_T] / 8).astype(np.float32))
    assert np.isnan(scores[~part.sampled_T]).all()


async def test_each_turn_is_scored_once_by_the_tokens_up_to_its_end():
    scorer = Scorer()
    async with Setup([call("1") + END], [ANSWER]) as node:
        trajectory = await teacher_of(scorer, top=2).scores(node.rollouts).run(a_prompt(), 0, 0)
    check(trajectory)
    ids = trajectory.token_ids_T.tolist()
    assert scorer.asked == [(ids[: turn.end], turn.start) for turn in trajectory.turns]
    ids_TK, _ = trajectory.teacher.top_TK
    assert ids_TK[trajectory.sampled_T].tolist() == [[0, 1]] * trajectory.sampled_tokens


async def test_a_turn_is_scored_before_its_tool_has_answered():
    scorer, runner = Scorer(), ScriptedRunner(hold=True)
    async with Setup([call("1") + END], [ANSWER], runner=runner) as node:
        running = asyncio.create_task(teacher_of(scorer).scores(node.rollouts).run(a_prompt(), 0, 0))
        await runner.started.wait()
        await settle()
        assert len(scorer.asked) == 1
        runner.release()
        check(await running)


async def test_turns_that_a_journal_held_are_scored_too(tmp_path):
    scorer, journal = Scorer(), Journal(tmp_path)
    async with Setup([call("1") + END], [ANSWER]) as node:
        prompt = journal.draw(0, 0, iter([a_prompt()]))
        whole = await node.rollouts.run(
            prompt, 0, 0, log=journal.log(0, 0, 0)
        )  # its turns are on the disk, its end is not
    async with Setup([call("1") + END], [ANSWER]) as node:
        resumed = Journal(tmp_path).log(0, 0, 0)
        trajectory = await teacher_of(scorer).scores(node.rollouts).run(prompt, 0, 0, log=resumed)
    check(trajectory)
    assert sorted(start for _, start in scorer.asked) == [turn.start for turn in whole.turns]


class Fixed:
    """Rollouts that give one trajectory."""

    tokens_sampled = 0

    def __init__(self, trajectory, turn_ended=()):
        self.trajectory = trajectory
        self.turn_ended = turn_ended

    async def run(self, prompt, sample, group, *, tally=None, log=None):
        for ids, start in self.turn_ended:
            tally.turn_ended(ids, start)
        await settle()
        return self.trajectory


def a_segment(turns):
    return Segment(
        token_ids_T=np.arange(40, 48, dtype=np.int32),
        sampled_T=np.arange(8) >= 5,
        logprobs_T=np.zeros(8, np.float32),
        versions_T=np.zeros(8, np.int32),
        turns=turns,
    )


async def test_segments_of_an_agent_have_scores_of_their_own():
    main = a_trajectory(0, reward=None)
    segment = a_segment((replace(main.turns[0], start=5, end=8),))
    scorer = Scorer()
    trajectory = await teacher_of(scorer).scores(Fixed(replace(main, segments=(segment,)))).run(a_prompt(), 0, 0)
    for part in trajectory.parts:
        check(part)
    assert (list(range(40, 48)), 5) in scorer.asked


async def test_a_trajectory_that_failed_has_no_scores_and_waits_for_none():
    error = RolloutError(boundary=Boundary.REPLICA, message="died")
    failed = replace(a_trajectory(0, reward=None), error=error, stop=StopReason.ERROR)
    scorer = Scorer(hold=True)
    rollouts = teacher_of(scorer).scores(Fixed(failed, turn_ended=[([1, 2, 3], 1)]))
    assert (await rollouts.run(a_prompt(), 0, 0)).teacher is None
    assert len(scorer.asked) == 1


async def test_a_turn_that_began_again_is_not_waited_for():
    main = a_trajectory(0, reward=None)
    scorer = Scorer()
    rollouts = teacher_of(scorer).scores(Fixed(main, turn_ended=[([9, 9, 9], 1)]))
    check(await rollouts.run(a_prompt(), 0, 0))
    assert scorer.asked[0] == ([9, 9, 9], 1)


@pytest.mark.parametrize("error", [ReplicaDied("replica 0: gone"), ValueError("too long")], ids=["died", "refused"])
async def test_a_teacher_that_cannot_score_ends_the_run_with_its_reason(error):
    scorer = Scorer()
    scorer.error = error
    with pytest.raises(TeacherLost, match=str(error)):
        await teacher_of(scorer).scores(Fixed(a_trajectory(0, reward=None))).run(a_prompt(), 0, 0)


async def test_a_silent_teacher_ends_the_run_at_its_deadline_and_stops_the_rollout():
    scorer = Scorer(hold=True)
    async with Setup([call("1") + END], [ANSWER], runner=ScriptedRunner(hold=True)) as node:
        with pytest.raises(TeacherLost, match=r"no scores within 0\.01 s.*teacher_deadline_s"):
            await teacher_of(scorer, deadline_s=0.01).scores(node.rollouts).run(a_prompt(), 0, 0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
async def test_a_number_that_is_none_is_refused_with_its_place(value):
    class Broken(Scorer):
        async def score(self, token_ids, start, top=0):
            return TokenScores(logprobs_T=np.full(len(token_ids) - start, value, np.float32))

    with pytest.raises(TeacherLost, match=f"token 2 of 4 is {value}"):
        await teacher_of(Broken()).score([1, 2, 3, 4], 2)


async def test_a_likely_token_that_the_student_lacks_is_refused():
    with pytest.raises(TeacherLost, match="id 3 among its likeliest"):
        await teacher_of(Scorer(), top=4, tokens=3).score([1, 2, 3, 4], 2)


async def test_a_trajectory_with_a_token_that_only_pads_has_failed_and_is_not_scored():
    scorer = Scorer()
    async with Setup([call("1") + END], [ANSWER]) as node:
        whole = await node.rollouts.run(a_prompt(), 0, 0)
    last = whole.turns[-1]
    highest = int(whole.token_ids_T[last.start : last.end].max())
    async with Setup([call("1") + END], [ANSWER]) as node:
        trajectory = await teacher_of(scorer, known=highest).scores(node.rollouts).run(a_prompt(), 0, 0)
    assert trajectory.stop is StopReason.ERROR
    assert f"id {whole.token_ids_T.max()}, which only pads" in trajectory.error.message
    assert trajectory.teacher is None
    assert all(max(ids) < highest for ids, _ in scorer.asked)


async def test_a_teachers_replica_that_dies_is_replaced_and_the_turn_is_scored_again():
    replicas = Replicas()
    async with fleet_of(replicas, 1) as fleet:
        gate = replicas.made[0].score_gate = Gate()
        scoring = asyncio.create_task(teacher_of(fleet).score([5, 6, 7], 1))
        await gate.started.wait()
        replicas.made[0].die()
        gate.release()
        scores = await scoring
        assert scores.logprobs_T.tolist() == pytest.approx([logprob_of(6), logprob_of(7)])
        assert [len(replica.scored) for replica in replicas.made] == [1, 1]
        assert fleet.deaths == 1


async def test_a_sequence_that_kills_two_replicas_ends_the_run():
    def prepare(replica):
        replica.score_gate = Gate()
        replica.score_gate.release()
        replica.dies_of_scoring = True

    replicas = Replicas(prepare)
    async with fleet_of(replicas, 1) as fleet:
        with pytest.raises(TeacherLost, match="2 replicas died"):
            await teacher_of(fleet).score([5, 6, 7], 1)


async def test_a_teacher_without_a_replica_left_ends_the_run():
    replicas = Replicas()

    async def run():
        async with fleet_of(replicas, 1, restarts=0) as fleet:
            replicas.made[0].score_gate = Gate()
            scoring = asyncio.create_task(teacher_of(fleet).score([5, 6, 7], 1))
            await replicas.made[0].score_gate.started.wait()
            replicas.made[0].die()
            replicas.made[0].score_gate.release()
            await scoring

    with pytest.raises((ReplicaDied, TeacherLost), match="no replica is left"):
        await run()


@pytest.mark.parametrize(("start", "top", "named"), [(0, 0, "start"), (4, 0, "start"), (1, 21, "top"), (1, -1, "top")])
async def test_what_cannot_be_scored_is_refused_by_name(start, top, named):
    async with fleet_of(Replicas(), 1) as fleet:
        with pytest.raises(ValueError, match=f"{named} must be from"):
            await fleet.score([1, 2, 3], start, top)


async def test_nothing_to_score_is_not_asked():
    replicas = Replicas()
    async with fleet_of(replicas, 1) as fleet:
        assert len((await fleet.score([1, 2, 3], 3)).logprobs_T) == 0
    assert replicas.made[0].scored == []


def test_a_run_measures_what_was_scored_and_leaves_the_rest_out():
    main = a_trajectory(0, reward=1.0, sampled=4)
    tokens = TokenScores.none(len(main.token_ids_T), 0)
    gaps = np.array([0.5, -0.5, 3.0, 1.0])
    at = np.flatnonzero(main.sampled_T)[0]
    teacher = TokenScores(logprobs_T=(main.logprobs_T[main.sampled_T] - gaps).astype(np.float32))
    scored = replace(main, teacher=tokens.placed(teacher, at))
    group = Group(prompt=a_prompt(), trajectories=(scored,), lease=0)
    found = teacher_of(Scorer()).measured([group], clip=2.0)
    assert found["distill/kl"] == pytest.approx(1.0)
    assert (found["distill/clipped"], found["distill/tokens"]) == (0.25, 4)
    assert not found.keys() & {"distill/teacher_s", "distill/overlap"}, "no second of scoring was measured here"
    assert teacher_of(Scorer()).measured([replace(group, trajectories=(main,))], clip=2.0) == {}


def test_where_nothing_is_clipped_no_share_of_it_is_reported():
    main = a_trajectory(0, reward=1.0, sampled=4)
    scored = replace(main, teacher=replace(TokenScores.none(len(main.token_ids_T), 0), logprobs_T=main.logprobs_T))
    group = Group(prompt=a_prompt(), trajectories=(scored,), lease=0)
    row = teacher_of(Scorer()).measured([group])
    assert "distill/kl" in row
    assert "distill/clipped" not in row
