import numpy as np
import pytest
from algo_fakes import batch
from hypothesis import given, settings
from hypothesis import strategies as st

from algo.pack import plan
from engine.types import Batch

arguments = st.fixed_dictionaries(
    {
        "minibatches": st.integers(1, 4),
        "micro_batch_tokens": st.integers(1, 400),
        "ranks": st.integers(1, 3),
        "seed": st.integers(0, 9),
    }
)


def seen(minibatches):
    """(input id before the target, target, old logprob, advantage) of every position with loss, sorted."""
    found = []
    for minibatch in minibatches:
        for micro in (micro for rank in minibatch.ranks for micro in rank):
            before = micro.token_ids_RL.reshape(-1)[micro.positions_M]
            found += zip(before, micro.targets_M, micro.old_logprobs_M, micro.advantages_M, strict=True)
    return sorted((int(a), int(b), float(c), float(d)) for a, b, c, d in found)


def expected(whole: Batch):
    starts = np.cumsum(whole.lengths_B) - whole.lengths_B
    targets = np.setdiff1d(np.flatnonzero(whole.sampled_N), starts)
    advantages_N = np.repeat(whole.advantages_B, whole.lengths_B)
    columns = (whole.token_ids_N[targets - 1], whole.token_ids_N[targets])
    floats = (whole.logprobs_N[targets], advantages_N[targets])
    return sorted((int(a), int(b), float(c), float(d)) for a, b, c, d in zip(*columns, *floats, strict=True))


@settings(max_examples=60)
@given(st.integers(0, 20), arguments)
def test_every_sampled_token_is_a_target_exactly_once(trajectories, options):
    whole = batch(trajectories)
    minibatches = plan(whole, **options)
    assert seen(minibatches) == expected(whole)
    assert len(minibatches) == min(options["minibatches"], trajectories)
    for minibatch in minibatches:
        micros = [micro for rank in minibatch.ranks for micro in rank]
        assert minibatch.loss_tokens == sum(len(micro.targets_M) for micro in micros)
        assert len({len(rank) for rank in minibatch.ranks}) == 1
        assert len(minibatch.ranks) == options["ranks"]
        assert 0.0 <= minibatch.padding_waste < 1.0
        for micro in micros:
            assert micro.token_ids_RL.size <= options["micro_batch_tokens"] or len(micro.token_ids_RL) == 1


def test_plan_is_seeded_by_run_and_step():
    options = {"minibatches": 2, "micro_batch_tokens": 64, "ranks": 1}
    first, again = plan(batch(16), seed=1, **options), plan(batch(16), seed=1, **options)
    other = plan(batch(16), seed=2, **options)
    assert [seen([m]) for m in first] == [seen([m]) for m in again]
    assert [seen([m]) for m in first] != [seen([m]) for m in other]


def test_ranks_get_balanced_shares_and_little_padding():
    (minibatch,) = plan(batch(64, longest=120), minibatches=1, micro_batch_tokens=2000, ranks=2, seed=0)
    first, second = (sum(micro.tokens for micro in rank) for rank in minibatch.ranks)
    assert first == pytest.approx(second, rel=0.02)
    assert minibatch.padding_waste < 0.08


def test_trajectories_without_a_target_are_left_out():
    whole = batch(3)
    nothing = Batch(step=0, **(whole.arrays() | {"sampled_N": np.zeros_like(whole.sampled_N)}))
    assert plan(nothing, minibatches=2, micro_batch_tokens=64, ranks=2, seed=0) == []
