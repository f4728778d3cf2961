"""Scores of tokens: parts are put in their places, and a batch takes them over the wire."""

import numpy as np
import pytest

from engine.learner.messages import Train, pack, unpack_request
from engine.types import Batch, TokenScores
from tests.support.algo_fakes import batch


def scores(values, top=0):
    count = len(values)
    return TokenScores(
        logprobs_T=np.float32(values),
        top=top,
        top_ids=np.arange(count * top, dtype=np.int32),
        top_logprobs=-np.arange(count * top, dtype=np.float32),
    )


def test_parts_are_put_where_they_begin_and_nothing_else_is_scored():
    whole = TokenScores.none(6, 2).placed(scores([-1, -2], top=2), 1).placed(scores([-3], top=2), 5)
    assert np.array_equal(whole.logprobs_T, np.float32([np.nan, -1, -2, np.nan, np.nan, -3]), equal_nan=True)
    ids_TK, logprobs_TK = whole.top_TK
    assert ids_TK.tolist() == [[-1, -1], [0, 1], [2, 3], [-1, -1], [-1, -1], [0, 1]]
    assert np.isnan(logprobs_TK[0]).all()


def test_scores_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="read-only"):
        scores([-1.0]).logprobs_T[0] = 0.0


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="top=2 of 1 tokens"):
        TokenScores(logprobs_T=np.zeros(1, np.float32), top=2)


def test_a_batch_with_a_teacher_arrives_at_the_learner_as_it_left():
    plain = batch(3)
    tokens = len(plain.token_ids_N)
    own_N, ids_NK = np.arange(tokens, dtype=np.float32), np.arange(2 * tokens, dtype=np.int32).reshape(tokens, 2)
    taught = Batch.of_arrays(
        0,
        {
            **plain.arrays(),
            "token_advantages_N": own_N,
            "teacher_ids_NK": ids_NK,
            "teacher_logprobs_NK": own_N[:, None],
        },
    )
    for sent in (plain, taught):
        _, arrays = unpack_request([bytes(frame) for frame in pack(Train(step=0, version=1), sent.arrays())])
        found = Batch.of_arrays(0, arrays)
        assert {name: array.tolist() for name, array in found.arrays().items()} == {
            name: array.tolist() for name, array in sent.arrays().items()
        }
    assert plain.token_advantages_N is None
