import time
from dataclasses import replace

import pytest

from tests.golden.roc_release import error_penalty, format_penalty, quota, response_text, select, select_of
from tests.support.algo_fakes import tool_use, trajectory


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("<answer>1</answer>", 0.0),
        ("<answer>1</answer><answer>2</answer>", 1 / 3),
        ("<answer><answer>1</answer></answer>", 1.0),
        ("<answer></answer><answer><answer></answer></answer>", 1.0),
        ("</answer>1<answer>", 1.0),
        ("<answer>1", 1.0),
    ],
)
def test_answer_tags_are_paired_as_in_the_release(answers, expected):
    """Values of the released code."""
    turns = f"{3 * '<|im_start|>assistant a<|im_end|>'}{answers}"
    assert format_penalty(turns) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("penalty", "text", "expected"),
    [(error_penalty, "<tool_response>", 0.5), (format_penalty, "<answer></answer><|im_start|>assistant", 1.0)],
)
def test_openings_that_nothing_closes_take_no_time(penalty, text, expected):
    """A policy may say them as often as it has tokens; this runs on the node's loop."""
    started = time.process_time()
    assert penalty(text * 8000) == expected
    assert time.process_time() - started < 1.0


def test_a_group_with_both_shares_below_their_minima_is_kept_whole():
    assert quota(3, 3, 2, 2, 2) == (3, 3)


def test_minima_above_the_target_are_refused_as_in_the_release():
    with pytest.raises(ValueError, match="keep=3"):
        select([0.0] * 8, [1.0, 0.0] * 4, 3)


def rollout(turns, *, truncated=False):
    """A trajectory of (text, tool responses) per turn."""
    plain = trajectory(
        "<|im_end|>".join(text for text, _ in turns) + ("" if truncated else "<|im_end|>"), turns=len(turns)
    )
    built = []
    for turn, (_, responses) in zip(plain.turns, turns, strict=True):
        uses = tuple(replace(tool_use("ok"), response=response) for response in responses)
        built.append(replace(turn, tool_uses=uses))
    return replace(plain, turns=tuple(built), reward=1.0)


def test_a_trajectory_reads_as_the_release_reads_it():
    two = rollout([("<tool_call>a</tool_call><tool_call>b</tool_call>", ("1", "2")), ("<answer>3</answer>", ())])
    assert response_text(two) == (
        "<tool_call>a</tool_call><tool_call>b</tool_call><|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "<answer>3</answer><|im_end|>"
    )
    cut = rollout([("<tool_call>a</tool_call>", ("1",)), ("<answer>3", ())], truncated=True)
    assert response_text(cut).endswith("<|im_start|>assistant\n<answer>3")
    assert response_text(rollout([("<answer>1</answer>", ())])) == "<answer>1</answer><|im_end|>"


def test_the_selector_takes_the_least_penalised_and_the_first_failures():
    call, answer = ("<tool_call>a</tool_call>", ("fine",)), ("<answer>3</answer>", ())
    failed = ("<tool_call>a</tool_call>", ("Error",))
    clean, clumsy, direct = rollout([call, answer]), rollout([failed, answer]), rollout([answer])
    wrong = replace(direct, reward=0.0)
    group = [direct, clumsy, wrong, clean, wrong, wrong, clean, wrong]
    assert select_of(group, 4) == [2, 3, 4, 6]
    assert select_of(group, 9) == []
    assert select_of(group, 8) == list(range(8))


@pytest.mark.parametrize("keep", [2, 4, 8, 16])
def test_an_even_target_of_half_the_group_can_always_be_kept(keep):
    for positives in range(1, 2 * keep):
        assert sum(quota(positives, 2 * keep - positives, keep, 1, 1)) == keep
