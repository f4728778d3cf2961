"""Scripted models for the worlds of recipes/tools: whole episodes without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.types import Prompt, Trajectory
from tests.support.node import END, Setup

ROOM = 8000  # tokens of an episode


def tool(name: str, **arguments: Any) -> str:
    """The text of a call."""
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


async def episode(world: Any, prompt: Prompt, *turns: str | Sequence[str], sample: int = 0) -> Trajectory:
    """What a model that says these turns leaves: each is a text, or the calls of one turn."""
    texts = ["".join([turn] if isinstance(turn, str) else turn) for turn in turns]
    script = [[text + END] for text in [*texts, *([] if "<tool_call>" not in texts[-1] else ["done"])]]
    async with Setup(*script, tools=[world], max_tokens=ROOM, max_turns=len(script) + 1) as node:
        return await node.rollouts.run(prompt, sample, 0)
