"""Placement policies on simulated fleets of 8 to 1,024 replicas: the Balancer objects that serve live ones.

    python -m bench sim_fleet [--quick] [--replicas 8,64] [--kinds math8k,...] [--policies kv_aware,...] [--seeds 1,2]
    python -m bench sim_fleet --offload 4      also with host memory for 4 times the KV: what restoring a prefix gives
    python -m bench sim_fleet --overlap 3      also 3 steps' work at once against one step after the other
    python -m bench sim_fleet --stream 3       instead 3 steps' work, a new group for each that is complete: throughput
    python -m bench sim_fleet --deaths 8       also with 8 deaths of replicas, each back after 30 s
    python -m bench sim_fleet --calibrate FILE the two live replicas of `bench fleet --record FILE`, replayed

Engines are H200 with a 14B model by first principles (`bench.simulator.costs`), not measured: compare policies, quote
no seconds. `makespan_ratio_<policy>` is theirs / ours, above 1 where kv_aware is faster; regret is a makespan over the
best one of all other policies on the same workload and seed, below 1 where it beats them all; `bound_ratio` is ours
over a lower bound that knows all lengths and lets tool-waiting KV cost nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import geometric_mean
from typing import Any

import numpy as np

from bench.measuring.report import (
    at_least,
    environment,
    existing,
    fill,
    finish,
    interruptible,
    names,
    number,
    say,
    several,
)
from bench.placement import workload
from bench.placement.policies import Aimd, LeastInFlight, StaticSplit, ThunderLike, ThunderPolled, TokenBudget
from bench.placement.workload import Size, Traced
from bench.simulator.costs import H200, Machine, lower_bound_s
from bench.simulator.fleet import Death, Result, Simulation
from engine.balancing.balancer import Balancer
from engine.balancing.kv_aware import KvAware
from engine.balancing.round_robin import RoundRobin

MakePolicy = Callable[[int], Balancer]  # from the length of the longest trajectory

OURS = "kv_aware"
POLICIES: dict[str, MakePolicy] = {
    OURS: KvAware,
    "static_barrier": lambda most: StaticSplit(barrier=True),
    "static": lambda most: StaticSplit(),
    "round_robin": lambda most: RoundRobin(),
    "cap24": lambda most: LeastInFlight(24),
    "cap64": lambda most: LeastInFlight(64),
    "cap128": lambda most: LeastInFlight(128),
    "cap192": lambda most: LeastInFlight(192),
    "budget": TokenBudget,
    "aimd": Aimd,
    "thunder": lambda most: ThunderLike(),
    "thunder_polled": lambda most: ThunderPolled(),
}
QUICK = (OURS, "static", "round_robin", "thunder")


def size_for(kind: str, replicas: int) -> Size:
    """At 8 replicas 128 x 32 (agentic 64 x 16), from 64 on 512 groups: 16,384 and 8,192 trajectories."""
    full = workload.FULL[kind]
    factor = max(1.0, replicas / (8 if kind == "agentic" else 16))
    return replace(full, groups=min(512, round(full.groups * factor)))


Cell = tuple[str, int, int]  # workload, replicas, seed
Results = dict[Cell, dict[str, Result]]  # by cell and policy


def measure(options: argparse.Namespace, machine: Machine, results: Results, bounds: dict[Cell, float]) -> None:
    """Adds results and lower bounds, a workload of a size and seed with all that belongs to it at a time."""
    for replicas, seed, kind in product(options.replicas, options.seeds, options.kinds):
        found: Results = {}
        for cell, trace, further in cells(options, machine, kind, replicas, seed):
            bounds[cell] = lower_bound_s(trace, machine, replicas)
            most = max(row.total_tokens for row in trace)
            found[cell] = {}
            for name in options.policies:
                say(f"{cell[0]}, {replicas} replicas, seed {seed}: {name}")
                found[cell][name] = Simulation(POLICIES[name](most), trace, machine, replicas, **further).run()
        results |= found


def cells(
    options: argparse.Namespace, machine: Machine, kind: str, replicas: int, seed: int
) -> Iterator[tuple[Cell, list[Traced], dict[str, Any]]]:
    """Cells of a workload with their trace and options of the simulation."""
    traces = [steps_trace(options, kind, replicas, seed, step) for step in range(options.overlap)]
    yield (kind, replicas, seed), traces[0], {}
    if options.offload:
        host_blocks = round(options.offload * machine.blocks)
        yield (f"{kind}+host", replicas, seed), traces[0], {"host_blocks": host_blocks}
    if options.deaths:
        until_s = lower_bound_s(traces[0], machine, replicas)
        yield (f"{kind}+deaths", replicas, seed), traces[0], {"deaths": drawn(options, replicas, until_s)}
    for step, trace in enumerate(traces[1:], 1):
        yield (f"{kind}+step{step}", replicas, seed), trace, {}
    if options.overlap > 1:
        yield (f"{kind}+all", replicas, seed), joined(traces), {}


def drawn(options: argparse.Namespace, replicas: int, until_s: float) -> list[Death]:
    rng = np.random.default_rng(options.deaths)
    times_s = rng.uniform(0, until_s, options.deaths).tolist()
    return [Death(int(rng.integers(replicas)), at_s, 30.0) for at_s in times_s]


def steps_trace(options: argparse.Namespace, kind: str, replicas: int, seed: int, step: int) -> list[Traced]:
    if kind not in workload.KINDS:
        return workload.load(kind)
    size = size_for(kind, replicas)
    groups = options.groups or (size.groups // 4 if options.quick else size.groups)
    return workload.generate(kind, seed + 10_000 * step, replace(size, groups=groups))


def stream(options: argparse.Namespace, machine: Machine) -> None:
    """Throughput where the work does not end, as under staleness 1 and more: a group comes for each complete one."""
    before = environment()
    rates: dict[tuple[str, int], dict[str, list[float]]] = {}

    def measure() -> None:
        for replicas, seed, kind in product(options.replicas, options.seeds, options.kinds):
            trace = joined([steps_trace(options, kind, replicas, seed, step) for step in range(options.stream)])
            most = max(row.total_tokens for row in trace)
            found = {}
            for name in options.policies:
                say(f"{kind}, {replicas} replicas, seed {seed}, {options.stream} steps' groups: {name}")
                found[name] = streamed_tokens_per_s(POLICIES[name](most), trace, machine, replicas, options.stream)
            for name, rate in found.items():
                rates.setdefault((kind, replicas), {}).setdefault(name, []).append(rate)

    def show() -> None:
        rows, metrics = [], {}
        for (kind, replicas), of_policy in rates.items():
            for name, per_seed in of_policy.items():
                others = [other for policy, other in of_policy.items() if policy != name]
                shares = [max(best) / rate for rate, *best in zip(per_seed, *others, strict=True) if best]
                figures = [f"{geometric_mean(shares):.3f}", f"{max(shares):.3f}"] if shares else ["", ""]
                rows.append([f"{kind} {replicas}", name, f"{np.mean(per_seed):.0f}", *figures])
                if shares:
                    metrics[f"stream_regret_{name}_{kind}@{replicas}"] = geometric_mean(shares)
        header = ("workload", "policy", "tokens/s", "regret", "worst")
        title = "Simulated fleets, a stream of groups"
        config = vars(options)
        finish("sim_fleet", title, header, rows, config=config, metrics=metrics, environment=before, simulated=True)

    interruptible(measure, show, rates)


def streamed_tokens_per_s(
    policy: Balancer, trace: Sequence[Traced], machine: Machine, replicas: int, steps: int
) -> float:
    """Generated tokens a second from when as many groups as a step has are complete until no new ones come."""
    groups: dict[int, list[Traced]] = {}
    for row in trace:
        groups.setdefault(row.group, []).append(row)
    to_come = list(groups.values())
    first, to_come = to_come[: len(to_come) // steps], to_come[len(to_come) // steps :]
    simulation = Simulation(policy, [row for group in first for row in group], machine, replicas)
    left = {number: len(group) for number, group in groups.items()}
    complete = tokens = 0
    began_s = math.inf

    def turn_ended(row: Traced, turn: int) -> None:
        nonlocal complete, tokens, began_s
        if complete >= len(first):
            tokens += row.turns[turn].gen_tokens
            began_s = min(began_s, simulation.now)
        if turn + 1 == len(row.turns):
            left[row.group] -= 1
            complete += not left[row.group]

    simulation.turn_ended = turn_ended
    simulation.begin()
    while to_come:
        due = complete
        simulation.go_on()
        for _ in range(min(complete - due, len(to_come))):
            simulation.arrive(to_come.pop(0), simulation.now)
    return tokens / (simulation.now - began_s)


def joined(traces: Sequence[Sequence[Traced]]) -> list[Traced]:
    """One after the other in the queue, with groups of their own."""
    rows: list[Traced] = []
    for trace in traces:
        groups = 1 + max((row.group for row in rows), default=-1)
        rows += [replace(row, traj=len(rows) + n, group=groups + row.group) for n, row in enumerate(trace)]
    return rows


def summary(results: Mapping[Cell, Mapping[str, Result]], bounds: Mapping[Cell, float]) -> dict[str, Any]:
    """The metrics of the JSON line, over the plain workloads."""
    results = {cell: found for cell, found in results.items() if "+" not in cell[0]}
    metrics: dict[str, Any] = {"replicas": sorted({replicas for _, replicas, _ in results})}
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    for name in names:
        cells = {cell: found for cell, found in results.items() if name in found}
        metrics[f"recomputed_tokens_{name}"] = sum(found[name].recomputed_tokens for found in cells.values())
        metrics[f"preemptions_{name}"] = sum(found[name].preemptions for found in cells.values())
        regrets = [regret(found, name) for found in cells.values() if len(found) > 1]
        if regrets:
            metrics[f"regret_{name}"] = {"geomean": geometric_mean(regrets), "worst": max(regrets)}
        ratios = {
            cell: found[name].makespan_s / found[OURS].makespan_s for cell, found in cells.items() if OURS in found
        }
        if name == OURS or not ratios:
            continue
        by_kind: dict[str, float] = {}
        for kind, replicas in dict.fromkeys(cell[:2] for cell in ratios):
            of_kind = [ratio for cell, ratio in ratios.items() if cell[:2] == (kind, replicas)]
            by_kind[f"{kind}@{replicas}"] = geometric_mean(of_kind)
        metrics[f"makespan_ratio_{name}"] = by_kind | {"overall": geometric_mean(list(ratios.values()))}
    ours = [found[OURS].makespan_s / bounds[cell] for cell, found in results.items() if OURS in found]
    metrics["bound_ratio"] = geometric_mean(ours) if ours else None
    return metrics


def regret(found: Mapping[str, Result], name: str) -> float:
    """Makespan of a policy over that of the best of the others."""
    return found[name].makespan_s / min(result.makespan_s for other, result in found.items() if other != name)


def table(results: Mapping[Cell, Mapping[str, Result]], bounds: Mapping[Cell, float]) -> list[list[str]]:
    """A row per workload, size and policy; means over seeds.

    regret: geometric mean and worst; /LB: over the lower bound; recomp: recomputed tokens per generated one; us: CPU
    time of a decision.
    """
    rows = []
    for kind, replicas in dict.fromkeys(cell[:2] for cell in results):
        cells = [cell for cell in results if cell[:2] == (kind, replicas)]
        for name in results[cells[0]]:
            found = [results[cell][name] for cell in cells]
            mean = lambda field, found=found: float(np.mean([getattr(result, field) for result in found]))  # noqa: E731
            ratios = [
                results[cell][name].makespan_s / results[cell][OURS].makespan_s
                for cell in cells
                if OURS in results[cell]
            ]
            regrets = [regret(results[cell], name) for cell in cells if len(results[cell]) > 1]
            generated = mean("generated_tokens")
            rows.append(
                [
                    f"{kind} {replicas}",
                    name,
                    f"{mean('makespan_s'):.1f}",
                    f"{geometric_mean(ratios):.3f}" if ratios else "",
                    f"{geometric_mean(regrets):.3f}" if regrets else "",
                    f"{max(regrets):.3f}" if regrets else "",
                    f"{geometric_mean([results[cell][name].makespan_s / bounds[cell] for cell in cells]):.2f}",
                    f"{mean('busy'):.2f}",
                    f"{mean('preemptions'):.0f}",
                    f"{mean('recomputed_tokens') / generated:.2f}",
                    f"{mean('moves'):.0f}",
                    f"{mean('decide_us'):.0f}",
                ]
            )
    return rows


HEADER = ("workload", "policy", "s", "/ours", "regret", "worst", "/LB", "busy", "preempt", "recomp", "moves", "us")


def pairs(results: Mapping[Cell, Mapping[str, Result]], options: argparse.Namespace) -> dict[str, Any]:
    """Makespans without over with: host memory, deaths, steps at once; by policy and workload."""
    found: dict[str, Any] = {}
    for kind, replicas, seed in [cell for cell in results if "+" not in cell[0]]:
        for name, alone in results[kind, replicas, seed].items():
            for what, given in (("host", options.offload), ("deaths", options.deaths)):
                if given:
                    ratio = alone.makespan_s / results[f"{kind}+{what}", replicas, seed][name].makespan_s
                    found.setdefault(f"{what}_speedup_{name}", {}).setdefault(f"{kind}@{replicas}", []).append(ratio)
            if options.overlap > 1:
                steps = [f"{kind}+step{step}" for step in range(1, options.overlap)]
                apart_s = alone.makespan_s + sum(results[step, replicas, seed][name].makespan_s for step in steps)
                ratio = apart_s / results[f"{kind}+all", replicas, seed][name].makespan_s
                found.setdefault(f"overlap_speedup_{name}", {}).setdefault(f"{kind}@{replicas}", []).append(ratio)
    return {metric: {cell: geometric_mean(ratios) for cell, ratios in cells.items()} for metric, cells in found.items()}


def calibrate(options: argparse.Namespace) -> None:
    """Fits the costs to the live run and replays it."""
    from bench.benches.sim_fleet import live  # knows the live set-up, and with it vLLM's adapter

    machine_before = environment()
    runs = live.read(options.calibrate)
    machine, fit = live.calibrated(runs)
    compared = live.compare(runs, machine, options.groups)
    rows = [
        [
            found.kind,
            found.policy,
            f"{found.live.makespan_s:.2f} / {found.simulated.makespan_s:.2f}",
            f"{found.ratio:.3f}",
            f"{found.steady_ratio:.3f}",
            f"{found.live.steps:.0f} / {found.simulated.steps:.0f}",
            f"{found.live.preemptions:.0f} / {found.simulated.preemptions:.0f}",
            f"{found.live.prefilled_tokens:.0f} / {found.simulated.prefilled_tokens:.0f}",
        ]
        for found in compared
    ]
    costs = {name: getattr(fit.costs, name) for name in ("o", "b", "c", "d")}
    metrics = {
        "replicas": [2],
        "costs_s": costs,
        "r2": fit.r2,
        "steps": fit.steps,
        "outliers": fit.outliers,
        "live_ratio": {f"{found.kind} {found.policy}": found.ratio for found in compared},
        "live_ratio_steady": {f"{found.kind} {found.policy}": found.steady_ratio for found in compared},
        "worst_deviation": max(abs(found.ratio - 1) for found in compared),
        "worst_deviation_steady": max(abs(found.steady_ratio - 1) for found in compared),
    }
    header = ("live / simulated", "policy", "s", "ratio", "steady", "steps", "preempted", "prefilled")
    config = {"calibrate": options.calibrate, "groups": options.groups}
    title = "Two live replicas and their simulation"
    finish("sim_fleet", title, header, rows, config=config, metrics=metrics, environment=machine_before)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench sim_fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 replicas, a quarter of three workloads, four policies")
    parser.add_argument("--replicas", type=several(at_least(1)), help="how many, with commas")
    parser.add_argument("--kinds", type=names(workload.KINDS), help=",".join(workload.KINDS))
    parser.add_argument("--trace", type=existing(), help="a file instead of the kinds")
    parser.add_argument("--policies", type=names(list(POLICIES)), help=",".join(POLICIES))
    parser.add_argument("--seeds", type=several(at_least(0)), default=[101], help="101 to 103 are for tuning")
    parser.add_argument("--groups", type=at_least(1), help="of each workload; with --calibrate: that the live run took")
    parser.add_argument("--kv", type=number(0.001), default=1.0, help="KV blocks times this")
    parser.add_argument("--offload", type=number(0), default=0.0, help="host memory for KV, in KV caches per replica")
    parser.add_argument("--deaths", type=at_least(0), default=0, help="of replicas")
    parser.add_argument("--overlap", type=at_least(1), default=1, help="steps whose work is there at once")
    parser.add_argument("--stream", type=at_least(3), default=0, help="steps whose groups come one after the other")
    parser.add_argument("--calibrate", type=existing(), help="record of a live run")
    options = parser.parse_args(given)
    if options.trace:
        options.kinds = [str(options.trace)]
    kinds = ["math8k", "agentic", "uniform"], list(workload.KINDS)
    fill(options, replicas=([2], [8]), kinds=kinds, policies=(list(QUICK), list(POLICIES)))
    return options


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    if options.calibrate:
        interruptible(lambda: calibrate(options))
        return
    before = environment()
    machine = replace(H200, blocks=round(H200.blocks * options.kv))
    if options.stream:
        stream(options, machine)
        return
    results: Results = {}
    bounds: dict[Cell, float] = {}

    def show() -> None:
        metrics = summary(results, bounds) | pairs(results, options)
        rows = table(results, bounds)
        config = vars(options)
        finish(
            "sim_fleet",
            "Simulated fleets",
            HEADER,
            rows,
            config=config,
            metrics=metrics,
            environment=before,
            simulated=True,
        )

    interruptible(lambda: measure(options, machine, results, bounds), show, results)
