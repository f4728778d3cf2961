"""The tiny agent as a whole behind `ToolLoop`, on a real engine and a real jail: its answers, as JSON."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from itertools import islice

from engine.assembly.config import ServingConfig
from engine.assembly.serving import serving
from engine.commands.gateway_tools import ToolOptions
from engine.gateway.requests import ChatRequest, SamplingOverrides
from engine.gateway.tool_loop import ToolLoop
from recipes.tiny.task import MAX_TOKENS, TOOL_NAME, prompts
from sandbox import TIERS, SandboxConfig
from tests.support.paths import TINY

SAMPLES = 8
QUESTIONS = [prompt.messages for prompt in islice(prompts("test", 0), 3)]


async def main():
    options = ToolOptions(name=TOOL_NAME, turns=4)
    config = ServingConfig(
        checkpoint=TINY,
        rollout=options.budget(max_tokens=MAX_TOKENS),
        replicas=1,
        sandbox=SandboxConfig(slots=2, tiers=TIERS[:1]),
    )
    async with serving(config) as served:
        loop = ToolLoop(served.rollouts([options.tool(served.sandbox)]))
        requests = [ChatRequest(messages=messages, overrides=SamplingOverrides(seed=7)) for messages in QUESTIONS]
        twice = [[await loop.answer(request, n=SAMPLES) for request in requests] for _ in range(2)]
    print(json.dumps([[[asdict(answer) for answer in answers] for answers in once] for once in twice]))


if __name__ == "__main__":
    asyncio.run(main())
