"""Talk to a model that solves problems with Python: what it says and what its code prints stream in the terminal.

    python recipes/rstar2/chat.py checkpoint=runs/rl                        on a vLLM replica of ours
    python recipes/rstar2/chat.py url=http://localhost:8000 model=NAME      on any OpenAI-compatible server
    python recipes/rstar2/chat.py checkpoint=runs/rl prompt="How many primes are below 1000?"

Python runs in a jail here, also for a server elsewhere. The tool is the one that the checkpoint's run had; one that
keeps its variables (`stateful=true`) keeps them for the length of a conversation. An empty line begins a new
conversation; Ctrl-D or Ctrl-C ends. A server's key is taken from the environment (OPENAI_API_KEY).
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from engine.console.options import parse
from engine.ports import StatefulTool, Tool
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.rollout.chat_template import ChatTemplate
from engine.telemetry.watchdog import exit_process
from engine.tools.python_tool import schema
from recipes.conversation import OnReplica, Speaker, a_replica, converse, opened, run, typed_lines, weights_folder
from recipes.rstar2.parts.sampling.endpoint import EndpointFailed, OnEndpoint, check_url, connect, model_of
from recipes.rstar2.parts.sampling.protocol import PROTOCOLS, Protocol
from sandbox import Sandbox, SandboxConfig
from sandbox.require import at_least, none_or, require, require_fields

BLOCK = 32  # tokens of a block of the KV cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    checkpoint: Annotated[Path | None, "folder of a checkpoint, or of a run that holds one"] = None
    url: Annotated[str, "address of an OpenAI-compatible server, in place of a checkpoint"] = ""
    model: Annotated[str, "the server's name for the model; may be left out where it has one only"] = ""
    prompt: Annotated[str, "one question; by default they are typed"] = ""
    protocol: Annotated[
        Literal["report", "release"] | None, "tool, template and the defaults below; none: the run's, else the report's"
    ] = None
    reason: Annotated[bool, "problems are solved; false: any conversation, without the system text and <reason>"] = True
    stateful: Annotated[
        bool | None, "Python keeps its variables from call to call; none: as in the checkpoint's run, with url yes"
    ] = None
    temperature: Annotated[float | None, "sampling temperature, 0 is greedy; none: the evaluation's"] = None
    max_tokens: Annotated[
        int | None, "tokens of a whole conversation; none: the evaluation's, or what there is room for"
    ] = None
    turns: Annotated[int | None, "turns of the model until its answer; none: the evaluation's"] = None
    devices: Annotated[tuple[int, ...], "GPU of the replica; none: the CPU"] = ()

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (not self.url):
            raise ValueError("checkpoint and url: one of them must be given. Fix: checkpoint=FOLDER, or url=http://...")
        if self.checkpoint is not None:
            weights_folder(self.checkpoint)
        else:
            check_url(self.url)
        require("temperature", self.temperature, none_or(at_least(0)))
        require_fields(self, none_or(at_least(1)), "max_tokens", "turns")

    @property
    def of_protocol(self) -> Protocol:
        return PROTOCOLS[self.protocol or _of_run(self.checkpoint).get("protocol", "report")]

    @property
    def keeps_variables(self) -> bool:
        if self.stateful is not None:
            return self.stateful
        return bool(self.url) or _of_run(self.checkpoint).get("stateful", False)

    @property
    def sampling_temperature(self) -> float:
        return self.of_protocol.eval_temperature if self.temperature is None else self.temperature


async def main(config: Config, console: Console) -> None:
    async with AsyncExitStack() as stack:
        with console.status("starting the model and the jail"):
            sandbox = Sandbox(SandboxConfig(slots=1))
            tool = config.of_protocol.tool(sandbox, stateful=config.keeps_variables)
            begin = await (_on_endpoint if config.url else _on_replica)(config, tool, stack)
            await stack.enter_async_context(sandbox)
        if config.prompt:
            await _talk(_only(config.prompt), begin(), tool, config, console)
            return
        console.print("A problem, please; an empty line for a new conversation, Ctrl-D to end.", style="bold")
        lines = typed_lines()
        while await _talk(lines, begin(), tool, config, console):
            console.print("A new conversation.", style="bold")


async def _talk(
    lines: AsyncIterator[str], speaker: Speaker, tool: Tool | StatefulTool, config: Config, console: Console
) -> bool:
    """Holds one conversation. Returns whether another one is to follow."""
    async with opened(tool) as tools:
        async for question in lines:
            if not question:
                return True
            await converse(
                question,
                speaker,
                tools,
                max_turns=config.turns or config.of_protocol.eval_turns,
                max_calls_per_turn=config.of_protocol.calls_per_turn,
                console=console,
            )
    return False


async def _only(prompt: str) -> AsyncIterator[str]:
    yield prompt


async def _on_replica(config: Config, tool: Tool | StatefulTool, stack: AsyncExitStack) -> Callable[[], Speaker]:
    """Begins conversations on a replica of ours. Raises TemplateError or ReplicaDied."""
    assert config.checkpoint is not None
    weights = weights_folder(config.checkpoint)
    chat = ChatTemplate.load(weights, config.of_protocol.chat(reason=config.reason)).with_tools([schema(tool)])
    max_tokens = min(config.max_tokens or config.of_protocol.eval_max_tokens, _context(weights))
    settings = ReplicaConfig(
        checkpoint=str(weights),
        max_model_len=max_tokens,
        max_num_seqs=1,
        kv_blocks=None if config.devices else max_tokens // BLOCK + 2,
        devices=config.devices,
        dtype="bfloat16" if config.devices else "float32",
    )
    replica = await stack.enter_async_context(a_replica(settings))
    return lambda: OnReplica(chat, replica, max_tokens=max_tokens, temperature=config.sampling_temperature)


async def _on_endpoint(config: Config, tool: Tool | StatefulTool, stack: AsyncExitStack) -> Callable[[], Speaker]:
    """Begins conversations with a server's model. Raises EndpointFailed."""
    client = await stack.enter_async_context(connect(config.url))
    model = await model_of(client, config.model)
    return lambda: OnEndpoint(
        client=client,
        model=model,
        tools=[schema(tool)],
        temperature=config.sampling_temperature,
        max_tokens=config.max_tokens,
        template_arguments={} if config.reason else {"reason": False},
    )


def _of_run(checkpoint: Path | None) -> dict[str, Any]:
    """Returns the options of the run that left the checkpoint; they say which tool its model was taught.

    {}: unknown.
    """
    for folder in () if checkpoint is None else (checkpoint, checkpoint.resolve().parent):
        with suppress(OSError, ValueError, AttributeError):
            options = json.loads((folder / "config.json").read_text())
            if options.get("protocol") in PROTOCOLS:
                return options
    return {}


def _context(weights: Path) -> int:
    """Returns the number of positions that the model has."""
    config = json.loads((weights / "config.json").read_text())
    return config.get("text_config", config)["max_position_embeddings"]


if __name__ == "__main__":
    prepare_environment()
    exit_process(run(main(parse(Config, sys.argv[1:], description=__doc__), Console()), EndpointFailed))
