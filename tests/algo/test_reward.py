import asyncio

import pytest
from algo_fakes import trajectory
from algo_golden import name, rows

from algo.answer import answers, boxed_answer
from algo.reward import MathReward
from algo.verify import MathVerify
from engine.ports import GraderUnavailable
from engine.types import StopReason

# Where strictness differs from the judgement of the mathematics, on purpose: only the box inside <answer> counts.
STRICT_NO = {"outside_answer_tags", "no_box_final_sentence", "no_box_number_only"}
# Math-Verify ignores units.
LENIENT_YES = {"unit_mismatch"}
JUDGED = [row for row in rows("grade_math") if row["params"]["judgement_of_author"] is not None]


class Recorder:
    """A verifier that only notes what it was asked."""

    def __init__(self):
        self.asked = []

    async def __call__(self, answer, reference):
        self.asked.append((answer, reference))
        return False


def graded(row):
    return trajectory(row["inputs"]["model_output"], answer=row["inputs"]["ground_truth"])


def verdict(row):
    case = row["params"]["case"]
    return (row["params"]["judgement_of_author"] or case in LENIENT_YES) and case not in STRICT_NO


@pytest.fixture(scope="module")
def module_loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def verifier(module_loop):
    verifier = MathVerify(deadline_s=3.0)
    yield verifier
    module_loop.run(verifier.__aexit__(None, None, None))


@pytest.mark.parametrize("row", [row for row in JUDGED if "power" not in row["params"]["case"]], ids=name)
def test_grades_as_the_author_judges(row, verifier, module_loop):
    reward = MathReward(verifier=verifier)
    assert module_loop.run(reward(graded(row))) == float(verdict(row))


def test_endless_comparison_is_wrong_and_the_next_one_works(module_loop):
    async def grade():
        async with MathVerify(deadline_s=0.5) as verifier:
            reward = MathReward(verifier=verifier)
            endless = await reward(trajectory("<answer>\\boxed{9^{9^{9}}+x}</answer>", answer="x+1"))
            return endless, await reward(trajectory("<answer>\\boxed{x+2y}</answer>", answer="2y+x"))

    assert module_loop.run(grade()) == (0.0, 1.0)


@pytest.mark.parametrize("row", JUDGED, ids=name)
async def test_numbers_need_no_library(row):
    recorder = Recorder()
    score = await MathReward(verifier=recorder)(graded(row))
    if not recorder.asked:
        assert score == float(verdict(row))
    for answer, reference in recorder.asked:
        assert not (answer.lstrip("-").isdigit() and reference.lstrip("-").isdigit())


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("42", "42", 1.0),
        ("042", "42", 1.0),
        ("1,234", "1234", 1.0),
        ("13.0", "13", 0.0),
        ("13/1", "13", 0.0),
        ("", "0", 0.0),
    ],
)
async def test_integers_only(answer, reference, expected):
    recorder = Recorder()
    reward = MathReward(integers_only=True, verifier=recorder)
    assert await reward(trajectory(f"<answer>\\boxed{{{answer}}}</answer>", answer=reference)) == expected
    assert recorder.asked == []


async def test_truncated_rollouts_get_nothing():
    text = "<answer>\\boxed{1}</answer>"
    assert await MathReward()(trajectory(text)) == 1.0
    for stop in (StopReason.LENGTH, StopReason.TURNS, StopReason.DEADLINE):
        assert await MathReward()(trajectory(text, stop=stop)) == 0.0
    assert await MathReward()(trajectory(text, truncated=True)) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>\\boxed{3}</answer> then <answer>\\boxed{4}</answer><|im_end|>\n", "4"),
        ("<answer>\\boxed{3}</answer><tool_call>{}</tool_call><|im_end|>It is 4.<|im_end|>", None),
        ("<answer>\\boxed{3}</answer><tool_call>{}</tool_call>", None),
        ("<answer>\\boxed{3}</answer> <answer>\\boxed{4}", "3"),
        ("<answer><answer>\\boxed{5}</answer></answer>", "5"),
        ("<answer>\\boxed{\\{1,2\\}}</answer>", "\\{1,2\\}"),
        ("<answer>\\boxed{5</answer>", None),
        ("\\boxed{9} <answer>done</answer>", None),
    ],
)
def test_boxed_answer_is_the_last_box_of_the_final_turn(text, expected):
    assert boxed_answer(text) == expected


def test_only_closed_tags_count():
    assert answers("<answer>a</answer><answer>b") == ["a"]


async def test_a_grader_that_cannot_start_is_not_a_zero():
    async with MathVerify(python="/nonexistent/python") as verifier:
        with pytest.raises(GraderUnavailable, match="did not start"):
            await verifier("x", "y")
