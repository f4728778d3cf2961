"""Finds answers in the text that a policy sampled (`Trajectory.text`: its assistant turns, without tool responses).

Invariants
- Only closed `<answer>...</answer>` tags count; of nested openings the innermost one that is closed counts.
- The boxed answer is the last balanced `\\boxed{...}` inside the last closed tag of the final assistant turn, or None.
  White space may stand before its brace, and `\\fbox` is the same.
"""

from __future__ import annotations

import re

from engine.types import Trajectory

ASK_FOR_ANSWER = (
    "Solve the problem. Think about it first, and use the tools that you have where they help. End your last message "
    "with the final answer alone, in this form: <answer>\\boxed{...}</answer>"
)
"""A system message that asks for the form in which `boxed_answer` finds an answer."""

TOOL_CALL_END = "</tool_call>"
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# An escaped character counts as one, so `\\{` is a line break and then a brace.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def answers(text: str) -> list[str]:
    """Returns the contents of the closed answer tags, in order.

    >>> answers("<answer>1</answer> or <answer>2</answer> or <answer>3")
    ['1', '2']
    """
    return _ANSWER.findall(text)


def final_turn(trajectory: Trajectory) -> str:
    """Returns the text of the last turn without the token that ends it, or an agent's own answer."""
    return trajectory.turn_texts[-1] if trajectory.answer is None else trajectory.answer


def boxed_answer(text: str) -> str | None:
    """Returns the answer in the text of a final turn, without surrounding space; text before a tool call has none.

    >>> boxed_answer(r"<answer>\\boxed{3} no, \\boxed{\\frac{1}{2}}</answer>")
    '\\\\frac{1}{2}'
    """
    tagged = answers(text.rpartition(TOOL_CALL_END)[2])
    boxes = list(_BOX.finditer(tagged[-1])) if tagged else []
    if not boxes:
        return None
    rest = tagged[-1][boxes[-1].end() :]
    depth = 1
    for brace in _BRACE.finditer(rest):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return rest[: brace.start()].strip()
    return None
