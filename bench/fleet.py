"""Does placement by KV cache pay on real engines? Policies against each other on two vLLM replicas with a small cache.

    python -m bench.fleet [--quick] [--rounds 5] [--kinds math8k,...] [--policies kv_aware,...] [--record FILE]

Traces of multi-turn rollouts (bench/traces) are replayed token for token on the CPU: one core and 100 blocks of 32
tokens per replica, 3 M random parameters in fp32. A round runs every policy once, in random order, on the same engines
with empty prefix caches; round r uses seed r of the trace. `makespan_ratio_<policy>` is theirs / ours: the median over
rounds, for all kinds their geometric mean. Counts are means per run. `bound_ratio` is ours / a lower bound
(bench/fleet_bound.py). On this kind of machine decoding is bound by fixed costs, so that filling the KV cache buys less
than on a GPU: read the counts first. `--record` writes each engine step as a JSON line, for the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.fleet_bound import fit, lower_bound_s
from bench.fleet_engines import VOCABULARY, Engines, write_model
from bench.fleet_plot import plot
from bench.fleet_replay import Record, Timed, replay
from bench.report import environment, finish
from bench.workload import KINDS, Traced, load
from engine.balance import Balancer
from engine.fleet import Fleet, FleetConfig
from engine.kv_aware import KvAware
from engine.replica import ReplicaConfig, prepare_environment
from engine.rivals import Aimd, LeastInFlight, RoundRobin, StaticSplit, ThunderLike, TokenBudget
from engine.trace import Timeline

OURS = "kv_aware"
# By name, from the tokens that a trajectory has at most. Intervals and buffers are those of the rivals' sources, scaled
# as the traces are (tokens 1/14, seconds about 1/10).
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
REPLICAS, BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS = 2, 100, 32, 64
TRACES = Path(__file__).parent / "traces"
PLOTS = Path("runs/bench")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A policy's run over one trace."""

    kind: str
    seed: int
    policy: str
    record: Record
    cpu_share: float
    decide_us: float

    @property
    def figures(self) -> dict[str, float]:
        record = self.record
        return {
            "makespan_s": record.makespan_s,
            "tokens_per_s": record.generated / record.makespan_s,
            "preemptions": record.preemptions,
            "prefilled_tokens": record.prefilled or record.prompt - record.cached,
            "recomputed_tokens": record.recomputed,
            "prefix_hits": record.prefix_hits,
            "moves": record.moves,
            "free_spread": record.spread(BLOCKS - 1),
            "p99_completion_s": quantile(record.completed_s, 0.99),
            "p99_trajectory_s": quantile(record.lasted_s, 0.99),
            "balancer_cpu_share": self.cpu_share,
            "decide_us": self.decide_us,
        }


MEANS = ("preemptions", "prefilled_tokens", "recomputed_tokens", "moves")  # counts; of the others the median is shown


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def trace_of(kind: str, seed: int, groups: int) -> list[Traced]:
    return [row for row in load(TRACES / f"{kind}.{seed}.jsonl.gz") if row.group < groups]


async def run_once(engines: Engines, kind: str, seed: int, policy: str, traces: Sequence[Traced]) -> Run:
    """One policy, from empty caches. Raises RuntimeError when an engine died or the policy's books do not close."""
    longest = max(trace.total_tokens for trace in traces)
    inner = POLICIES[policy](longest)
    balancer = Timed(inner)
    record = Record(block_size=BLOCK_SIZE)
    fleet = Fleet(FleetConfig(replicas=REPLICAS, block_size=BLOCK_SIZE), engines.make, balancer, Timeline())
    async with fleet:
        await engines.forget()
        engines.on_sample = record.sample
        await replay(fleet, traces, record, seed, VOCABULARY)
        engines.on_sample = lambda index, sample: None
        if fleet.deaths:
            raise RuntimeError(f"{fleet.deaths} engines died in the run of {policy}")
    if (check := getattr(inner, "check", None)) is not None:
        check()
    share = balancer.cpu_s / record.makespan_s
    decide_us = 1e6 * balancer.decide_s / max(1, balancer.decisions)
    return Run(kind=kind, seed=seed, policy=policy, record=record, cpu_share=share, decide_us=decide_us)


async def measure(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Run], list[str]]:
    """All runs, and what failed."""
    runs: list[Run] = []
    failures: list[str] = []
    shuffled = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or folder
        if not options.checkpoint:
            write_model(Path(folder))
        config = ReplicaConfig(
            checkpoint=checkpoint,
            max_model_len=1024,
            max_num_seqs=MAX_NUM_SEQS,
            kv_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
        )
        async with Engines(config) as engines:
            say("engines start")
            await run_once(engines, "warm-up", 0, "round_robin", trace_of("uniform", options.seeds[0], 1))
            for number in range(options.rounds):
                seed = options.seeds[number % len(options.seeds)]
                for kind in options.kinds:
                    traces = trace_of(kind, seed, options.groups)
                    for policy in shuffled.sample(options.policies, len(options.policies)):
                        say(f"round {number + 1} of {options.rounds}: {kind}, {policy}")
                        try:
                            async with asyncio.timeout(options.deadline_s):
                                runs.append(await run_once(engines, kind, seed, policy, traces))
                        except (TimeoutError, RuntimeError, AssertionError, ExceptionGroup) as error:
                            failures.append(f"{kind}.{seed} {policy}: {error or type(error).__name__}")
                            say(f"FAILED {failures[-1]}")
    return runs, failures


def of_policy(runs: Sequence[Run], policy: str) -> dict[str, float]:
    """Figures over the rounds of one kind."""
    rows = [run.figures for run in runs if run.policy == policy]
    return {
        name: (statistics.fmean if name in MEANS else statistics.median)([row[name] for row in rows])
        for name in (rows[0] if rows else ())
    }


def ratios(runs: Sequence[Run], policy: str) -> list[float]:
    """theirs / ours of each round that has both."""
    rounds: dict[str, list[Run]] = {name: [run for run in runs if run.policy == name] for name in (policy, OURS)}
    pairs = [
        (theirs, ours)
        for seed in {run.seed for run in runs}
        for theirs, ours in zip(
            [run for run in rounds[policy] if run.seed == seed],
            [run for run in rounds[OURS] if run.seed == seed],
            strict=False,
        )
    ]
    return [theirs.record.makespan_s / ours.record.makespan_s for theirs, ours in pairs]


def workload_metrics(runs: Sequence[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Of the runs of one kind: the figures of each policy, ratios, bound."""
    cost = fit(run.record.steps for run in runs)
    found: dict[str, Any] = {"step_cost": asdict(cost)}
    for policy in options.policies:
        found[policy] = of_policy(runs, policy)
        if found[policy]:
            found[f"preemptions_{policy}"] = found[policy]["preemptions"]
            found[f"recomputed_tokens_{policy}"] = found[policy]["recomputed_tokens"]
        if policy != OURS and (paired := ratios(runs, policy)):
            found[f"makespan_ratio_{policy}"] = statistics.median(paired)
            found[f"makespan_ratio_range_{policy}"] = [min(paired), max(paired)]
    kv_tokens = (BLOCKS - 1) * BLOCK_SIZE
    over = [
        run.record.makespan_s
        / lower_bound_s(trace_of(run.kind, run.seed, options.groups), cost, kv_tokens, MAX_NUM_SEQS, REPLICAS)
        for run in runs
        if run.policy == OURS
    ]
    if over:
        found["bound_ratio"] = statistics.median(over)
    return found


def overall(workloads: dict[str, dict[str, Any]], policies: Sequence[str]) -> dict[str, float]:
    """Geometric means of ratios, means of counts."""
    found = {}
    names = [f"makespan_ratio_{policy}" for policy in policies] + ["bound_ratio"]
    for name in names:
        if values := [row[name] for row in workloads.values() if name in row]:
            found[name] = statistics.geometric_mean(values)
    for policy in policies:
        for name in (f"preemptions_{policy}", f"recomputed_tokens_{policy}"):
            if values := [row[name] for row in workloads.values() if name in row]:
                found[name] = statistics.fmean(values)
    return found


def rows_of(kind: str, found: dict[str, Any], policies: Sequence[str]) -> list[list[str]]:
    rows = []
    for policy in policies:
        if not (row := found[policy]):
            continue
        ratio = found.get(f"makespan_ratio_{policy}")
        low, high = found.get(f"makespan_ratio_range_{policy}", (0, 0))
        rows.append(
            [
                kind,
                policy,
                f"{row['makespan_s']:.2f}",
                f"{ratio:.2f} [{low:.2f}-{high:.2f}]" if ratio else "1",
                f"{row['tokens_per_s']:.0f}",
                f"{row['preemptions']:.1f}",
                f"{row['recomputed_tokens']:.0f}",
                f"{row['prefix_hits']:.2f}",
                f"{row['free_spread']:.2f}",
                f"{row['moves']:.1f}",
                f"{row['p99_trajectory_s']:.2f}",
                f"{row['decide_us']:.0f}",
            ]
        )
    return rows


HEADER = (
    "workload",
    "policy",
    "makespan s",
    "theirs / ours",
    "tok/s",
    "preempted",
    "recomputed",
    "prefix hits",
    "free spread",
    "moves",
    "p99 s",
    "decide us",
)


def write_steps(path: Path, runs: Sequence[Run]) -> None:
    """JSON lines: the fields of Step, and the run to which it belongs (t counts from its begin)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number, run in enumerate(runs):
            name = {"run": number, "kind": run.kind, "seed": run.seed, "policy": run.policy}
            file.writelines(json.dumps(asdict(step) | name) + "\n" for step in run.record.steps)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: it knows {', '.join(known)}")
        return text.split(",")

    return parse


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one workload, half of it, four policies, one round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--kinds", type=names(KINDS), help=",".join(KINDS))
    parser.add_argument("--policies", type=names(list(POLICIES)), help=",".join(POLICIES))
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[101, 102, 103])
    parser.add_argument("--groups", type=int, help="of each trace, the first so many")
    parser.add_argument("--checkpoint", help="a model folder instead of 3 M random parameters")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="of one run; one that exceeds it failed")
    parser.add_argument("--record", type=Path, help="write each engine step to this file")
    options = parser.parse_args(given)
    quick = {"rounds": 1, "kinds": ["math8k"], "policies": list(QUICK), "groups": 6}
    full = {"rounds": 5, "kinds": list(KINDS), "policies": list(POLICIES), "groups": 1000}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if OURS not in options.policies:
        parser.error(f"--policies must hold {OURS}: the others are compared with it")
    return options


def main() -> None:
    prepare_environment()
    options = arguments()
    machine = environment()
    console = Console(file=sys.stderr)
    runs, failures = asyncio.run(measure(options, lambda what: console.print(what, highlight=False)))
    machine["load_after"] = os.getloadavg()[0]
    if options.record:
        write_steps(options.record, runs)
    workloads, rows = {}, []
    for kind in options.kinds:
        if of_kind := [run for run in runs if run.kind == kind]:
            workloads[kind] = workload_metrics(of_kind, options)
            rows += rows_of(kind, workloads[kind], options.policies)
            plot(of_kind, BLOCKS - 1, PLOTS / f"fleet_{kind}.png")
    metrics = overall(workloads, options.policies) | {"workloads": workloads, "failures": failures}
    title = f"Policies on two real replicas (KV use over time: {PLOTS}/fleet_*.png)"
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    finish("fleet", title, HEADER, rows, config=config, metrics=metrics, environment=machine)
    if failures:
        sys.exit(f"{len(failures)} runs failed: {failures[0]}")


if __name__ == "__main__":
    main()
