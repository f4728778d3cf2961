"""Type a word problem and watch the tiny agent call Python.

    python recipes/tiny/chat.py                           # the agent before reinforcement learning
    python recipes/tiny/chat.py checkpoint=runs/quickstart    # a run's folder, or any checkpoint folder

One vLLM replica and one jail. Nothing is remembered from one problem to the next: the agent has only ever seen one
problem at a time. An empty line gives a fresh held-out problem; Ctrl-D or Ctrl-C ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run in place: the packages lie in the repository root

from rich.console import Console

from engine.console.options import parse
from engine.ports import Tool
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import ReplicaDied, Sampling
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.python_tool import PythonTool
from engine.rollout.tool_call_parser import MalformedCall, ToolCall, ToolCallParser
from engine.run.workspace import workspace
from engine.telemetry.watchdog import exit_process
from recipes.tiny.task import MAX_TOKENS, MAX_TOOL_CALLS, SHIPPED, TOOL_NAME, prompts
from sandbox import Sandbox, SandboxConfig, SandboxUnavailable


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    checkpoint: Annotated[Path, "folder of a checkpoint, or of a run that holds one"] = SHIPPED
    temperature: Annotated[float, "sampling temperature; 0 is greedy"] = 1.0
    seed: Annotated[int, "seed of the problems that an empty line gives"] = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, not {self.temperature}")

    @property
    def weights(self) -> Path:
        """The folder that holds the weights: `checkpoint` or a folder directly in it."""
        found = [self.checkpoint, *sorted(path for path in self.checkpoint.glob("*") if path.is_dir())]
        found = [path for path in found if (path / "tokenizer_config.json").is_file()]
        if not found:
            raise ValueError(f"checkpoint {str(self.checkpoint)!r}: no tokenizer_config.json there or one folder below")
        return found[0]


async def main(config: Config, console: Console) -> None:
    weights, problems = config.weights, prompts("test", config.seed)
    chat = ChatTemplate.load(weights)
    settings = ReplicaConfig(checkpoint=str(weights), max_num_seqs=1, kv_blocks=64)
    async with AsyncExitStack() as stack:
        stack.enter_context(workspace())
        with console.status("starting the model and the jail"):
            tool = PythonTool(await stack.enter_async_context(Sandbox(SandboxConfig(slots=1))), TOOL_NAME)
            replica = Replica(settings, index=0, core=None, on_step=lambda index, sample: None)
            stack.push_async_callback(replica.shutdown)
            await replica.start()
        console.print("A word problem, please; an empty line for one of mine, Ctrl-D to end.", style="bold")
        async for question in _typed_lines():
            if not question:
                question = next(problems).messages[0]["content"]
                console.print(question, style="bold")
            await episode(question, chat, replica, tool, config.temperature, console)


async def episode(
    question: str, chat: ChatTemplate, replica: Replica, tool: Tool, temperature: float, console: Console
) -> list[int]:
    """One problem from question to answer, printed as it is sampled; returns all its token ids."""
    ids = chat.prompt_ids([{"role": "user", "content": question}])
    for turn in range(MAX_TOOL_CALLS + 1):
        if len(ids) >= MAX_TOKENS:
            break
        limits = Sampling(
            max_tokens=MAX_TOKENS - len(ids),
            temperature=temperature,
            seed=None,
            stop_token_ids=(chat.end_of_turn,),
        )
        parser, text_stream, calls = ToolCallParser(), chat.stream(), []
        finish = None
        async for delta in replica.generate(list(ids), limits, f"{id(ids)}-{turn}"):
            ids += delta.token_ids
            finish = delta.finish
            for token in delta.token_ids:
                text = text_stream.step([token])
                console.print(
                    text.removesuffix(chat.end_of_turn_text), end="", markup=False, highlight=False, soft_wrap=True
                )
                calls += parser.feed(text)
        console.print()
        calls += parser.finish()
        if finish != "stop":
            break
        if not calls:
            return ids
        replies = [await _reply(call, tool) for call in calls]
        for reply in replies:
            console.print(f"  python says: {reply}", style="green", markup=False, highlight=False)
        ids += [chat.end_of_turn] * (ids[-1] != chat.end_of_turn)  # the model may have another end token
        ids += chat.tool_ids(replies)
    console.print("(out of tokens)" if len(ids) >= MAX_TOKENS or finish != "stop" else "(out of calls)", style="red")
    return ids


async def _reply(call: ToolCall | MalformedCall, tool: Tool) -> str:
    """What the model reads of one call."""
    if isinstance(call, MalformedCall):
        return f"FormatError: {call.reason}"
    if call.name != tool.name:
        return f"NameError: no tool {call.name!r} (there is: {tool.name})"
    reply = await tool(call.arguments)
    if reply.outcome == "lost":  # our failure, not the model's: it must not read it
        raise SandboxUnavailable(f"the sandbox lost a call: {reply.text}")
    return reply.text


async def _typed_lines() -> AsyncIterator[str]:
    """Lines of standard input until its end.

    A daemon thread reads them from the bare file descriptor: it can neither delay the end of the program nor hold a
    lock of `sys.stdin` then, and it works for a terminal, a pipe and a file.
    """
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def read() -> None:
        with (
            open(0, "rb", buffering=0, closefd=False) as stdin,
            contextlib.suppress(RuntimeError),
        ):  # the loop has ended
            for line in stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line.decode(errors="replace").strip())
            loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while (line := await lines.get()) is not None:
        yield line


if __name__ == "__main__":
    prepare_environment()
    options = parse(Config, sys.argv[1:])
    try:
        asyncio.run(main(options, Console()))
    except KeyboardInterrupt:
        print()
        exit_process(130)
    except (ValueError, SandboxUnavailable, ReplicaDied) as failure:
        print(f"error: {failure}", file=sys.stderr)
        exit_process(1)
