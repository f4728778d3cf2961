import time
from dataclasses import replace

import pytest

from algo.reward.answers import ASK_FOR_ANSWER, answers, boxed_answer, final_turn
from algo.reward.math_reward import MathReward
from engine.telemetry.noted_warnings import noted_warnings
from engine.types import StopReason
from tests.support.algo_fakes import trajectory
from tests.support.fakes import a_trajectory

# Where strictness differs from the judgement of the mathematics, on purpose: only the box inside <answer> counts.


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
    reward = MathReward(integers_only=True)
    assert await reward(trajectory(f"<answer>\\boxed{{{answer}}}</answer>", answer=reference)) == expected


async def test_a_box_full_of_zeros_takes_no_time():
    """Of a policy that repeats itself; this runs on the node's loop."""
    started = time.process_time()
    for answer, expected in ((20000 * "0" + "x", 0.0), (20000 * "0" + "1.", 1.0), (20000 * "0", 0.0)):
        assert await MathReward()(trajectory(f"<answer>\\boxed{{{answer}}}</answer>", answer="1")) == expected
    assert time.process_time() - started < 1.0


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
        ("<answer>\\boxed{\\begin{pmatrix}1\\\\{2}\\end{pmatrix}}</answer>", "\\begin{pmatrix}1\\\\{2}\\end{pmatrix}"),
        ("<answer>\\boxed{1\\\\}</answer>", "1\\\\"),
        ("<answer>\\boxed{5</answer>", None),
        ("<answer>\\boxed {11}</answer>", "11"),
        ("<answer>\\boxed\n  {11}</answer>", "11"),
        ("<answer>\\fbox{11}</answer>", "11"),
        ("<answer>\\boxed{10} or \\fbox {\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer>\\boxedness{11}</answer>", None),
        ("\\boxed{9} <answer>done</answer>", None),
    ],
)
def test_boxed_answer_is_the_last_box_of_the_final_turn(text, expected):
    assert boxed_answer(text) == expected


@pytest.mark.parametrize("end", ["<|im_end|>", "<end_of_turn>", ""])
@pytest.mark.parametrize(
    ("turns", "cut_off", "last"),
    [(["only"], False, "only"), (["one", "two"], False, "two"), (["one", "two"], True, "two"), ([""], False, "")],
)
def test_the_final_turn_ends_where_the_chat_template_says(turns, cut_off, last, end):
    text = end.join([*turns, *([] if cut_off else [""])])
    found = final_turn(replace(a_trajectory(), text=text, end_of_turn=end))
    assert found == (last if end else text)
    assert final_turn(replace(a_trajectory(), text=text, end_of_turn=end, answer="4")) == "4"


def test_only_closed_tags_count():
    assert answers("<answer>a</answer><answer>b") == ["a"]


@pytest.mark.parametrize(
    ("answer", "reference", "optional"),
    [
        ("25", r"25\%", True),
        (r"25\%", "25", True),
        (r"33\frac{1}{3}", r"33\frac13\%", None),
        ("0.25", r"25\%", True),
        (r"25\%", r"25\%", True),
        (r"2500\%", "25", True),
        ("24", r"25\%", False),
        (r"0.25\%", r"25\%", False),
        (r"25\text{ cm}", r"25\%", False),
        (r"25\%", r"25\text{ cm}", False),
        (r"\$25", "25", True),
    ],
)
def test_a_percent_sign_may_be_optional(answer, reference, optional):
    if optional is None:
        assert MathReward(percent_is_optional=True).equal(answer, reference) is False  # without a sandbox
    else:
        assert MathReward(percent_is_optional=True).equal(answer, reference) is optional


def test_a_percent_sign_counts_by_default():
    for answer, reference in (("25", r"25\%"), (r"25\%", "25"), (r"\$25", r"25\%")):
        assert MathReward().equal(answer, reference) is False


def test_integers_know_no_percentages():
    with pytest.raises(ValueError, match="percent_is_optional"):
        MathReward(integers_only=True, percent_is_optional=True)


@pytest.mark.parametrize(
    ("texts", "noted"),
    [
        ([r"So the answer is \boxed{42}."] * 40, 1),
        (["<answer>42</answer>"] * 40, 1),
        ([r"So the answer is \boxed{42}."] * 8, 0),
        ([r"So the answer is \boxed{42}."] * 8 + [r"<answer>\boxed{41}</answer>"] + ["42"] * 40, 0),
    ],
)
async def test_a_run_without_any_answer_is_told_so_once(texts, noted):
    notes = []
    reward = MathReward()
    with noted_warnings(notes.append):
        for text in texts:
            await reward(trajectory(text, answer="42"))
    assert len(notes) == noted
    assert all("<answer>" in note for note in notes)


def test_the_form_that_is_asked_for_is_the_one_that_is_read():
    assert boxed_answer(ASK_FOR_ANSWER) == "..."
