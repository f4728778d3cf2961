"""As tests/unit/algo/reward/test_readers.py, with many more texts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.answer_texts import ATOMS, repeated
from tests.unit.algo.reward.test_readers import slow


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(ATOMS), st.sampled_from(ATOMS), st.integers(0, 7))
def test_a_pair_of_atoms_again_and_again_takes_no_time(first: str, second: str, form: int) -> None:
    assert slow(list(repeated(first, second))[form]) == []
