"""Serves a checkpoint behind OpenAI's and Anthropic's APIs, without a trainer.

With --tools a chat request that brings no tools is answered by the whole agent: the server runs the Python that the
model writes, in jails, and gives back the last message, with a field `trace` that says how it came about.

It serves when its address has appeared. Ctrl-C ends it with status 0; what keeps it from serving ends it with status 2
and one line: the cause, and what to do about it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from pathlib import Path

import uvloop

from engine.assembly.config import BLOCK, ServingConfig
from engine.assembly.parts import Parts
from engine.assembly.serving import serving
from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import ServerConfig, serve
from engine.gateway.session import SessionRules
from engine.gateway.tool_loop import ToolLoop
from engine.programs.begin import begin
from engine.programs.gateway_tools import ToolOptions
from engine.replica.config import ReplicaConfig
from engine.replica.port import ReplicaDied
from engine.rollout.chat_template import ChatConfig, TemplateError
from engine.telemetry.watchdog import exit_process
from sandbox import Limits, SandboxConfig, SandboxUnavailable
from sandbox.http.listener import Address, CannotListen
from sandbox.printable import printable

TOKEN_VARIABLE = "ROCSTAR_GATEWAY_TOKEN"
EXPECTED = (CannotListen, ReplicaDied, SandboxUnavailable, TemplateError, ValueError)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options. SystemExit for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.programs.gateway", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument(
        "--served-name",
        nargs="+",
        help="what clients call the model, the first name being what they are told (default: the folder's name)",
    )
    parser.add_argument("--replicas", type=int, default=1, help="vLLM engines (default: %(default)s)")
    parser.add_argument("--devices", default="", help="GPUs, by commas (default: none, the CPU)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of a replica (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="on the CPU")
    parser.add_argument(
        "--kv-blocks",
        type=int,
        help="of 32 tokens (default: what a GPU holds; on the CPU 8 conversations)",
    )
    parser.add_argument(
        "--max-tokens", type=int, help="of a conversation (default: 4096, or what the model has room for)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="where a request has none (%(default)s)")
    parser.add_argument("--seed", type=int, help="of sampling (default: a request is sampled anew each time)")
    parser.add_argument("--host", default="127.0.0.1", help="beyond loopback a token is required, and TLS is a proxy's")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one, which is printed")
    parser.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE, "").strip(),  # a line read from a file ends in a newline
        help=f"what clients must send; better given as {TOKEN_VARIABLE}, which other users cannot see",
    )
    tools = parser.add_argument_group("the agent (with --tools)")
    tools.add_argument("--tools", action="store_true", help="run the Python that the model writes, and answer at last")
    tools.add_argument("--stateful", action="store_true", help="calls of a request share their variables")
    tools.add_argument("--tool-name", default="python", help="what the model calls it (default: %(default)s)")
    tools.add_argument("--tool-schema", type=Path, help="JSON file with the tool as OpenAI's API has it, name included")
    tools.add_argument("--turns", type=int, default=10, help="of an answer (default: %(default)s)")
    tools.add_argument("--calls-per-turn", type=int, help="later ones are refused (default: any number)")
    tools.add_argument("--reply-chars", type=int, default=1000, help="of a tool's output (default: %(default)s)")
    tools.add_argument("--tool-wall-s", type=float, default=4.0, help="time limit of a call (default: %(default)s)")
    tools.add_argument("--slots", type=int, default=8, help="calls that run at once (default: %(default)s)")
    tools.add_argument("--system", help="a system message for conversations that have none")
    return parser.parse_args(arguments)


def room(checkpoint: Path) -> int:
    """Tokens that the model can read. Raises ValueError for a folder that is no checkpoint."""
    try:
        config = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--checkpoint {str(checkpoint)!r} has no readable config.json: {error}") from error
    return int(config.get("text_config", config).get("max_position_embeddings", 1 << 20))


def max_tokens(options: argparse.Namespace) -> int:
    """Raises ValueError for more than the model has room for."""
    most = room(options.checkpoint) - BLOCK
    if options.max_tokens is None:
        return min(4096, most)
    if options.max_tokens > most:
        raise ValueError(f"--max-tokens must be at most {most} for this model, got {options.max_tokens}")
    return options.max_tokens


def serving_config(options: argparse.Namespace) -> ServingConfig:
    """Raises ValueError naming an option."""
    numbers = [device.strip() for device in options.devices.split(",") if device.strip()]
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--devices must be numbers with commas between them, got {options.devices!r}")
    devices = tuple(map(int, numbers))
    tokens = max_tokens(options)
    kv_blocks = options.kv_blocks or (None if devices else 8 * -(-tokens // BLOCK))
    limits = Limits(wall_s=options.tool_wall_s, cpu_s=options.tool_wall_s)
    return ServingConfig(
        checkpoint=options.checkpoint,
        rollout=tool_options(options).budget(max_tokens=tokens, temperature=options.temperature),
        replica=ReplicaConfig(
            checkpoint=str(options.checkpoint),
            max_model_len=tokens + BLOCK,
            kv_blocks=kv_blocks,
            dtype=options.dtype,
        ),
        replicas=options.replicas,
        devices=devices,
        tensor_parallel=options.tensor_parallel,
        chat=ChatConfig(system=options.system),
        sandbox=SandboxConfig(slots=options.slots, limits=limits) if options.tools else None,
        seed=options.seed or 0,
    )


def tool_options(options: argparse.Namespace) -> ToolOptions:
    """Raises ValueError."""
    return ToolOptions(
        name=options.tool_name,
        schema=options.tool_schema,
        stateful=options.stateful,
        reply_chars=options.reply_chars,
        turns=options.turns,
        calls_per_turn=options.calls_per_turn,
    )


def tool_loop(options: argparse.Namespace, served: Parts) -> ToolLoop | None:
    if not options.tools:
        return None
    return ToolLoop(served.rollouts([tool_options(options).tool(served.sandbox)]))


async def run(options: argparse.Namespace) -> str | None:
    """Serves until SIGINT or SIGTERM; what kept it from serving, if anything did."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        loop.remove_signal_handler(number)  # the second one ends us at once
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    model, *also = options.served_name or [options.checkpoint.resolve().name]
    try:
        address = Address(host=options.host, port=options.port, token=options.token)
        server = ServerConfig(model=model, also=tuple(also), address=address)
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
                gc.freeze()  # what was imported stays; each full collection would walk a million objects of it
                print(f"{model} at {url}/v1 (OpenAI) and {url} (Anthropic)", flush=True)
                await asyncio.Event().wait()  # replicas that are all dead end it too
    except EXPECTED as error:
        return str(error)
    except asyncio.CancelledError:  # by `stop`
        pass
    return None


def main() -> int:
    begin()
    options = parse()
    with contextlib.suppress(KeyboardInterrupt):  # before the loop runs
        failed = uvloop.run(run(options))
        if failed is not None:
            print(printable(f"engine.gateway: {' '.join(failed.split())}"), file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    exit_process(main())
