"""Finds the program of a trajectory."""

from __future__ import annotations

import json
import re

from algo.reward.answers import TOOL_CALL_END, final_turn
from engine.types import Trajectory

ASK_FOR_PROGRAM = (
    "Solve the problem with a Python program. Think about it first, and use the tools that you have where they help. "
    "End your last message with the whole program in one block that begins with ```python and ends with ```."
)
"""A system message that asks for the form in which `program_in_answer` finds a program."""

_BLOCK = re.compile(r"^[ \t]*```(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def last_block(text: str) -> str | None:
    """Returns the last closed block of code in the text of a final turn; text before a tool call has none.

    >>> last_block("so\\n```python\\nprint(1)\\n```\\n")
    'print(1)\\n'
    """
    blocks = _BLOCK.findall(text.rpartition(TOOL_CALL_END)[2])
    return blocks[-1] if blocks else None


def program_in_answer(trajectory: Trajectory) -> str | None:
    """Returns the last ```python block of the last turn; None without one."""
    return last_block(final_turn(trajectory))


def program_in_call(trajectory: Trajectory) -> str | None:
    """Returns the code of the last tool call that has some: what the agent ran last is its program."""
    uses = [use for turn in trajectory.turns for use in turn.tool_uses]
    codes = [json.loads(use.arguments).get("code") for use in uses]
    return next((code for code in reversed(codes) if isinstance(code, str)), None)
