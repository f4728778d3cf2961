"""The buffer of a trajectory: what comes out is what went in, token by token, however it was cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.replica.port import Delta
from engine.rollout.token_buffer import TokenBuffer

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
deltas = st.tuples(ids, st.integers(0, 3), st.lists(st.booleans(), min_size=6, max_size=6) | st.none())
pieces = st.lists(st.one_of(st.tuples(st.just("given"), ids), st.tuples(st.just("sampled"), deltas)), max_size=12)


@given(prompt=ids, pieces=pieces)
def test_every_token_keeps_its_id_origin_logprob_and_version(prompt, pieces):
    buffer = TokenBuffer(prompt)
    rows = [(token, False, 0.0, -1) for token in prompt]
    for kind, piece in pieces:
        if kind == "given":
            buffer.append_given(piece)
            rows += [(token, False, 0.0, -1) for token in piece]
        else:
            tokens, version, marks = piece
            forced = () if marks is None else marks[: len(tokens)]
            buffer.append_sampled(Delta(tokens, [-token / 7 for token in tokens], version=version, forced=forced))
            rows += [
                (token, False, 0.0, -1) if at < len(forced) and forced[at] else (token, True, -token / 7, version)
                for at, token in enumerate(tokens)
            ]
        assert len(buffer) == len(rows)
        assert list(buffer.ids) == [row[0] for row in rows]
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    found = buffer.arrays().values()
    assert [column.dtype for column in found] == [np.int32, np.bool_, np.float32, np.int32]
    for column, wanted in zip(found, columns, strict=True):
        np.testing.assert_array_equal(column, np.asarray(wanted, column.dtype))


def test_exact_versions_override_those_of_the_deltas_and_only_there():
    buffer = TokenBuffer([1])
    buffer.append_sampled(Delta([2, 3, 4], [-1.0] * 3, version=0))
    buffer.label(5, 2, 4)
    buffer.append_given([9, 9])
    buffer.append_sampled(Delta([6], [-1.0], version=0))
    buffer.append_sampled(Delta([7], [-1.0], version=6))
    assert buffer.arrays()["versions_T"].tolist() == [-1, 0, 5, 5, -1, -1, 0, 6]


def test_exact_versions_leave_forced_tokens_given():
    buffer = TokenBuffer([1])
    buffer.append_sampled(Delta([2, 3, 4], [-1.0, -2.0, -3.0], version=0, forced=[False, True, False]))
    buffer.label(5, 1, 4)
    found = buffer.arrays()
    assert found["sampled_T"].tolist() == [False, True, False, True]
    assert found["logprobs_T"].tolist() == [0.0, -1.0, 0.0, -3.0]
    assert found["versions_T"].tolist() == [-1, 5, -1, 5]
    again = TokenBuffer.of(**{"ids_T" if name == "token_ids_T" else name: array for name, array in found.items()})
    for name, array in again.arrays().items():
        np.testing.assert_array_equal(array, found[name])


def test_a_token_without_its_logprob_is_a_bug():
    with pytest.raises(AssertionError):
        TokenBuffer([1]).append_sampled(Delta([2, 3], [-1.0]))
