import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algo.learner.pack import LEAST_SHARED, plan
from engine.types import Batch
from tests.support.algo_fakes import batch, with_prefix
from tests.support.examples import examples

arguments = st.fixed_dictionaries(
    {
        "minibatches": st.integers(1, 4),
        "micro_batch_tokens": st.integers(1, 400),
        "ranks": st.integers(1, 3),
        "seed": st.integers(0, 9),
    }
)


def numbers(*columns):
    return [tuple(map(float, row)) for row in zip(*columns, strict=True)]


def planned(whole, *, ranks, **options):
    """Returns the minibatches of each rank."""
    return [plan(whole, ranks=ranks, rank=rank, **options) for rank in range(ranks)]


def micros_of(plans):
    return [micro for minibatches in plans for minibatch in minibatches for micro in minibatch.micros if micro.tokens]


def seen(plans):
    """Per trajectory: its inputs and (position, target, old logprob, advantage, version) of its targets; sorted."""
    found = []
    for micro in micros_of(plans):
        ends_S = micro.shared + np.cumsum(micro.lengths_S)
        assert micro.token_ids_RL.shape == micro.position_ids_RL.shape == (1, ends_S[-1])
        for sequence, (length, end) in enumerate(zip(micro.lengths_S, ends_S, strict=True)):
            places = np.concatenate([np.arange(micro.shared), np.arange(end - length, end)])
            assert np.array_equal(micro.position_ids_RL[0, places], np.arange(micro.shared + length))
            own = micro.sequence_M == sequence
            columns = (micro.targets_M, micro.old_logprobs_M, micro.advantages_M, micro.versions_M)
            positions = micro.position_ids_RL[0, micro.positions_M[own]]
            assert np.isin(micro.positions_M[own], places).all()
            inputs = tuple(micro.token_ids_RL[0, places].tolist())
            found.append((inputs, numbers(positions, *(column[own] for column in columns))))
    return sorted(found)


def expected(whole: Batch):
    found = []
    ends_B = np.cumsum(whole.lengths_B)
    for length, end, advantage in zip(whole.lengths_B, ends_B, whole.advantages_B, strict=True):
        ids, logprobs, versions, sampled = (
            array[end - length : end]
            for array in (whole.token_ids_N, whole.logprobs_N, whole.versions_N, whole.sampled_N)
        )
        targets = np.flatnonzero(sampled[1:]) + 1
        advantages = np.full(len(targets), advantage)
        rows = numbers(targets - 1, ids[targets], logprobs[targets], advantages, versions[targets])
        found.append((tuple(ids[: targets[-1]].tolist()), rows))
    return sorted(found)


@examples(60)
@given(st.integers(0, 20), arguments)
def test_every_sampled_token_is_a_target_exactly_once_and_no_trajectory_is_cut(trajectories, options):
    whole = batch(trajectories)
    whole = dataclasses.replace(whole, versions_N=np.arange(len(whole.versions_N), dtype=np.int32))
    plans = planned(whole, **options)
    assert seen(plans) == expected(whole)
    assert {len(minibatches) for minibatches in plans} == {min(options["minibatches"], trajectories)}
    for ranks in zip(*plans, strict=True):
        micros = [micro for minibatch in ranks for micro in minibatch.micros]
        assert len({len(minibatch.micros) for minibatch in ranks}) == 1
        numbers_of_all = {(each.loss_tokens, each.sequences, each.lengths, each.padding_waste) for each in ranks}
        [(loss_tokens, sequences, lengths, padding_waste)] = numbers_of_all
        assert loss_tokens == sum(len(micro.targets_M) for micro in micros)
        assert sequences == sum(micro.sequences for micro in micros if micro.tokens)
        assert list(lengths) == [n for micro in micros if micro.tokens for n in (micro.shared, *micro.lengths_S) if n]
        cells = sum(micro.token_ids_RL.size for micro in micros)
        assert padding_waste == pytest.approx(1 - sum(micro.tokens for micro in micros) / cells)
        for micro in micros:
            assert micro.token_ids_RL.size <= options["micro_batch_tokens"] or micro.sequences == 1


@examples(60)
@given(st.integers(2, 20), st.integers(1, 100), arguments)
def test_a_common_beginning_is_in_a_row_once_and_every_trajectory_still_goes_on_from_it(trajectories, length, options):
    whole = with_prefix(batch(trajectories), list(range(1, 1 + length)))
    plans = planned(whole, share_prefix=True, **options)
    assert seen(plans) == expected(whole)
    micros = micros_of(plans)
    for micro in micros:
        assert micro.shared in (0, length)
        assert micro.tokens <= options["micro_batch_tokens"] or micro.sequences == 1
    if length >= LEAST_SHARED and options["minibatches"] == 1:
        assert all(micro.shared for micro in micros)
    if length < LEAST_SHARED:
        assert not any(micro.shared for micro in micros)


def test_plan_is_seeded_by_run_and_step():
    options = {"minibatches": 2, "micro_batch_tokens": 64, "ranks": 1}
    first, again = plan(batch(16), seed=1, **options), plan(batch(16), seed=1, **options)
    other = plan(batch(16), seed=2, **options)
    assert [seen([[m]]) for m in first] == [seen([[m]]) for m in again]
    assert [seen([[m]]) for m in first] != [seen([[m]]) for m in other]


def test_ranks_get_balanced_shares_of_full_rows_without_padding():
    plans = planned(batch(64, longest=120), minibatches=1, micro_batch_tokens=500, ranks=2, seed=0)
    first, second = (sum(micro.tokens for micro in minibatch.micros) for [minibatch] in plans)
    assert first == pytest.approx(second, rel=0.02)
    for [minibatch] in plans:
        assert minibatch.padding_waste == 0.0
        assert len(minibatch.micros) == -(-sum(micro.tokens for micro in minibatch.micros) // 500)


def test_the_rank_with_fewer_rows_gets_empty_ones():
    [first], [second] = planned(batch(3), minibatches=1, micro_batch_tokens=1, ranks=2, seed=0)
    tokens = sum(micro.tokens for micro in (*first.micros, *second.micros))
    assert len(first.micros) == len(second.micros) == 2
    assert second.micros[1].tokens == 0 or first.micros[1].tokens == 0
    assert first.padding_waste == second.padding_waste == pytest.approx(1 / (tokens + 1))


def test_what_fills_the_parts_of_a_row_counts_as_filler():
    options = {"minibatches": 1, "micro_batch_tokens": 1, "ranks": 2, "seed": 0}
    [[whole], _], [[cut], _] = planned(batch(3), **options), planned(batch(3), parts=8, **options)
    lengths = [length for length in whole.lengths if length]
    fillers = sum(-length % 8 for length in lengths) + 8  # a row of each rank in each pass, one of which is empty
    assert cut.padding_waste == pytest.approx(fillers / (sum(lengths) + fillers))
    assert cut.lengths == whole.lengths


def test_trajectories_without_a_target_are_left_out():
    whole = batch(3)
    nothing = Batch(step=0, **(whole.arrays() | {"sampled_N": np.zeros_like(whole.sampled_N)}))
    assert plan(nothing, minibatches=2, micro_batch_tokens=64, ranks=2, seed=0) == []


@examples(20)
@given(st.integers(1, 12), arguments)
def test_advantages_of_tokens_are_added_to_those_of_their_sequence(trajectories, options):
    whole = batch(trajectories)
    rng = np.random.default_rng(trajectories)
    own_N = rng.normal(size=len(whole.token_ids_N)).astype(np.float32)
    ids_NK = rng.integers(0, 512, (len(own_N), 3)).astype(np.int32)
    taught = dataclasses.replace(
        whole, token_advantages_N=own_N, teacher_ids_NK=ids_NK, teacher_logprobs_NK=-ids_NK.astype(np.float32)
    )
    plain, mixed = (micros_of(planned(each, **options)) for each in (whole, Batch.of_arrays(0, taught.arrays())))
    place = {}  # a token's own advantage by its id and log-probability, which no other token of the batch has
    for at in np.flatnonzero(whole.sampled_N):
        place[int(whole.token_ids_N[at]), float(whole.logprobs_N[at])] = at
    for before, after in zip(plain, mixed, strict=True):
        at_M = [place[key] for key in zip(after.targets_M.tolist(), after.old_logprobs_M.tolist(), strict=True)]
        np.testing.assert_allclose(after.advantages_M, before.advantages_M + own_N[at_M], rtol=1e-6)
        assert (after.teacher_ids_MK == ids_NK[at_M]).all()
        assert (after.teacher_logprobs_MK == -ids_NK[at_M]).all()
        assert before.teacher_ids_MK.shape == (len(before.targets_M), 0)
