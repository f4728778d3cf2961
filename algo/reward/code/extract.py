"""Finds the program of a trajectory."""

from __future__ import annotations

import json
from collections.abc import Iterator

from algo.reward.answers import TOOL_CALL_END, final_turn
from engine.types import Trajectory

ASK_FOR_PROGRAM = (
    "Solve the problem with a Python program. Think about it first, and use the tools that you have where they help. "
    "End your last message with the whole program in one block that begins with ```python and ends with ```."
)
"""A system message that asks for the form in which `program_in_answer` finds a program."""

_PYTHON = ("python", "python3", "py")


def last_block(text: str) -> str | None:
    """Returns the last closed block of Python in the text of a final turn; text before a tool call has none.

    A block that names no language counts only if none names Python: many answers end with a sample of the output.

    >>> last_block("so\\n```python\\nprint(1)\\n```\\n")
    'print(1)\\n'
    """
    last: dict[str, str] = {}
    for language, code in _closed_blocks(text.rpartition(TOOL_CALL_END)[2]):
        last["python" if language in _PYTHON else language] = code
    return last.get("python", last.get(""))


def _closed_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields language and code of each closed block, in time linear in the text.

    A fence that names a language opens a block even where another was not closed. Code loses the indent of its fence.
    """
    language: str | None = None  # None outside a block
    indent = ""
    code: list[str] = []
    for line in text.split("\n"):
        fence = line.strip()
        marks, info = fence[:3], fence[3:].strip()
        if marks == "```" and "`" not in info and (info or language is None):
            language = info.split()[0].lower() if info else ""
            indent, code = line[: len(line) - len(line.lstrip())], []
        elif fence == "```" and language is not None:
            yield language, "".join(f"{each}\n" for each in code)
            language = None
        elif language is not None:
            code.append(line.removeprefix(indent))


def program_in_answer(trajectory: Trajectory) -> str | None:
    """Returns the last ```python block of the last turn; None without one."""
    return last_block(final_turn(trajectory))


def program_in_call(trajectory: Trajectory) -> str | None:
    """Returns the code of the last tool call that has some: what the agent ran last is its program."""
    uses = [use for turn in trajectory.turns for use in turn.tool_uses]
    codes = [json.loads(use.arguments).get("code") for use in uses]
    return next((code for code in reversed(codes) if isinstance(code, str)), None)
