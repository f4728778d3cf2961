"""What drops rows of a data set, and what does not."""

import doctest
import importlib

import pytest

from recipes.rstar2.parts.preparation.rows import Conversation, Dropped, Problem, fingerprint
from recipes.rstar2.parts.preparation.rules import (
    CHECKABLE,
    LONGEST_PROBLEM,
    Contamination,
    Duplicates,
    canonical,
    huge_answer,
    integer_of,
    not_an_integer,
    not_english,
    not_text,
    over_long,
    sifted,
)

MODULES = ["rows", "rules", "demonstrations", "chat_sets", "math_sets", "shards"]


def problem(question="How many?", answer="3", name="a-0"):
    return Problem(id=name, index=0, source="a", question=question, answer=answer)


def reason(row, *rules):
    found = sifted(row, rules)
    return found.reason if isinstance(found, Dropped) else None


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_work(module):
    failed, tried = doctest.testmod(importlib.import_module(f"recipes.rstar2.parts.preparation.{module}"))
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("+5", 5),
        ("1{,}200", 1200),
        ("\\boxed{ -3 }", -3),
        ("$4$", 4),
        ("−4", -4),
        ("2.00", 2),
        ("\\$32,\\!348", 32348),
        ("11,\\! 111", 11111),
    ]
    + [(text, None) for text in ("", "3.5", "1e3", "x", "1,20", "3 m", "\\frac{4}{2}", "5%", "1 000", "9" * 5000)],
)
def test_an_integer_is_read_however_it_is_written(answer, number):
    assert integer_of(answer) == number
    assert reason(problem(answer=answer), not_an_integer) == (None if number is not None else "not_integer")


def test_an_answer_that_is_no_integer_stays_as_it_is():
    assert canonical(" \\frac{1}{2} ") == "\\frac{1}{2}"


def test_an_answer_of_more_than_64_bits_is_huge():
    assert reason(problem(answer="9" * 18), huge_answer) is None
    assert reason(problem(answer="-1" + "0" * 18), huge_answer) == "huge_answer"


CANNOT_BE_CHECKED = [
    ("Prove that there are infinitely many primes.", "", "no_answer"),
    ("How much?", "Not enough information", "no_answer"),
    ("How much?", "It cannot be determined from what is given.", "no_answer"),
    ("Prove that $n^2$ is even when $n$ is.", "1", "proof"),
    ("Show that the sum is at most 3.", "3", "proof"),
    ("Which? (A) 1 (B) 2 (C) 3", "2", "multiple_choice"),
    ("Which? $\\textbf{(A)}\\ 1 \\qquad \\textbf{(B)}\\ 2 \\qquad \\textbf{(C)}\\ 3$", "2", "multiple_choice"),
    ("Which?\nA. one\nB. two\nC. three", "2", "multiple_choice"),
    ("Which one is right?", "(B)", "multiple_choice"),
    ("Which one is right?", "\\text{(B)}", "multiple_choice"),
    ("Solve.", "12 or 13", "several_answers"),
    ("Solve.", "1, 2, 3", "several_answers"),
    ("Solve.", "\\pm 2", "several_answers"),
    ("Solve.", "x = 1 \\text{ and } y = 2", "several_answers"),
    ("(a) Find x. (b) Find y.", "3", "several_questions"),
    ("Let $x = 1$.\n(i) Find y.\n(ii) Find z.", "3", "several_questions"),
    ("x" * (LONGEST_PROBLEM + 1), "3", "over_long"),
]
CAN_BE_CHECKED = [
    ("Show that you can add: what is 2 + 3?", "5"),
    ("Prove the claim, then compute its value at 3.", "9"),
    ("Let $f(a) = 2$ and $f(b) = 3$. Find $f(a) + f(b)$.", "5"),
    ("Let (a) be the first and (b) the second case. How many are there?", "5"),
    ("Where do they meet?", "(1, 2)"),
    ("Which interval?", "[0, 1)"),
    ("Which one?", "\\left( \\frac{3}{2}, -13 \\right)"),
    ("Which set?", "\\{1, 2\\}"),
    ("How much?", "\\$32,\\!348"),
    ("How many?", "1,200"),
    ("How large? [asy] dot((A)); dot((B)); dot((C)); [/asy]", "60"),
    ("Let $f(A) = 1$, $f(B) = 2$ and $f(C) = 3$. Which is the sum?", "6"),
    ("Triangle ABC has angles A, B, C. How large is A?", "60"),
]


@pytest.mark.parametrize(("question", "answer", "expected"), CANNOT_BE_CHECKED)
def test_what_cannot_be_checked_is_dropped(question, answer, expected):
    assert reason(problem(question, answer), *CHECKABLE) == expected


@pytest.mark.parametrize(("question", "answer"), CAN_BE_CHECKED)
def test_what_can_be_checked_stays(question, answer):
    assert reason(problem(question, answer), *CHECKABLE) is None


def test_other_languages_and_broken_characters_are_dropped():
    assert reason(problem("求 $x$ 的值。"), not_english) == "not_english"
    assert reason(problem("Find the naïve $α$–value."), not_english) is None
    assert reason(problem("half \ud83d of a pair"), not_text) == "not_text"
    assert reason(problem("whole 😀"), not_text) is None


def test_a_conversation_may_be_longer_than_a_problem():
    said = [{"role": "user", "content": "x" * (LONGEST_PROBLEM + 1)}, {"role": "assistant", "content": "y"}]
    assert reason(Conversation(id="a", index=0, source="a", messages=said), over_long) is None
    said[0]["content"] *= 100
    assert reason(Conversation(id="a", index=0, source="a", messages=said), over_long) == "over_long"


def test_the_first_reason_counts_and_what_was_dropped_before_is_passed_on():
    before = Dropped(reason="before")
    rules = [not_an_integer, lambda row: Dropped(reason="always")]
    rows = [sifted(row, rules) for row in (problem(answer="x"), before, problem())]
    assert [row.reason for row in rows] == ["not_integer", "before", "always"]


def test_duplicates_differ_in_case_and_white_space_alone():
    rule = Duplicates()
    assert [reason(problem(text), rule) for text in ("What is 2 + 3 ?", "what  is 2+3?", "What is 2 - 3?")] == [
        None,
        "duplicate",
        None,
    ]
    assert reason(problem("What is 2 - 3?"), Duplicates(rule.seen)) == "duplicate"


def test_conversations_with_other_calls_are_no_duplicates():
    def conversation(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return Conversation(id="a", index=0, source="a", messages=said)

    rule = Duplicates()
    assert [reason(conversation(text), rule) for text in ('{"x": 1}', '{"x": 2}', '{"x": 1}')] == [
        None,
        None,
        "duplicate",
    ]


NINE = "One, two; three (four) $five$ six seven eight nine"


def test_eight_words_in_a_row_are_contamination_and_seven_are_not():
    tests = Contamination()
    tests.add(NINE, name="math500-3")
    assert sifted(problem("So ONE two three four five six seven eight is it"), [tests]) == Dropped(
        reason="contaminated", detail="one two three four five six seven eight", against="math500-3"
    )
    assert reason(problem("four five six seven eight nine"), tests) is None
    assert reason(problem("So one two three four five six seven is it"), tests) is None
    assert reason(problem("two three four five six seven eight nine"), tests) == "contaminated"


def test_a_short_row_of_a_test_set_is_found_where_the_whole_question_is_the_same():
    tests = Contamination()
    tests.add("What is 6 * 7?", name="t-0")
    assert reason(problem("what is 6*7"), tests) == "contaminated"
    assert reason(problem("Now, what is 6 * 7?"), tests) is None
    assert reason(problem("..."), tests) is None


def test_what_the_assistant_says_counts_as_contamination_too():
    tests = Contamination()
    tests.add(NINE, name="t-0")
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": NINE}]
    assert reason(Conversation(id="a", index=0, source="a", messages=said), tests) == "contaminated"


def test_fingerprints_keep_signs():
    assert fingerprint("a-b") != fingerprint("a+b")
