"""Does placement by KV cache pay on real engines? Policies against each other on two vLLM replicas with a small cache.

    python -m bench fleet [--quick] [--rounds 5] [--kinds math8k,...] [--policies kv_aware,...] [--record FILE]

Traces of multi-turn rollouts (bench/traces) are replayed token for token on the CPU: one core and 100 blocks of 32
tokens per replica, 3 M random parameters in fp32. A round runs every policy once, in random order, on the same engines
with empty prefix caches; round r uses seed r of the trace. `makespan_ratio_<policy>` is theirs / ours: the median over
rounds, for all kinds their geometric mean. Counts are means per run: `moves` in the middle of a turn, `rehomed` turns
that began on another replica than the one before, recomputed tokens as in bench/fleet/replay.py. `bound_ratio` is
ours / a lower bound (bench/fleet/bound.py). On this kind of machine decoding is bound by fixed costs, so that filling
the KV cache buys less than on a GPU: read the counts first. `--record` writes each engine step as a JSON line, for the
simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import uvloop

from bench import ROOT
from bench.benches.fleet.bound import Engine
from bench.benches.fleet.engines import VOCABULARY, Engines, write_model
from bench.benches.fleet.figures import HEADER, OURS, Run, overall, table, workload_metrics, write_steps
from bench.benches.fleet.plot import plot
from bench.benches.fleet.replay import Record, Timed, replay
from bench.measuring.report import (
    at_least,
    drawn,
    environment,
    existing,
    fill,
    finish,
    interruptible,
    names,
    number,
    say,
    several,
    writable,
)
from bench.placement.policies import Aimd, LeastInFlight, StaticSplit, ThunderLike, TokenBudget
from bench.placement.workload import KINDS, Traced, Turn, load
from engine.balancing.balancer import Balancer
from engine.balancing.kv_aware import KvAware
from engine.balancing.round_robin import RoundRobin
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline

# By name, from the tokens that a trajectory has at most: those of the trace's longest. Intervals and buffers are those
# of the rivals' sources, scaled as the traces are (tokens 1/14, seconds about 1/10).
POLICIES: dict[str, Callable[[int], Balancer]] = {
    OURS: lambda max_tokens: KvAware(max_tokens=max_tokens),
    "static": lambda _: StaticSplit(),
    "static_barrier": lambda _: StaticSplit(barrier=True),
    "round_robin": lambda _: RoundRobin(),
    "cap8": lambda _: LeastInFlight(cap=8),
    "cap12": lambda _: LeastInFlight(cap=12),
    "cap16": lambda _: LeastInFlight(cap=16),
    "budget": lambda max_tokens: TokenBudget(max_tokens),
    "aimd": lambda max_tokens: Aimd(max_tokens, interval_s=0.5),
    "thunder": lambda _: ThunderLike(interval_s=0.1, buffer_tokens=36),
}
QUICK = (OURS, "static", "round_robin", "cap12")
ENGINE = Engine(replicas=2, blocks=99, block_size=32, max_num_seqs=64)


def shape_of(options: argparse.Namespace) -> Engine:
    """One replica on a GPU."""
    return ENGINE if options.device is None else dataclasses.replace(ENGINE, replicas=1)


WARM_UP = [Traced(traj=n, group=n, turns=(Turn(prompt_new_tokens=64, gen_tokens=64),)) for n in range(8)]
TRACES = ROOT / "bench" / "traces"
PLOTS = Path("runs/bench")


@dataclass(frozen=True, slots=True)
class Case:
    """What a round gives to every policy."""

    round: int
    kind: str
    seed: int
    traces: Sequence[Traced]


async def run_once(engines: Engines, case: Case, policy: str) -> Run:
    """One policy, from empty caches. Raises RuntimeError when an engine died."""
    inner = POLICIES[policy](max(trace.total_tokens for trace in case.traces))
    balancer = Timed(inner)
    record = Record(block_size=ENGINE.block_size)
    config = FleetConfig(replicas=engines.count, block_size=ENGINE.block_size)
    async with Fleet(config, engines.make, balancer, Timeline()) as fleet:
        await engines.forget()
        engines.on_sample = record.sample
        try:
            await replay(fleet, case.traces, record, case.seed, VOCABULARY)
        finally:
            engines.on_sample = lambda index, sample: None
        if fleet.deaths:
            raise RuntimeError(f"{fleet.deaths} engines died")
    if (check := getattr(inner, "check", None)) is not None:
        check()
    return Run(
        round=case.round,
        kind=case.kind,
        seed=case.seed,
        policy=policy,
        traces=case.traces,
        record=record,
        balancer_cpu_share=balancer.cpu_s / record.makespan_s,
        decide_us=1e6 * balancer.decide_s / max(1, balancer.decisions),
    )


def cases(options: argparse.Namespace, number: int) -> Iterator[Case]:
    """Of a round."""
    seed = options.seeds[number % len(options.seeds)]
    for kind in options.kinds:
        rows = load(trace_of(kind, seed))
        yield Case(number, kind, seed, [row for row in rows if row.group < options.groups])


async def measure(options: argparse.Namespace, folder: Path, runs: list[Run], failures: list[str]) -> None:
    """Adds the runs of whole rounds, and what failed."""
    shuffled = random.Random(0)
    if not options.checkpoint:
        write_model(folder)
    config = ReplicaConfig(
        checkpoint=str(options.checkpoint or folder),
        max_model_len=2048,
        max_num_seqs=ENGINE.max_num_seqs,
        kv_blocks=ENGINE.blocks + 1,  # one is vLLM's own
        block_size=ENGINE.block_size,
        dtype="float32" if options.device is None else "bfloat16",
        devices=() if options.device is None else (options.device,),
        start_deadline_s=options.deadline_s,
        step_deadline_s=options.deadline_s,
    )
    async with Engines(config, shape_of(options).replicas) as engines:
        say("engines start")
        await run_once(engines, Case(-1, "warm-up", 0, WARM_UP), "round_robin")
        gc.freeze()  # else a collection in the middle of a run walks all that vLLM and torch have allocated
        for number in range(options.rounds):
            found = [
                run
                for case in cases(options, number)
                for policy in shuffled.sample(options.policies, len(options.policies))
                if (run := await attempt(options, engines, case, policy, failures)) is not None
            ]
            if options.record:
                write_steps(options.record, found, len(runs))
            runs += found


async def attempt(
    options: argparse.Namespace, engines: Engines, case: Case, policy: str, failures: list[str]
) -> Run | None:
    say(f"round {case.round + 1} of {options.rounds}: {case.kind}.{case.seed}, {policy}")
    try:
        async with asyncio.timeout(options.deadline_s):
            return await run_once(engines, case, policy)
    except (TimeoutError, RuntimeError, AssertionError, ExceptionGroup) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error  # Ctrl-C, while a run failed or because of it
        failures.append(f"{case.kind}.{case.seed} {policy}: {str(error) or type(error).__name__}")
        say(f"FAILED {failures[-1]}")
        return None


def trace_of(kind: str, seed: int) -> Path:
    return TRACES / f"{kind}.{seed}.jsonl.gz"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one workload, half of it, four policies, one round")
    parser.add_argument("--rounds", type=at_least(1))
    parser.add_argument("--kinds", type=names(KINDS), help=",".join(KINDS))
    parser.add_argument("--policies", type=names(list(POLICIES)), help=",".join(POLICIES))
    parser.add_argument("--seeds", type=several(at_least(0)), default=[111, 112, 113], help="101 to 103 are for tuning")
    parser.add_argument("--groups", type=at_least(1), help="of each trace, the first so many")
    parser.add_argument(
        "--checkpoint", type=existing("config.json"), help="a model folder instead of 3 M random parameters"
    )
    parser.add_argument(
        "--deadline-s", type=number(1), default=300.0, help="of a run and of an engine's start and steps"
    )
    parser.add_argument("--device", type=at_least(0), help="a GPU for one replica instead of the CPU for two")
    parser.add_argument("--record", type=writable, help="write each engine step to this file, after each round")
    options = parser.parse_args(given)
    fill(
        options,
        rounds=(1, 5),
        kinds=(["math8k"], list(KINDS)),
        policies=(list(QUICK), list(POLICIES)),
        groups=(6, 1000),
    )
    if OURS not in options.policies:
        parser.error(f"argument --policies: without {OURS}, with which the others are compared")
    for kind, seed in product(options.kinds, options.seeds):
        if not trace_of(kind, seed).exists():
            parser.error(f"argument --seeds: {seed}: there is no {trace_of(kind, seed)}")
    return options


def show(options: argparse.Namespace, machine: dict[str, Any], runs: Sequence[Run], failures: Sequence[str]) -> None:
    workloads, rows, plots = {}, [], []
    for kind in options.kinds:
        if of_kind := [run for run in runs if run.kind == kind]:
            workloads[kind] = workload_metrics(of_kind, shape_of(options))
            rows += table(kind, workloads[kind])
            plots.append(drawn(PLOTS / f"fleet_{kind}.png", partial(plot, of_kind, ENGINE.blocks)))
    metrics = overall(workloads) | {"workloads": workloads, "failures": failures}
    title = f"Policies on two real replicas (KV use over time: {', '.join(plots)})"
    finish("fleet", title, HEADER, rows, config=vars(options), metrics=metrics, environment=machine)


def main() -> None:
    prepare_environment()
    options, machine = arguments(), environment()
    runs: list[Run] = []
    failures: list[str] = []

    def run() -> None:
        with workspace() as folder:
            uvloop.run(measure(options, folder, runs, failures))

    interruptible(run, lambda: show(options, machine, runs, failures), runs)
    if failures:
        sys.exit(f"{len(failures)} runs failed: {failures[0]}")
