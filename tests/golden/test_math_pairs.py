"""Answers judged by hand (math_pairs.tsv, math_forms.tsv, math_integers.tsv) against what the reward makes of them."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from algo.reward.math_reward import MathReward
from algo.reward.maths.compare import Question, compare
from algo.reward.maths.number import number_of
from algo.reward.maths.reading import is_list, read
from tests.support.golden import over
from tests.support.math_tables import pairs

PAIRS = [*pairs("math_pairs.tsv"), *pairs("math_forms.tsv")]
INTEGERS = pairs("math_integers.tsv")


def test_the_tables_are_large_and_without_contradiction() -> None:
    for table in (PAIRS, INTEGERS):
        assert len({(pair.answer, pair.reference) for pair in table}) == len(table)
    assert len(PAIRS) >= 1700
    assert {pair.decided for pair in PAIRS} == {"text", "grader"}


def test_texts_alone_decide_what_the_table_says_they_do() -> None:
    wrong = []
    for pair in PAIRS:
        verdict = compare(pair.answer, pair.reference)
        decided = "grader" if isinstance(verdict, Question) else "text"
        if decided != pair.decided or (decided == "text" and verdict is not pair.right):
            wrong.append((pair, verdict))
    assert wrong == []


def test_integers_only_judges_as_the_author() -> None:
    reward = MathReward(integers_only=True)
    assert [pair for pair in INTEGERS if reward.equal(pair.answer, pair.reference) is not pair.right] == []


async def test_without_a_sandbox_only_texts_count() -> None:
    reward = MathReward()
    for pair in PAIRS:
        assert reward.equal(pair.answer, pair.reference) is (pair.right and pair.decided == "text")


@over(sorted({pair.reference for pair in PAIRS}), repr)
def test_each_reference_equals_itself_in_other_looks(reference: str) -> None:
    for answer in (reference, f" {reference} ", f"${reference}$", f"{reference}.", rf"\boldsymbol{{{reference}}}"):
        assert compare(answer, reference) is True, answer


@given(st.from_regex(r"-?[0-9]{1,40}(\.[0-9]{1,40})?", fullmatch=True))
def test_a_plain_number_is_read_as_between_dollars(text: str) -> None:
    """It is read at once; with dollars around it, it goes the long way."""
    assert read(text) == read(f"${text}$")
    assert read(text, beside_list=True) == read(f"${text}$", beside_list=True)
    assert is_list(text) is is_list(f"${text}$")


def test_a_number_with_a_huge_exponent_costs_nothing() -> None:
    started = time.process_time()
    for text in ("1e999999999", "-1E999999999", r"1\times10^{999999999}", "1e-999999999", "1e" + "9" * 1000):
        for reference in ("1", "0", "1e999999998", r"\frac{1}{2}", "5\\%", r"5\text{ km}"):
            assert compare(text, reference) is False
            assert compare(reference, text) is False
        assert compare(text, text) is True
    assert compare(r"1e999999999\text{ km}", r"1\text{ m}") is False
    assert time.process_time() - started < 1.0


def test_numbers_of_both_notations() -> None:
    assert number_of("12.50") == number_of(r"1.25\times 10^{1}") == number_of("1250\\%")
    assert number_of("1 2") is None
    assert number_of("1e4").exponent == 4


def test_readings_keep_apart_what_is_dropped() -> None:
    reading = read(r"\text{Area} = 1{,}234.5\text{ cm}^2")
    assert (reading.value, reading.unit) == ("1234.5", read(r"5\text{ square centimeters}").unit)
    assert read("5 or 6").value == r"5 \lor 6"
    assert read(r"\text{(C) circle}").option == "C"
