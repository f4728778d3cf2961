"""Placement policies on simulated fleets of 8 to 1,024 replicas, by the Balancer objects that serve live ones.

    rocstar bench sim_fleet [replicas=8] [kinds=math8k,agentic] [policies=kv_aware,round_robin] [rounds=3]
    rocstar bench sim_fleet trace=FILE     a trace of your own instead of the kinds (`bench.placement.workload`)
    rocstar bench sim_fleet stream=3       throughput where work does not end, as under staleness 1 and more

Engines are H200s with a 14B model by first principles (`bench.simulator.machine`), not measured: compare policies and
quote no seconds. A round is a seed of the workloads. With `stream`, so many steps' groups come, a new one for each that
is complete, and a policy is compared by its tokens per second instead of its makespan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Annotated

from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import count, microseconds, ratio, share
from bench.measuring.terminal import say
from bench.placement import workload
from bench.placement.policies import NAMES, OURS, POLICIES, Policy, Setting
from bench.placement.workload import KINDS, Kind, Size, Traced
from bench.simulator.fleet import Simulation
from bench.simulator.machine import H200, Machine, lower_bound_s
from engine.balancing.balancer import Balancer
from sandbox.require import Rule, at_least, none_or, positive, require_fields

TRACE = "trace"  # the kind of a trace that is a file


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "seeds of the workloads"] = 3
    seed: Annotated[int, "the first seed; 101 to 103 were used for tuning"] = 9901
    replicas: Annotated[int, "replicas of the fleet"] = 8
    kinds: Annotated[tuple[Kind, ...], "workloads"] = KINDS
    trace: Annotated[Path | None, "a trace instead of the kinds"] = None
    policies: Annotated[tuple[Policy, ...], "policies; kv_aware is compared with the others"] = NAMES
    groups: Annotated[int | None, "groups of each workload; none: by the number of replicas"] = None
    kv: Annotated[float, "factor of the KV blocks"] = 1.0
    stream: Annotated[int, "steps whose groups come one after the other; 0: a single step"] = 0

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "replicas")
        require_fields(self, positive, "kv")
        require_fields(self, Rule("0 or at least 3", lambda value: value == 0 or value >= 3), "stream")
        require_fields(self, none_or(at_least(1)), "groups")
        require_fields(self, Rule("a file or none", lambda value: value is None or value.is_file()), "trace")


METRICS = {
    f"ratio_{kind}": ratio(kind, f"makespan over that of {OURS}, above 1 where {OURS} is faster", form=".3f")
    for kind in (*KINDS, TRACE)
} | {
    "regret": ratio(
        "regret", "makespan over the best of all other policies, geometric mean over workloads", form=".3f"
    ),
    "worst": ratio("worst", "largest regret of all workloads and rounds", form=".3f", summary="largest"),
    "over_bound": ratio("/ bound", "makespan over a lower bound that knows all lengths; tool-waiting KV is free there"),
    "busy": share("busy", "share of the engines' time, mean over workloads", form=".0f"),
    "preemptions": count("preempted", "preemptions in all workloads"),
    "recomputed": count("recomputed", "tokens computed again per generated token", form=".2f"),
    "moves": count("moves", "trajectories moved in the middle of a turn"),
    "decide_s": microseconds("decision", "CPU of a decision, mean over workloads", form=".0f"),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A policy on a workload. cost: its makespan, or seconds per token in a stream; below 1 of another's is faster."""

    cost: float
    figures: dict[str, float]


def measure(options: Options, keep: Keep) -> None:
    machine = replace(H200, blocks=round(H200.blocks * options.kv))
    for seed in range(options.seed, options.seed + options.rounds):
        outcomes: dict[str, dict[str, Outcome]] = {}
        for kind in (TRACE,) if options.trace else options.kinds:
            trace = joined([trace_of(options, kind, seed, step) for step in range(options.stream or 1)])
            outcomes[kind] = {}
            for name in options.policies:
                say(f"seed {seed}, {kind}: {name}")
                policy = POLICIES[name](Setting.of(trace, machine.kv_tokens))
                outcomes[kind][name] = (
                    streamed(policy, trace, machine, options.replicas, options.stream)
                    if options.stream
                    else simulated(policy, trace, machine, options.replicas)
                )
        keep({name: figures(outcomes, name) for name in options.policies})


def trace_of(options: Options, kind: str, seed: int, step: int) -> list[Traced]:
    if options.trace is not None:
        return workload.load(options.trace)
    size = size_for(kind, options.replicas)
    return workload.generate(kind, seed + 10_000 * step, replace(size, groups=options.groups or size.groups))


def size_for(kind: str, replicas: int) -> Size:
    """Returns 128 x 32 at 8 replicas (agentic 64 x 16), and from 64 on 512 groups: 16,384 and 8,192 trajectories."""
    full = workload.FULL[kind]
    factor = max(1.0, replicas / (8 if kind == "agentic" else 16))
    return replace(full, groups=min(512, round(full.groups * factor)))


def simulated(policy: Balancer, trace: Sequence[Traced], machine: Machine, replicas: int) -> Outcome:
    result = Simulation(policy, trace, machine, replicas).run()
    return Outcome(
        cost=result.makespan_s,
        figures={
            "over_bound": result.makespan_s / lower_bound_s(trace, machine, replicas),
            "busy": result.busy,
            "preemptions": result.preemptions,
            "recomputed": result.recomputed_tokens / result.generated_tokens,
            "moves": result.moves,
            "decide_s": result.decide_s / max(1, result.decisions),
        },
    )


def streamed(policy: Balancer, trace: Sequence[Traced], machine: Machine, replicas: int, steps: int) -> Outcome:
    """Simulates from when as many groups as a step has are complete until no new ones come."""
    groups: dict[int, list[Traced]] = {}
    for row in trace:
        groups.setdefault(row.group, []).append(row)
    to_come = list(groups.values())
    first, to_come = to_come[: len(to_come) // steps], to_come[len(to_come) // steps :]
    simulation = Simulation(policy, [row for group in first for row in group], machine, replicas)
    unfinished = {number: len(group) for number, group in groups.items()}
    complete = tokens = 0
    began_s = math.inf

    def turn_ended(row: Traced, turn: int) -> None:
        nonlocal complete, tokens, began_s
        if complete >= len(first):
            tokens += row.turns[turn].gen_tokens
            began_s = min(began_s, simulation.now)
        if turn + 1 == len(row.turns):
            unfinished[row.group] -= 1
            complete += not unfinished[row.group]

    simulation.turn_ended = turn_ended
    simulation.begin()
    while to_come:
        due = complete
        simulation.advance()
        for _ in range(min(complete - due, len(to_come))):
            simulation.arrive(to_come.pop(0), simulation.now)
    return Outcome(cost=(simulation.now - began_s) / tokens, figures={})


def joined(traces: Sequence[Sequence[Traced]]) -> list[Traced]:
    """Returns the traces one after the other, with groups of their own."""
    rows: list[Traced] = []
    for trace in traces:
        groups = 1 + max((row.group for row in rows), default=-1)
        rows += [replace(row, traj=len(rows) + n, group=groups + row.group) for n, row in enumerate(trace)]
    return rows


def figures(outcomes: Mapping[str, Mapping[str, Outcome]], name: str) -> dict[str, float]:
    """Returns the figures of a policy in a round. outcomes: by kind and policy."""
    values: dict[str, float] = {}
    regrets = []
    for kind, of in outcomes.items():
        if OURS in of:
            values[f"ratio_{kind}"] = of[name].cost / of[OURS].cost
        if len(of) > 1:
            regrets.append(of[name].cost / min(other.cost for policy, other in of.items() if policy != name))
    if regrets:
        values |= {"regret": geometric_mean(regrets), "worst": max(regrets)}
    own = [of[name].figures for of in outcomes.values()]
    for metric in own[0]:
        each = [figures_[metric] for figures_ in own]
        summarise = {"over_bound": geometric_mean, "preemptions": math.fsum, "moves": math.fsum}.get(metric, fmean)
        values[metric] = float(summarise(each))
    return values


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("over_bound", "regret", "worst", "preemptions"),
    quick={
        "rounds": "1",
        "replicas": "2",
        "groups": "32",
        "kinds": "math8k,agentic,uniform",
        "policies": "kv_aware,round_robin,static,thunder_polled",
    },
    simulated=True,
)
