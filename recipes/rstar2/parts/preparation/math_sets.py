"""Converts the rows of mathematical data sets to problems, one function for each form.

DAPO, OpenMathReasoning, Project Euler, AIME 2025, HMMT and GPQA were not there to be run when this was written: their
columns are those of their public cards. GSM8K, MAWPS, MATH-500 and AIME 2024 were run whole.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from engine.data.prompts import after_hashes
from recipes.rstar2.parts.preparation.rows import Dropped, Fields, Place, Problem, WrongField
from recipes.rstar2.parts.preparation.rules import canonical

LETTERS = "ABCD"
# Texts that data sets put around a question; the prompt says in its own words how to answer.
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'


def plain_problem(
    source: str, question: Sequence[str], answer: Sequence[str], row: Mapping[str, Any], place: Place
) -> Problem:
    """Converts a row with a question and an answer in these columns (the first that it has).

    >>> row = {"problem": "What is 6 * 7?", "answer": 42}
    >>> plain_problem("rstar_a", ["problem"], ["answer"], row, Place(id="a-3", index=3)).answer
    '42'
    """
    fields = Fields(row)
    return Problem(
        id=place.id,
        index=place.index,
        source=source,
        question=fields.text(*question).strip(),
        answer=canonical(fields.number_or_text(*answer)),
    )


def gsm8k(row: Mapping[str, Any], place: Place) -> Problem | Dropped:
    """Takes what follows #### in the solution as the answer."""
    question, solution = Fields(row).text("question"), Fields(row).text("answer")
    if "####" not in solution:
        return Dropped(reason="no_answer", detail=solution[-80:])
    answer = canonical(after_hashes(row))
    return Problem(id=place.id, index=place.index, source="rstar_openai/gsm8k", question=question, answer=answer)


def dapo(row: Mapping[str, Any], place: Place) -> Problem:
    """Converts DAPO-Math-17k: `prompt` (text in the processed set, messages in the first one) and its reference.

    >>> row = {"prompt": "What is 6 * 7?", "solution": "42", "reward_model": {"style": "rule", "ground_truth": "42"}}
    >>> dapo(row, Place(id="d-0", index=0)).question
    'What is 6 * 7?'
    """
    fields = Fields(row)
    prompt = fields.value("prompt")
    question = prompt if isinstance(prompt, str) else _only_user(fields.objects("prompt"))
    question = question.strip()
    if question.startswith(_DAPO_BEFORE):
        question = question.partition("\n")[2].strip().removesuffix(_DAPO_AFTER).strip()
    answer = canonical(fields.number_or_text("reward_model.ground_truth", "solution", "answer"))
    return Problem(
        id=place.id, index=place.index, source="rstar_open-r1/DAPO-Math-17k-Processed", question=question, answer=answer
    )


def _only_user(messages: Sequence[Mapping[str, Any]]) -> str:
    asked = [message.get("content") for message in messages if message.get("role") == "user"]
    if len(asked) != 1 or not isinstance(asked[0], str):
        raise WrongField(f"prompt: must hold one user's message, got {len(asked)}")
    return asked[0]


def openmath(row: Mapping[str, Any], place: Place) -> Problem | Dropped:
    """Converts OpenMathReasoning: problems of the AoPS forums whose answer the forum gave.

    A converted proof has an answer that nobody gave, and where none was extracted the reference is a vote of models.
    """
    fields = Fields(row)
    if not fields.text("problem_source").startswith("aops"):
        return Dropped(reason="not_aops", detail=fields.text("problem_source"))
    kind = fields.text("problem_type")
    if kind != "has_answer_extracted":
        return Dropped(reason="proof" if kind == "converted_proof" else "no_answer", detail=kind)
    return plain_problem("rstar_nvidia/OpenMathReasoning", ["problem"], ["expected_answer"], row, place)


def gpqa(row: Mapping[str, Any], place: Place) -> Problem:
    """Asks GPQA with its four options in an order drawn by seed and row; the answer is the right one's letter.

    >>> row = {"Question": "2+2?", "Correct Answer": "4", **{f"Incorrect Answer {n}": str(n + 4) for n in (1, 2, 3)}}
    >>> problem = gpqa(row, Place(id="gpqa-0", index=0, seed=0))
    >>> problem.question.splitlines()[2 + "ABCD".index(problem.answer)].endswith(" 4")
    True
    """
    fields = Fields(row)
    right = fields.text("Correct Answer").strip()
    wrong = [fields.text(f"Incorrect Answer {number}").strip() for number in (1, 2, 3)]
    options = [right, *wrong]
    order = list(range(len(options)))
    random.Random(f"gpqa-{place.seed}-{place.index}").shuffle(order)
    listed = "\n".join(f"{letter}. {options[at]}" for letter, at in zip(LETTERS, order, strict=True))
    question = fields.text("Question").strip()
    return Problem(
        id=place.id,
        index=place.index,
        source="rstar_Idavidrein/gpqa",
        question=f"{question}\n\n{listed}\n\nAnswer with the letter of the right option.",
        answer=LETTERS[order.index(0)],
        ability="science",
    )


def release(row: Mapping[str, Any], place: Place) -> Problem:
    """Takes a row that is in the release's format already."""
    fields = Fields(row)
    return Problem(
        id=place.id,
        index=place.index,
        source=fields.text("data_source"),
        question=_only_user(fields.objects("prompt")),
        answer=fields.number_or_text("reward_model.ground_truth"),
        ability=fields.optional_text("ability") or "math",
    )
