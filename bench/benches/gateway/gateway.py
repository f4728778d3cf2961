"""What does a turn through the gateway cost, beside the built-in loop and beside vLLM's own server?

    rocstar bench gateway [rounds=3] [only=built_in,gateway,vllm] [workloads=agent,long] [sizes=64,256,1024]

CPU of the front end alone, on one replica: neither the engine's process is counted nor the clients, which have a
process of their own and are the same for both servers. A case is WORKLOAD/CONVERSATIONS AT ONCE/WAY/API.

built_in  `Rollouts`: no HTTP at all
gateway   `rocstar gateway`, to clients that name no session
vllm      `vllm serve` (`make serve-env`), without logs and statistics; it parses tool calls too

chat and responses send the whole conversation with each request; continued names the response before it instead, which
vLLM's server keeps only if it is told to, so it is the gateway's alone. Each is measured with and without streaming.

agent: problems of the tiny agent, some 15 tokens a turn. long: one turn of some 350 tokens, by a model of that shape
with random weights, which is shown no tool: its text is noise; by the smallest number of clients only. Rounds are
interleaved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from bench import ROOT
from bench.benches.gateway.dialects import Api
from bench.benches.gateway.servers import Measured, Way, built_in, gateway, vllm
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import Kind, count, microseconds, milliseconds, ratio, share
from bench.measuring.terminal import say
from recipes.tiny.task import SHIPPED
from sandbox.require import at_least, require, require_fields

WayName = Literal["built_in", "gateway", "vllm"]
Workload = Literal["agent", "long"]
VLLM = ROOT / ".venv-serve" / "bin" / "vllm"
RANDOM = Path("runs/bench/gateway/random")
SEED = 0
APIS: dict[tuple[Workload, WayName], tuple[Api, ...]] = {
    ("agent", "gateway"): ("chat", "responses", "continued"),
    ("agent", "vllm"): ("chat", "responses"),
    ("long", "gateway"): ("chat", "responses"),
    ("long", "vllm"): ("chat", "responses"),
}


class Mode(NamedTuple):
    """What is measured in one load. sessions: conversations at once. The built-in loop has no API, here "chat"."""

    workload: Workload
    sessions: int
    way: WayName
    api: Api = "chat"
    stream: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "loads of each case"] = 3
    only: Annotated[tuple[WayName, ...], "ways of serving; none: all that are there"] = ()
    workloads: Annotated[tuple[Workload, ...], "conversations"] = ("agent", "long")
    sizes: Annotated[tuple[int, ...], "conversations at once"] = (64, 256, 1024)
    conversations: Annotated[int, "conversations of a load of short turns, at least"] = 512
    vllm: Annotated[Path, "vLLM's program"] = VLLM

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "conversations")
        require("sizes", min(self.sizes, default=0), at_least(1))
        if "vllm" in self.only and not self.vllm.is_file():
            raise ValueError(f"vllm must be a program, got {str(self.vllm)!r}. Fix: make serve-env")

    def conversations_of(self, mode: Mode) -> int:
        """Returns how many conversations a load has."""
        return max(self.conversations, mode.sessions) if mode.workload == "agent" else mode.sessions


METRICS = {
    "token_s": microseconds("per token", "CPU of the front end per sampled token"),
    "turn_s": milliseconds("per turn", "CPU of the front end", form=".2f", kind=Kind.CPU),
    "over_gateway": ratio(
        "/ gateway",
        "CPU per token over the gateway's in the same round, API and streaming alike; the loop's over chat's",
    ),
    "over_chat": ratio("/ chat", "CPU per token over that of the same server's chat in the same round, streamed alike"),
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
        modes = [mode for workload in options.workloads for mode in modes_of(workload, names, options.sizes)]

        def load(mode: Mode, conversations: int, seed: int) -> Measured:
            way = ways[mode.workload, mode.way]
            return way.load(conversations, seed, sessions=mode.sessions, api=mode.api, stream=mode.stream)

        for mode in modes:  # caches and code are warm then
            if mode.sessions == min(options.sizes):
                load(mode, mode.sessions, 1000)
        for number in range(options.rounds):
            measured: dict[Mode, Measured] = {}
            for mode in order.sample(modes, len(modes)):
                # Each load has problems of its own: the prefix cache holds nothing of them from another load.
                seed = 1 + number * len(modes) + modes.index(mode)
                measured[mode] = load(mode, options.conversations_of(mode), seed)
                say(f"round {number + 1} of {options.rounds}: {case_of(mode)}, {measured[mode].wall_s:.1f} s")
            keep({case_of(mode): figures(measured, mode) for mode in modes})


def modes_of(workload: Workload, names: tuple[WayName, ...], sizes: tuple[int, ...]) -> Iterator[Mode]:
    """Yields the modes of a workload, those side by side that are compared."""
    for sessions in sizes if workload == "agent" else (min(sizes),):
        if "built_in" in names:
            yield Mode(workload, sessions, "built_in")
        for stream in (False, True):
            for name in names:
                if name != "built_in":
                    yield from (Mode(workload, sessions, name, api, stream) for api in APIS[workload, name])


def _way(name: WayName, workload: Workload, options: Options) -> AbstractContextManager[Way]:
    checkpoint = SHIPPED if workload == "agent" else random_weights()
    if name == "vllm":
        return vllm(options.vllm, checkpoint, workload)
    return (built_in if name == "built_in" else gateway)(checkpoint, workload)


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
    api = () if mode.way == "built_in" else (mode.api, *(("streamed",) if mode.stream else ()))
    return "/".join((mode.workload, str(mode.sessions), mode.way, *api))


def figures(measured: Mapping[Mode, Measured], mode: Mode) -> dict[str, float]:
    load = measured[mode]
    values = {
        "token_s": load.token_s,
        "turn_s": load.turn_s,
        "tokens_per_turn": load.sampled_tokens / load.turns,
        "prefix_hits": load.prefix_hits,
    }
    beside = {"over_gateway": mode._replace(way="gateway")}
    if mode.way != "built_in":
        beside["over_chat"] = mode._replace(api="chat")
    ratios = {name: load.token_s / measured[other].token_s for name, other in beside.items() if other in measured}
    return values | ratios


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("token_s", "over_gateway", "over_chat"),
    quick={"rounds": "1", "conversations": "128", "sizes": "64", "workloads": "agent"},
)
