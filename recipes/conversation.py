"""Talks to a model that calls tools: shows its turns as they come, runs its calls and answers them.

    speaker = OnReplica(chat, replica, max_tokens=4096, temperature=0.6)
    await converse("What is 6 * 7?", speaker, {"python": tool}, max_turns=10, console=Console())

A `Speaker` says the turns: `OnReplica` here, token by token on a replica of ours, or `OnEndpoint` of
`recipes.rstar2.parts.sampling.endpoint` behind an OpenAI-compatible server. What a chat program needs beside it is here
too: lines that are typed, a replica, the folder of a checkpoint, and one line for what is no bug.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console

from engine.ports import StatefulTool, Tool
from engine.replica.config import ReplicaConfig
from engine.replica.port import Generator, ReplicaDied, Sampling
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate, Message, TemplateError
from engine.rollout.tool_call_parser import MalformedCall, ToolCall, ToolCallParser
from engine.run.workspace import workspace
from engine.tools.python_tool import schema
from sandbox import SandboxUnavailable
from sandbox.printable import print_logs, printable

Show = Callable[[str], None]
Ended = Literal["answer", "tokens", "turns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A turn of the model. whole: it ended by itself, not for want of tokens."""

    calls: list[ToolCall | MalformedCall]
    whole: bool


class Speaker(Protocol):
    """A model in a conversation, which it remembers."""

    def hear_question(self, text: str) -> None: ...

    def hear_replies(self, replies: list[str]) -> None:
        """Gives it the replies to the first calls of its last turn, in their order; other calls were not run."""
        ...

    async def say(self, show: Show) -> Said:
        """Returns its next turn; `show` gets the text as it comes."""
        ...


async def converse(
    question: str,
    speaker: Speaker,
    tools: Mapping[str, Tool],
    *,
    max_turns: int,
    max_calls_per_turn: int | None = None,
    console: Console,
) -> Ended:
    """Leads from a question to its answer, shown on the console as it comes, and returns what ended it.

    max_calls_per_turn: later calls of a turn are dropped without a reply. Raises SandboxUnavailable for a call that was
    lost, which the model must not read.
    """

    def show(text: str) -> None:
        console.print(printable(text), end="", markup=False, highlight=False, soft_wrap=True)

    speaker.hear_question(question)
    for _ in range(max_turns):
        turn = await speaker.say(show)
        console.print()
        if not turn.whole:
            console.print("(out of tokens)", style="red")
            return "tokens"
        if not turn.calls:
            return "answer"
        called = turn.calls[:max_calls_per_turn]
        replies = [await _reply(call, tools) for call in called]
        for call, reply in zip(called, replies, strict=True):
            name = "nobody" if isinstance(call, MalformedCall) else call.name
            line = printable(f"  {name} says: {reply}")
            console.print(line, style="green", markup=False, highlight=False, soft_wrap=True)
        speaker.hear_replies(replies)
    console.print("(out of turns)", style="red")
    return "turns"


async def _reply(call: ToolCall | MalformedCall, tools: Mapping[str, Tool]) -> str:
    """Returns what the model reads of one call."""
    if isinstance(call, MalformedCall):
        return f"FormatError: {call.reason}"
    if call.name not in tools:
        return f"NameError: no tool {call.name!r} (there is: {', '.join(tools)})"
    reply = await tools[call.name](call.arguments)
    if reply.outcome == "lost":  # our failure, not the model's
        raise SandboxUnavailable(f"the sandbox lost a call: {reply.text}")
    return reply.text


class OnReplica:
    """A model on a replica. Within a question nothing that it sampled is tokenised again.

    token_ids: the conversation so far. max_tokens: of the whole conversation.
    """

    def __init__(self, chat: ChatTemplate, replica: Generator, *, max_tokens: int, temperature: float) -> None:
        self.token_ids: list[int] = []
        self._chat, self._replica = chat, replica
        self._max_tokens, self._temperature = max_tokens, temperature
        self._messages: list[Message] = []

    def hear_question(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        self.token_ids = self._chat.prompt_ids(self._messages)

    def hear_replies(self, replies: list[str]) -> None:
        self._messages += [{"role": "tool", "content": reply} for reply in replies]
        if self.token_ids[-1] != self._chat.end_of_turn:  # the model may have another end token
            self.token_ids.append(self._chat.end_of_turn)
        self.token_ids += self._chat.tool_ids(replies)

    async def say(self, show: Show) -> Said:
        show(self._chat.prefill)
        parser, stream = ToolCallParser(), self._chat.stream()
        calls: list[ToolCall | MalformedCall] = []
        text = ""
        finish: str | None = "length"
        if len(self.token_ids) < self._max_tokens:
            async for delta in self._replica.generate(list(self.token_ids), self._sampling, "chat"):
                finish = delta.finish
                for token in delta.token_ids:
                    self.token_ids.append(token)
                    piece = stream.step([token])
                    show(piece.removesuffix(self._chat.end_of_turn_text))
                    calls += parser.feed(piece)
                    text += piece
        content = self._chat.prefill + text.removesuffix(self._chat.end_of_turn_text)
        self._messages.append({"role": "assistant", "content": content})
        return Said(calls=[*calls, *parser.finish()], whole=finish == "stop")

    @property
    def _sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self._max_tokens - len(self.token_ids),
            temperature=self._temperature,
            seed=None,
            stop_token_ids=(self._chat.end_of_turn,),
        )


@asynccontextmanager
async def a_replica(config: ReplicaConfig) -> AsyncIterator[Replica]:
    """Starts a replica that serves the checkpoint's weights. Raises ReplicaDied."""
    with workspace():
        replica = Replica(config, index=0, core=None, on_step=lambda index, sample: None)
        try:
            await replica.start()
            yield replica
        finally:
            await replica.shutdown()


@asynccontextmanager
async def opened(tool: Tool | StatefulTool) -> AsyncIterator[Mapping[str, Tool]]:
    """Yields the tool by its name, with a state of its own where it keeps one. Raises BadInput for a world."""
    schema(tool)
    if callable(tool):
        yield {tool.name: tool}
    else:
        async with tool.open() as one:
            yield {tool.name: one}


def weights_folder(checkpoint: Path) -> Path:
    """Returns the folder that holds the weights: this one or one directly in it, as in a run's. Raises ValueError."""
    folders = [checkpoint, *sorted(path for path in checkpoint.glob("*") if path.is_dir())]
    folders = [path for path in folders if (path / "tokenizer_config.json").is_file()]
    if not folders:
        raise ValueError(
            f"checkpoint: no tokenizer_config.json in {str(checkpoint)!r} nor one folder below. Fix: give a Hugging "
            "Face folder, or that of a run that has ended"
        )
    return folders[0]


async def typed_lines() -> AsyncIterator[str]:
    """Yields the lines of standard input until its end.

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


def run(program: Coroutine[Any, Any, None], *expected: type[Exception]) -> int:
    """Runs a chat program to its end, Ctrl-C included; returns the exit code.

    expected: what ends it with one line, beside what can happen to any of them.
    """
    told: tuple[type[Exception], ...] = (ReplicaDied, SandboxUnavailable, TemplateError, *expected)
    print_logs()
    try:
        asyncio.run(program)
    except KeyboardInterrupt:
        print()
        return 130
    except told as failure:
        print(printable(f"error: {failure}"), file=sys.stderr)
        return 1
    return 0
