"""Finds the program in the text that a policy sampled."""

from __future__ import annotations

import re

from algo.reward.answers import TOOL_CALL_END

ASK_FOR_PROGRAM = (
    "Solve the problem with a Python program. Think about it first, and use the tools that you have where they help. End "
    "your last message with the whole program in one block that begins with ```python and ends with ```."
)
"""A system message that asks for the form in which `last_program` finds a program."""

_BLOCK = re.compile(r"^[ \t]*```(?:python|py|python3)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def last_program(text: str) -> str | None:
    """Returns the last closed block of code in the text of a final turn; text before a tool call has none.

    >>> last_program("so\\n```python\\nprint(1)\\n```\\n")
    'print(1)\\n'
    """
    blocks = _BLOCK.findall(text.rpartition(TOOL_CALL_END)[2])
    return blocks[-1] if blocks else None
