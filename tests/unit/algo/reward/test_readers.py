"""What reads a model's text on the node's loop: nothing raises there, and nothing takes 50 ms of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from hypothesis import example, given
from hypothesis import strategies as st

from algo.reward.answers import answers, boxed_answer
from algo.reward.judge import json_score, regex_score
from algo.reward.math_reward import MathReward
from algo.reward.maths.compare import compare
from algo.reward.maths.unit import unit_of, without_unit
from tests.support.answer_texts import ATOMS, repeated
from tests.support.examples import examples
from tests.support.golden import over

INTEGERS, LOOSE = MathReward(integers_only=True), MathReward(percent_is_optional=True)


def judged(judge: Callable[[str], float]) -> Callable[[str], None]:
    """A judge's answer that cannot be read is a ValueError, which its endpoint asks again for."""

    def reader(text: str) -> None:
        with suppress(ValueError):
            judge(text)

    return reader


READERS: dict[str, Callable[[str], object]] = {
    "compare": lambda text: compare(text, r"5\text{ cm}"),
    "integers only": lambda text: INTEGERS.equal(text, "5"),
    "beside a list": lambda text: LOOSE.equal(text, r"\{25\%, 2\}"),
    "unit_of": unit_of,
    "without_unit": without_unit,
    "boxed_answer": boxed_answer,
    "in a box": lambda text: boxed_answer(rf"<answer>\boxed{{{text}}}</answer>"),
    "answers": answers,
    "json_score": judged(json_score()),
    "regex_score": judged(regex_score(r"Score: ([0-9]+)")),
}


def slow(text: str) -> list[str]:
    """The readers that take 50 ms. Other processes disturb the clock of one run, so the quickest of four counts."""
    found = []
    for name, reader in READERS.items():
        for _ in range(4):
            started = time.process_time()
            reader(text)
            if time.process_time() - started < 0.05:
                break
        else:
            found.append(f"{name}: {text[:60]!r}")
    return found


@over(["^9", "½", "(E) ", "```json", "ten ", "\\text{ cm}", "The answer is ", "<answer>", "\\boxed{", "*"], repr)
def test_an_atom_again_and_again_takes_no_time(atom: str) -> None:
    assert slow(list(repeated(atom, ""))[3]) == []


@examples(15, search=400)
@given(st.sampled_from(ATOMS), st.sampled_from(ATOMS), st.integers(0, 7))
def test_a_pair_of_atoms_again_and_again_takes_no_time(first: str, second: str, form: int) -> None:
    assert slow(list(repeated(first, second))[form]) == []


@examples(100, search=1000)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(ATOMS), max_size=12).map("".join)))
@example(r"5\text{ cm}^9^9^9^9^9^9^9^9")
@example(r"5 feet^9^9^9^9^9^9^9^9^9^9")
@example('{"score": 1' + "0" * 400 + "}")
@example("```json" + " " * 2000 + "x```")
@example("5 " + r"\text{mile}^9" * 150)
def test_no_text_raises_or_takes_time(text: str) -> None:
    assert slow(text) == []
