"""Type a word problem and watch the tiny agent call Python.

    python recipes/tiny/chat.py                           # the agent before reinforcement learning
    python recipes/tiny/chat.py checkpoint=runs/quickstart    # a run's folder, or any checkpoint folder

One vLLM replica and one jail. Nothing is remembered from one problem to the next: the agent has only ever seen one
problem at a time. An empty line gives a fresh held-out problem; Ctrl-D or Ctrl-C ends.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from engine.console.options import parse
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.rollout.chat_template import ChatTemplate
from engine.telemetry.watchdog import exit_process
from recipes.conversation import OnReplica, a_replica, converse, run, typed_lines, weights_folder
from recipes.tiny.task import MAX_TOKENS, MAX_TOOL_CALLS, SHIPPED, TOOL_NAME, prompts, python_tool
from sandbox import Sandbox, SandboxConfig
from sandbox.require import at_least, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    checkpoint: Annotated[Path, "folder of a checkpoint, or of a run that holds one"] = SHIPPED
    temperature: Annotated[float, "sampling temperature; 0 is greedy"] = 1.0
    seed: Annotated[int, "seed of the problems that an empty line gives"] = 0

    def __post_init__(self) -> None:
        require("temperature", self.temperature, at_least(0))
        weights_folder(self.checkpoint)


async def main(config: Config, console: Console) -> None:
    weights, problems = weights_folder(config.checkpoint), prompts("test", config.seed)
    chat = ChatTemplate.load(weights)
    async with AsyncExitStack() as stack:
        with console.status("starting the model and the jail"):
            sandbox = await stack.enter_async_context(Sandbox(SandboxConfig(slots=1)))
            settings = ReplicaConfig(checkpoint=str(weights), max_num_seqs=1, kv_blocks=64)
            replica = await stack.enter_async_context(a_replica(settings))
        tools = {TOOL_NAME: python_tool(sandbox)}
        console.print("A word problem, please; an empty line for one of mine, Ctrl-D to end.", style="bold")
        async for question in typed_lines():
            if not question:
                question = next(problems).messages[0]["content"]
                console.print(question, style="bold")
            speaker = OnReplica(chat, replica, max_tokens=MAX_TOKENS, temperature=config.temperature)
            await converse(question, speaker, tools, max_turns=MAX_TOOL_CALLS + 1, console=console)


if __name__ == "__main__":
    prepare_environment()
    exit_process(run(main(parse(Config, sys.argv[1:], description=__doc__), Console())))
