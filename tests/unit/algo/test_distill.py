"""From a teacher's scores to what the learner gets."""

from dataclasses import replace

import numpy as np
import pytest

from algo.distill import distilled, token_advantages
from algo.group.batch import select_and_score
from algo.group.selection import KeepAll
from engine.types import Group, Segment, TokenScores
from tests.support.fakes import a_prompt, a_trajectory


def scored(part, values, top=0):
    """The part with a teacher that gives its sampled tokens these log-probabilities, in turn."""
    tokens = len(part.token_ids_T)
    logprobs_T = np.full(tokens, np.nan, np.float32)
    logprobs_T[part.sampled_T] = np.resize(values, part.sampled_T.sum())
    ids = np.tile(np.arange(top, dtype=np.int32), tokens)
    scores = TokenScores(logprobs_T=logprobs_T, top=top, top_ids=ids, top_logprobs=-ids.astype(np.float32))
    return replace(part, teacher=scores)


def a_group(rewards=(1.0, 0.0), values=(-2.0, -0.5), top=0, **changes):
    members = tuple(
        scored(a_trajectory(sample, prompt=a_prompt(0), reward=reward, sampled=4), values, top)
        for sample, reward in enumerate(rewards)
    )
    group = Group(prompt=a_prompt(0), trajectories=members, lease=0)
    return replace(select_and_score(KeepAll(), 0, keep_flat=True)(group), **changes)


def test_each_sampled_token_has_the_teachers_advantage_and_no_other_token_has_one():
    group = a_group()
    batch = distilled(1, [group])
    first = group.trajectories[0]
    wanted = np.where(first.sampled_T, np.nan_to_num(first.teacher.logprobs_T) - first.logprobs_T, 0.0)
    np.testing.assert_allclose(batch.token_advantages_N[: len(wanted)], wanted, rtol=1e-6)
    assert not batch.token_advantages_N[~batch.sampled_N].any()
    assert not batch.advantages_B.any(), "the reward has no weight"


def test_an_advantage_is_clipped_on_both_sides():
    sampled_T = np.array([True, True, True, False])
    found = token_advantages(np.float32([-9, -1, -2, np.nan]), np.float32([-1, -9, -1, 0]), sampled_T, clip=2.0)
    assert found.tolist() == [-2.0, 2.0, -1.0, 0.0]


def test_the_reward_is_mixed_in_by_its_weight():
    alone, mixed = distilled(1, [a_group()], reward_weight=1.0), distilled(1, [a_group()], reward_weight=0.25)
    assert alone.advantages_B.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert mixed.advantages_B.tolist() == pytest.approx((0.25 * alone.advantages_B).tolist())
    assert mixed.token_advantages_N.tolist() == alone.token_advantages_N.tolist()


def test_a_group_of_equal_rewards_is_still_learnt_from():
    group = a_group(rewards=(1.0, 1.0))
    assert (group.kept, group.drop) == ((0, 1), None)
    assert distilled(1, [group], reward_weight=1.0).token_advantages_N.any()
    assert select_and_score(KeepAll(), 0)(replace(group, kept=())).drop == "flat", "elsewhere it is dropped as ever"


def test_the_teachers_likeliest_tokens_take_the_place_of_the_advantage():
    batch = distilled(1, [a_group(top=3)], top=3)
    assert batch.token_advantages_N is None
    assert batch.teacher_ids_NK.shape == batch.teacher_logprobs_NK.shape == (len(batch.token_ids_N), 3)
    assert batch.teacher_ids_NK[0].tolist() == [0, 1, 2]


def test_segments_of_an_agent_have_advantages_of_their_own():
    segment = Segment(
        token_ids_T=np.arange(5, dtype=np.int32),
        sampled_T=np.arange(5) > 2,
        logprobs_T=np.full(5, -1, np.float32),
        versions_T=np.zeros(5, np.int32),
    )
    main = a_group().trajectories[0]
    group = a_group(
        trajectories=(replace(main, segments=(scored(segment, [-3.0]),)),), kept=(0,), advantages_K=np.zeros(1)
    )
    assert distilled(1, [group]).token_advantages_N[-5:].tolist() == [0, 0, 0, -2, -2]


@pytest.mark.parametrize("teacher", [None, TokenScores.none(7, 0)], ids=["no teacher", "not all tokens"])
def test_what_no_teacher_has_scored_is_refused_and_never_a_zero(teacher):
    main = a_group().trajectories[0]
    teacher = None if teacher is None else TokenScores.none(len(main.token_ids_T), 0)
    group = a_group(trajectories=(replace(main, teacher=teacher),), kept=(0,), advantages_K=np.zeros(1))
    with pytest.raises(ValueError, match="scores of a teacher"):
        distilled(1, [group])
    with pytest.raises(ValueError, match="top=5"):
        distilled(1, [a_group(top=3)], top=5)


def test_a_step_without_anything_to_train_is_an_empty_batch():
    batch = distilled(1, [a_group(kept=(), advantages_K=None, drop="error")])
    assert len(batch.token_ids_N) == 0
    assert "token_advantages_N" not in batch.arrays()
