"""What does a turn through the gateway cost, beside the built-in loop and beside vLLM's own server?

    python -m bench gateway [--quick] [--only built_in,gateway,vllm] [--workloads agent,long] [--vllm PROGRAM]

CPU of the front end alone, per sampled token and per turn, at 256 conversations at once on one replica: the engine's
process is not counted, nor are the clients, which have a process of their own and are the same for both servers.

built_in  `Rollouts`: no HTTP at all
gateway   `rocstar gateway`, each conversation under a key of its own
vllm      `vllm serve` (`make serve-env`), without logs and statistics; it parses tool calls too

agent: problems of the tiny agent, some 15 tokens a turn. long: one turn of some 350 tokens, by a model of that shape
with random weights, which is shown no tool: its text is noise. Servers are measured with and without streaming.
Rounds are interleaved; figures are medians over them. vllm_over_gateway: how many times more CPU per token vLLM's
server takes. prefix_hits: share of the prompts' tokens that were in the KV cache.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench import ROOT
from bench.benches.gateway.script import WORKLOADS
from bench.benches.gateway.servers import Measured, Way, built_in, gateway, vllm
from bench.measuring.report import at_least, environment, existing, fill, finish, interruptible, names, say
from recipes.tiny.task import SHIPPED

WAYS = ("built_in", "gateway", "vllm")
RANDOM = Path("runs/bench/gateway/random")
SEED = 0
HEADER = ("workload", "way", "stream", "us per token", "ms per turn", "tokens per turn", "prefix hits", "seconds")

Mode = tuple[str, str, bool]  # workload, way, stream
Round = dict[Mode, Measured]


def checkpoint_of(workload: str) -> Path:
    return SHIPPED if workload == "agent" else random_weights()


def random_weights() -> Path:
    """A checkpoint of the tiny agent's shape that says anything; made if it is not there."""
    if not (RANDOM / "config.json").is_file():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(SEED)
        AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(RANDOM)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHIPPED)).save_pretrained(RANDOM)
    return RANDOM


def measure(options: argparse.Namespace, rounds: list[Round]) -> None:
    order = random.Random(SEED)
    with ExitStack() as stack:
        ways: dict[tuple[str, str], Way] = {}
        for workload in options.workloads:
            for name in options.only:
                say(f"{name} is started for {workload}")
                ways[workload, name] = stack.enter_context(_way(name, workload, options))
        modes = [(*key, stream) for key in ways for stream in ((False,) if key[1] == "built_in" else (False, True))]
        for workload, name, stream in modes:  # its caches and its code are warm
            ways[workload, name].load(options.sessions // 4, seed=1000, stream=stream)
        for number in range(options.rounds):
            found: Round = {}
            for mode in order.sample(modes, len(modes)):
                workload, name, stream = mode
                count = options.conversations if workload == "agent" else options.sessions
                # Other problems each time: what one load has left in a prefix cache is not the next one's.
                seed = 1 + number * len(modes) + modes.index(mode)
                found[mode] = ways[workload, name].load(count, seed, stream=stream)
                cost = f"{found[mode].us_per_token:7.1f} us a token, {found[mode].ms_per_turn:6.2f} ms a turn"
                say(f"round {number + 1} of {options.rounds}: {workload:5} {name:8} stream={stream!s:5} {cost}")
            rounds.append({mode: found[mode] for mode in modes})


def _way(name: str, workload: str, options: argparse.Namespace) -> AbstractContextManager[Way]:
    made = {"built_in": built_in, "gateway": gateway, "vllm": partial(vllm, options.vllm)}
    return made[name](checkpoint_of(workload), options.sessions, workload)


def typical(rounds: Sequence[Mapping[Mode, Measured]], mode: Mode, what: str) -> float:
    return median(getattr(found[mode], what) for found in rounds)


def metrics_of(rounds: Sequence[Mapping[Mode, Measured]]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for workload, way, stream in rounds[0]:
        mode, name = (workload, way, stream), f"{workload}_{way}{'_stream' if stream else ''}"
        for what in ("us_per_token", "ms_per_turn", "prefix_hits"):
            metrics[f"{name}_{what}"] = typical(rounds, mode, what)
        metrics[f"{name}_tokens_per_turn"] = median(found[mode].sampled_tokens / found[mode].turns for found in rounds)
        theirs = (workload, "vllm", stream)
        if way == "gateway" and theirs in rounds[0]:
            ratio = median(found[theirs].us_per_token / found[mode].us_per_token for found in rounds)
            metrics[f"{workload}{'_stream' if stream else ''}_vllm_over_gateway"] = ratio
    return metrics


def show(options: argparse.Namespace, around: Mapping[str, Any], rounds: Sequence[Mapping[Mode, Measured]]) -> None:
    rows = []
    for mode in rounds[0]:
        workload, way, stream = mode
        per_turn = median(found[mode].sampled_tokens / found[mode].turns for found in rounds)
        rows.append(
            (
                workload,
                way,
                "" if way == "built_in" else "yes" if stream else "no",
                f"{typical(rounds, mode, 'us_per_token'):.1f}",
                f"{typical(rounds, mode, 'ms_per_turn'):.2f}",
                f"{per_turn:.1f}",
                f"{typical(rounds, mode, 'prefix_hits'):.0%}",
                f"{typical(rounds, mode, 'wall_s'):.1f}",
            )
        )
    title = f"CPU of the front end, {options.sessions} conversations at once, medians of {len(rounds)} rounds"
    config = {name: value for name, value in vars(options).items() if name != "quick"}
    finish("gateway", title, HEADER, rows, config=config, metrics=metrics_of(rounds), environment=around)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench gateway", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of few conversations")
    parser.add_argument("--only", type=names(WAYS), help=f"of {', '.join(WAYS)}; all that are there")
    parser.add_argument("--workloads", type=names(tuple(WORKLOADS)))
    parser.add_argument("--sessions", type=at_least(1), default=256, help="conversations at once")
    parser.add_argument("--conversations", type=at_least(1), help="of a load of short turns")
    parser.add_argument("--rounds", type=at_least(1))
    parser.add_argument("--vllm", type=existing(), default=None, help="the program, .venv-serve/bin/vllm by default")
    options = parser.parse_args()
    options.vllm = options.vllm or ROOT / ".venv-serve" / "bin" / "vllm"
    if options.only is None:
        options.only = [way for way in WAYS if way != "vllm" or options.vllm.is_file()]
        if "vllm" not in options.only:
            say("vllm is left out: there is no .venv-serve. Fix: make serve-env")
    fill(options, conversations=(256, 1024), rounds=(1, 5), workloads=(["agent"], list(WORKLOADS)))
    around, rounds = environment(), list[Round]()
    interruptible(lambda: measure(options, rounds), lambda: show(options, around, rounds), rounds)
