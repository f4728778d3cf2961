"""Finds answers in the text that a policy sampled (`Trajectory.text`: its assistant turns, no tool responses).

Invariants
- Only closed `<answer>...</answer>` tags count; of nested openings the innermost one that is closed counts.
- The boxed answer is the last balanced `\\boxed{...}` inside the last closed tag of the final assistant turn, or None.
  White space may stand before its brace, and `\\fbox` is the same.
"""

from __future__ import annotations

import re

ASK_FOR_ANSWER = (
    "Solve the problem. Think about it first, and use the tools that you have where they help. End your last message "
    "with the final answer alone, in this form: <answer>\\boxed{...}</answer>"
)
"""A system message that asks for the form in which `boxed_answer` finds an answer."""

END_OF_TURN = "<|im_end|>"
TOOL_CALL_END = "</tool_call>"
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or what a backslash takes with it: after a line break a brace is one


def answers(text: str) -> list[str]:
    """Contents of the closed answer tags, in order.

    >>> answers("<answer>1</answer> or <answer>2</answer> or <answer>3")
    ['1', '2']
    """
    return _ANSWER.findall(text)


def final_turn(text: str) -> str:
    """The last assistant turn: a rollout goes on to another turn only after a tool call."""
    body = text.rstrip().removesuffix(END_OF_TURN)
    return body.rpartition(END_OF_TURN)[2].rpartition(TOOL_CALL_END)[2]


def boxed_answer(text: str) -> str | None:
    """What the trajectory answers, without surrounding space.

    >>> boxed_answer(r"<answer>\\boxed{3} no, \\boxed{\\frac{1}{2}}</answer><|im_end|>")
    '\\\\frac{1}{2}'
    """
    tagged = answers(final_turn(text))
    boxes = list(_BOX.finditer(tagged[-1])) if tagged else []
    if not boxes:
        return None
    rest = tagged[-1][boxes[-1].end() :]
    depth = 1
    for found in _BRACE.finditer(rest):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0:
            return rest[: found.start()].strip()
    return None
