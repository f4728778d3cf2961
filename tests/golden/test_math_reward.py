"""Answers that are numbers, as their author judges them."""

import re

from algo.reward.answers import boxed_answer
from algo.reward.math_reward import MathReward
from tests.support.algo_fakes import trajectory
from tests.support.golden import over, rows

STRICT_NO = {"outside_answer_tags", "no_box_final_sentence", "no_box_number_only"}


NUMBER = re.compile(r"[-+]? ?[\d.,{}]*\d\.?")


def numbers_only(row):
    """Whether the reference is a number, and the answer too if there is one: what is graded without a library."""
    answer = boxed_answer(row["inputs"]["model_output"])
    return bool(NUMBER.fullmatch(row["inputs"]["ground_truth"]) and (answer is None or NUMBER.fullmatch(answer)))


JUDGED = [row for row in rows("grade_math") if row["params"]["judgement_of_author"] is not None and numbers_only(row)]


def graded(row):
    return trajectory(row["inputs"]["model_output"], answer=row["inputs"]["ground_truth"])


def verdict(row):
    case = row["params"]["case"]
    return row["params"]["judgement_of_author"] and case not in STRICT_NO


@over(JUDGED)
async def test_numbers_are_graded_as_the_author_judges(row):
    assert await MathReward()(graded(row)) == float(verdict(row))
