"""What does a turn through the gateway cost, beside the built-in loop and beside vLLM's own server?

    rocstar bench gateway [rounds=5] [only=built_in,gateway,vllm] [workloads=agent,long] [vllm=PROGRAM]

CPU of the front end alone, at 256 conversations at once on one replica: neither the engine's process is counted nor the
clients, which have a process of their own and are the same for both servers.

built_in  `Rollouts`: no HTTP at all
gateway   `rocstar gateway`, each conversation under a key of its own
vllm      `vllm serve` (`make serve-env`), without logs and statistics; it parses tool calls too

agent: problems of the tiny agent, some 15 tokens a turn. long: one turn of some 350 tokens, by a model of that shape
with random weights, which is shown no tool: its text is noise. Servers are measured with and without streaming. Rounds
are interleaved.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bench import ROOT
from bench.benches.gateway.servers import Measured, Way, built_in, gateway, vllm
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import Kind, count, microseconds, milliseconds, ratio, share
from bench.measuring.terminal import say
from recipes.tiny.task import SHIPPED
from sandbox.require import at_least, require_fields

WayName = Literal["built_in", "gateway", "vllm"]
Workload = Literal["agent", "long"]
VLLM = ROOT / ".venv-serve" / "bin" / "vllm"
RANDOM = Path("runs/bench/gateway/random")
SEED = 0

Mode = tuple[Workload, WayName, bool]  # workload, way, stream


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "loads of each way"] = 5
    only: Annotated[tuple[WayName, ...], "ways of serving; none: all that are there"] = ()
    workloads: Annotated[tuple[Workload, ...], "conversations"] = ("agent", "long")
    sessions: Annotated[int, "conversations at once"] = 256
    conversations: Annotated[int, "conversations of a load of short turns"] = 1024
    vllm: Annotated[Path, "vLLM's program"] = VLLM

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "sessions", "conversations")
        if "vllm" in self.only and not self.vllm.is_file():
            raise ValueError(f"vllm must be a program, got {str(self.vllm)!r}. Fix: make serve-env")


METRICS = {
    "token_s": microseconds("per token", "CPU of the front end per sampled token"),
    "turn_s": milliseconds("per turn", "CPU of the front end", form=".2f", kind=Kind.CPU),
    "over_gateway": ratio("/ gateway", "CPU per token over the gateway's in the same round, streamed alike"),
    "tokens_per_turn": count("tokens per turn", "sampled", form=".1f"),
    "prefix_hits": share("prefix hits", "share of the prompts' tokens that were in the KV cache", form=".0f"),
}


def measure(options: Options, keep: Keep) -> None:
    order = random.Random(SEED)
    names: tuple[WayName, ...] = options.only or ("built_in", "gateway", "vllm")
    if not options.only and not options.vllm.is_file():
        say("vllm is left out: there is no .venv-serve. Fix: make serve-env")
        names = ("built_in", "gateway")
    with ExitStack() as stack:
        ways: dict[tuple[Workload, WayName], Way] = {}
        for workload in options.workloads:
            for name in names:
                say(f"{name} is started for {workload}")
                try:
                    ways[workload, name] = stack.enter_context(_way(name, workload, options))
                except RuntimeError as error:
                    raise BenchFailed(str(error)) from error
        modes: list[Mode] = [
            (workload, name, stream)
            for workload, name in ways
            for stream in ((False,) if name == "built_in" else (False, True))
        ]
        for workload, name, stream in modes:  # caches and code are warm then
            ways[workload, name].load(options.sessions // 4, seed=1000, stream=stream)
        for number in range(options.rounds):
            measured: dict[Mode, Measured] = {}
            for mode in order.sample(modes, len(modes)):
                workload, name, stream = mode
                conversations = options.conversations if workload == "agent" else options.sessions
                # Each load has problems of its own: the prefix cache holds nothing of them from another load.
                seed = 1 + number * len(modes) + modes.index(mode)
                measured[mode] = ways[workload, name].load(conversations, seed, stream=stream)
                say(f"round {number + 1} of {options.rounds}: {case_of(mode)}")
            keep({case_of(mode): figures(measured, mode) for mode in modes})


def _way(name: WayName, workload: Workload, options: Options) -> AbstractContextManager[Way]:
    checkpoint = SHIPPED if workload == "agent" else random_weights()
    if name == "vllm":
        return vllm(options.vllm, checkpoint, options.sessions, workload)
    return (built_in if name == "built_in" else gateway)(checkpoint, options.sessions, workload)


def random_weights() -> Path:
    """Returns a checkpoint of the tiny agent's shape with random weights, which is made if it is not there."""
    if not (RANDOM / "config.json").is_file():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(SEED)
        AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(RANDOM)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHIPPED)).save_pretrained(RANDOM)
    return RANDOM


def case_of(mode: Mode) -> str:
    workload, name, stream = mode
    return f"{workload}/{name}{'/streamed' if stream else ''}"


def figures(measured: Mapping[Mode, Measured], mode: Mode) -> dict[str, float]:
    load = measured[mode]
    values = {
        "token_s": load.token_s,
        "turn_s": load.turn_s,
        "tokens_per_turn": load.sampled_tokens / load.turns,
        "prefix_hits": load.prefix_hits,
    }
    ours = measured.get((mode[0], "gateway", mode[2]))
    return values if ours is None else {**values, "over_gateway": load.token_s / ours.token_s}


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    quick={"rounds": "1", "conversations": "256", "workloads": "agent"},
)
