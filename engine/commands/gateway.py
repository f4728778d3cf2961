"""Serves a checkpoint behind OpenAI's and Anthropic's APIs, without a trainer: `rocstar gateway CHECKPOINT`.

With tools=true a chat request that brings no tools is answered by the whole agent: the server runs the Python that the
model writes, in jails, and returns the last message, with a field `trace` that says how it came about.

It serves once it has printed its address. Ctrl-C ends it with status 0. If it cannot serve, it ends with status 2 and
one line that names the cause and what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import uvloop

from engine.assembly.config import BLOCK, ServingConfig
from engine.assembly.parts import Parts
from engine.assembly.serving import serving
from engine.commands.gateway_tools import ToolOptions
from engine.console.options import Positional, parse
from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import ServerConfig, serve
from engine.gateway.session import SessionRules
from engine.gateway.tool_loop import ToolLoop
from engine.programs.begin import begin
from engine.replica.config import ReplicaConfig
from engine.replica.port import ReplicaDied
from engine.rollout.chat_template import ChatConfig, TemplateError
from sandbox import Limits, SandboxConfig, SandboxUnavailable
from sandbox.http.listener import Address, CannotListen
from sandbox.printable import printable

TOKEN_VARIABLE = "ROCSTAR_GATEWAY_TOKEN"
EXPECTED = (CannotListen, ReplicaDied, SandboxUnavailable, TemplateError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Options:
    checkpoint: Annotated[Path, Positional("Hugging Face folder")]
    served_name: Annotated[
        tuple[str, ...], "names by which clients may ask for it; they are told the first; empty: the folder's name"
    ] = ()
    replicas: Annotated[int, "vLLM engines"] = 1
    devices: Annotated[tuple[int, ...], "numbers of GPUs; empty: the CPU"] = ()
    tensor_parallel: Annotated[int, "GPUs of a replica"] = 1
    dtype: Annotated[Literal["float32", "bfloat16"], "precision of engines on the CPU"] = "float32"
    kv_blocks: Annotated[
        int | None, "KV blocks of 32 tokens; none: all that fit on a GPU, 8 conversations on the CPU"
    ] = None
    max_tokens: Annotated[int | None, "most tokens of a conversation; none: 4096, or what the model has room for"] = (
        None
    )
    temperature: Annotated[float, "temperature of requests that name none"] = 1.0
    seed: Annotated[int | None, "seed of requests that name none; none: they are sampled anew each time"] = None
    system: Annotated[str | None, "system message of conversations that have none"] = None
    host: Annotated[str, "address to listen on; beyond loopback a token is required, and TLS is a proxy's task"] = (
        "127.0.0.1"
    )
    port: Annotated[int, "port to listen on; 0: any free one, which is printed"] = 8000
    token: Annotated[str, "token of clients; better given as ROCSTAR_GATEWAY_TOKEN, which other users cannot see"] = ""
    tools: Annotated[bool, "run the Python that the model writes, and answer with its last message"] = False
    tool_wall_s: Annotated[float, "time limit of a call"] = 4.0
    slots: Annotated[int, "calls that run at once"] = 8
    tool: ToolOptions = field(default_factory=ToolOptions)


def room(checkpoint: Path) -> int:
    """Returns how many tokens the model can read. Raises ValueError for a folder that is no checkpoint."""
    try:
        config = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {str(checkpoint)!r} has no readable config.json: {error}") from error
    return int(config.get("text_config", config).get("max_position_embeddings", 1 << 20))


def max_tokens(options: Options) -> int:
    """Returns the most tokens of a conversation. Raises ValueError for more than the model has room for."""
    most = room(options.checkpoint) - BLOCK
    if options.max_tokens is None:
        return min(4096, most)
    if options.max_tokens > most:
        raise ValueError(f"max_tokens must be at most {most} for this model, got {options.max_tokens}")
    return options.max_tokens


def serving_config(options: Options) -> ServingConfig:
    """Raises ValueError naming an option."""
    tokens = max_tokens(options)
    kv_blocks = options.kv_blocks
    if kv_blocks is None and not options.devices:
        kv_blocks = 8 * -(-tokens // BLOCK)
    limits = Limits(wall_s=options.tool_wall_s, cpu_s=options.tool_wall_s)
    return ServingConfig(
        checkpoint=options.checkpoint,
        rollout=options.tool.budget(max_tokens=tokens, temperature=options.temperature),
        replica=ReplicaConfig(
            checkpoint=str(options.checkpoint),
            max_model_len=tokens + BLOCK,
            kv_blocks=kv_blocks,
            dtype=options.dtype,
        ),
        replicas=options.replicas,
        devices=options.devices,
        tensor_parallel=options.tensor_parallel,
        chat=ChatConfig(system=options.system),
        sandbox=SandboxConfig(slots=options.slots, limits=limits) if options.tools else None,
        seed=options.seed or 0,
    )


def server_config(options: Options) -> ServerConfig:
    """Raises ValueError naming an option."""
    model, *also = options.served_name or [options.checkpoint.resolve().name]
    token = options.token or os.environ.get(TOKEN_VARIABLE, "").strip()  # a line read from a file ends in a newline
    address = Address(host=options.host, port=options.port, token=token)
    return ServerConfig(model=model, also=tuple(also), address=address)


def tool_loop(options: Options, served: Parts) -> ToolLoop | None:
    return ToolLoop(served.rollouts([options.tool.tool(served.sandbox)])) if options.tools else None


async def run(options: Options) -> str | None:
    """Serves until SIGINT or SIGTERM. Returns the error that kept it from serving, if any."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        loop.remove_signal_handler(number)  # a second signal ends the process at once
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        server = server_config(options)
        config = serving_config(options)
        parts = "vLLM engine" if options.replicas == 1 else f"{options.replicas} vLLM engines"
        print(f"starting {parts} with {options.checkpoint}{' and the sandbox' if options.tools else ''}", flush=True)
        async with serving(config) as served:
            rules = SessionRules(
                max_tokens=config.rollout.max_tokens, temperature=options.temperature, seed=options.seed
            )
            gateway = Gateway(served.fleet, served.chat, served.timeline, GatewayConfig(rules=rules))
            async with serve(gateway, server, tool_loop=tool_loop(options, served)) as url:
                gc.collect()
                gc.freeze()  # a full collection would walk the million objects of what is imported
                print(f"{server.model} at {url}/v1 (OpenAI) and {url} (Anthropic)", flush=True)
                await asyncio.Event().wait()  # ends with an error if all replicas die
    except EXPECTED as error:
        return str(error)
    except asyncio.CancelledError:  # `stop` did it
        pass
    return None


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 if it was ended, 2 if it could not serve."""
    options = parse(Options, argv, program="rocstar gateway", description=__doc__)
    begin()
    with contextlib.suppress(KeyboardInterrupt):  # before the loop runs
        error = uvloop.run(run(options))
        if error is not None:
            print(printable(f"rocstar gateway: {' '.join(error.split())}"), file=sys.stderr)
            return 2
    return 0
