"""The conversations that each way of serving has, and what their tool answers.

agent: problems of the tiny agent, two short turns with a call between them. long: the same questions to a model of its
shape with random weights, which is shown no tool and writes one long turn.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

from engine.tools.python_tool import PYTHON_PARAMETERS, PythonTool
from engine.types import Prompt
from recipes.tiny.task import MAX_TOKENS, MAX_TOOL_CALLS, TOOL_NAME, prompts
from sandbox.wire import Limits, ToolResult

WORKLOADS = {"agent": MAX_TOKENS, "long": 600}  # tokens of a conversation
SAMPLES = 16  # conversations of each problem, as many as in the quick start
KV_BLOCKS = 8192  # a block has 32 tokens: nothing is preempted
MAX_TURNS = MAX_TOOL_CALLS + 1
FUNCTION = {"name": TOOL_NAME, "description": PythonTool.description, "parameters": PYTHON_PARAMETERS}


class Usage(NamedTuple):
    """Tokens of a turn: those that the model read, those that it sampled, and those of the read ones in a cache."""

    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Turns and tokens of a load. prompt_tokens: tokens that turns read; cached_tokens: those of them in a cache."""

    conversations: int
    turns: int
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int

    def json(self) -> dict[str, Any]:
        return asdict(self)


def conversations(count: int, seed: int) -> list[Prompt]:
    """Returns SAMPLES conversations of each problem, side by side."""
    drawn = islice(prompts("train", seed), -(-count // SAMPLES))
    return [prompt for prompt in drawn for _ in range(SAMPLES)][:count]


def reply(code: str) -> str:
    """Returns a number that follows from the code, at once: the cost of a tool is no part of this bench."""
    return str(zlib.crc32(code.encode()) % 1000)


class Scripted:
    """A ToolRunner that answers with `reply`."""

    async def run(
        self, code: str, stdin: str = "", limits: Limits | None = None, *, display: bool = False
    ) -> ToolResult:
        return ToolResult(outcome="ok", stdout=reply(code))
