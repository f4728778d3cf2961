"""Placement policies on simulated fleets of 8 to 1,024 replicas: the same Balancer objects, the events of the fleet.

    python -m bench.sim_fleet [--quick] [--replicas 8,64] [--kinds math8k,...] [--policies kv_aware,...] [--seeds 1,2]

Policies get `arrive`, `turn_done`, `leave` and `sample` as from `engine.fleet.Fleet`; a decision follows all events of a
moment, at most one per `tick_s`, and while trajectories wait also each sample. A sample stands for KvSample.steps engine
steps: 1 to 32 in which nothing begins or ends. Engines: `bench.sim_engine`; seconds: `bench.sim_costs`.

Every number is of the model, not of a GPU: compare policies, do not quote seconds. The ratio of a policy is its
makespan over that of kv_aware, so that above 1 kv_aware is faster; regret is a makespan over the best one of the same
workload and seed. The lower bound knows all lengths and lets tool-waiting KV cost nothing.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import workload
from bench.report import environment, finish
from bench.sim_costs import H200, Machine, lower_bound_s
from bench.sim_engine import Engine, Request
from bench.workload import Size, Traced
from engine.balance import Balancer
from engine.kv_aware import KvAware
from engine.rivals import Aimd, LeastInFlight, RoundRobin, StaticSplit, ThunderLike, TokenBudget

MakePolicy = Callable[[int], Balancer]  # from the length of the longest trajectory

POLICIES: dict[str, MakePolicy] = {
    "kv_aware": lambda most: KvAware(most),
    "static_barrier": lambda most: StaticSplit(barrier=True),
    "static": lambda most: StaticSplit(),
    "round_robin": lambda most: RoundRobin(),
    "least_in_flight": lambda most: LeastInFlight(),
    "cap_24": lambda most: LeastInFlight(24),
    "cap_64": lambda most: LeastInFlight(64),
    "cap_128": lambda most: LeastInFlight(128),
    "cap_192": lambda most: LeastInFlight(192),
    "budget": lambda most: TokenBudget(most),
    "aimd": lambda most: Aimd(most),
    "thunder": lambda most: ThunderLike(),
}
OURS = "kv_aware"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One run. trajectory seconds: from its first placement to its end; decide_us: of real time per decision."""

    makespan_s: float
    busy: float
    preemptions: int
    recomputed_tokens: int
    restored_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    trajectory_p99_s: float
    moves: int
    decisions: int
    decide_us: float
    wall_s: float


@dataclass(slots=True)
class _Trajectory:
    traced: Traced
    turn: int = 0
    tokens: int = 0  # so far
    held: int = 0  # of them in whole blocks when the last turn ended
    replica: int = -1
    goal: int = -1  # where it moves to
    placed_at: float = -1.0
    state: str = "waiting"  # "waiting" | "running" | "tool" | "done"


class Simulation:
    """Runs a trace under a policy to its end. Deterministic. host_blocks: see `bench.sim_engine.Engine`."""

    def __init__(
        self, policy: Balancer, trace: Sequence[Traced], machine: Machine, replicas: int, host_blocks: int = 0
    ) -> None:
        self.engines = [Engine(machine, host_blocks) for _ in range(replicas)]
        self.now = 0.0
        self.moves = self.decisions = 0
        self.decide_s = 0.0
        self._policy = policy
        self._machine = machine
        # as often as a loop that follows engine steps can decide
        self._tick_s = machine.costs.o + machine.costs.w
        self._states = [_Trajectory(row) for row in trace]
        self._waiting = 0
        self._open = len(trace)
        self._events: list[tuple[float, int, str, int]] = []
        self._serial = 0
        self._ends_at = [-1.0] * replicas  # of the engines' segments
        self._wanted = False
        self._decided_at = -math.inf
        self._took_s: list[float] = []

    def run(self) -> Result:
        """Raises RuntimeError when trajectories wait and nothing will happen any more."""
        began = time.perf_counter()
        for index, engine in enumerate(self.engines):
            self._policy.replica_up(index, engine.machine.blocks, engine.machine.block_size)
        for key in range(len(self._states)):
            self._arrive(key)
        self._decide()
        while self._events:
            self.now, _, kind, number = heapq.heappop(self._events)
            if kind == "engine":
                self._segment_ended(number)
            elif kind == "tool":
                self._arrive(number)
            if self._wanted and not (self._events and self._events[0][0] <= self.now):
                self._schedule()
        if self._open:
            raise RuntimeError(f"{self._open} trajectories are left at {self.now:.1f} s and nothing will happen")
        return self._result(time.perf_counter() - began)

    def _result(self, wall_s: float) -> Result:
        total = lambda name: sum(getattr(engine, name) for engine in self.engines)  # noqa: E731
        return Result(
            makespan_s=self.now,
            busy=total("busy_s") / (len(self.engines) * self.now),
            preemptions=total("preemptions"),
            recomputed_tokens=total("recomputed_tokens"),
            restored_tokens=total("restored_tokens"),
            prefilled_tokens=total("prefilled_tokens"),
            generated_tokens=sum(state.traced.gen_tokens for state in self._states),
            trajectory_p99_s=float(np.percentile(self._took_s, 99)),
            moves=self.moves,
            decisions=self.decisions,
            decide_us=1e6 * self.decide_s / max(1, self.decisions),
            wall_s=wall_s,
        )

    def _push(self, at: float, kind: str, number: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, kind, number))

    def _arrive(self, key: int) -> None:
        state = self._states[key]
        state.tokens += state.traced.turns[state.turn].prompt_new_tokens
        state.state = "waiting"
        self._waiting += 1
        self._policy.arrive(key, state.traced.group, state.tokens, self.now)
        self._wanted = True

    def _schedule(self) -> None:
        """Decides now, or as soon as the tick allows."""
        due = self._decided_at + self._tick_s
        if due <= self.now:
            self._decide()
        elif due > self._due:
            self._due = due
            self._push(due, "decide", 0)

    _due = -math.inf

    def _decide(self) -> None:
        self._wanted = False
        self._decided_at = self.now
        began = time.perf_counter()
        places = self._policy.decide(self.now)
        self.decide_s += time.perf_counter() - began
        self.decisions += 1
        for place in places:
            state = self._states[place.key]
            if state.state == "running":
                self._move(place.key, place.replica)
            else:
                assert state.state == "waiting", f"trajectory {place.key} is placed while {state.state}"
                self._waiting -= 1
                turn = state.traced.turns[state.turn]
                self._submit(place.key, place.replica, state.tokens, turn.gen_tokens, state.held)

    def _submit(self, key: int, replica: int, tokens: int, generate: int, held: int) -> None:
        state = self._states[key]
        state.state, state.replica, state.goal = "running", replica, -1
        if state.placed_at < 0:
            state.placed_at = self.now
        prompt_tokens = state.traced.turns[0].prompt_new_tokens
        engine = self.engines[replica]
        engine.submit(Request(key, state.traced.group, prompt_tokens, tokens, generate, held))
        self._cut(replica)

    def _cut(self, replica: int) -> None:
        engine = self.engines[replica]
        self._go_on(replica, engine.begin(self.now) if engine.idle else engine.cut(self.now))

    def _go_on(self, replica: int, until: float | None) -> None:
        if until is not None and until != self._ends_at[replica]:
            self._ends_at[replica] = until
            self._push(until, "engine", replica)

    def _move(self, key: int, replica: int) -> None:
        """Takes effect at the next step boundary, unless the turn ends there."""
        state = self._states[key]
        assert replica != state.replica, f"trajectory {key} is moved to where it runs"
        self.moves += 1
        if state.goal < 0:
            self.engines[state.replica].abort(key)
            self._cut(state.replica)
        state.goal = replica

    def _segment_ended(self, replica: int) -> None:
        if self._ends_at[replica] != self.now:
            return  # it was cut
        self._ends_at[replica] = -1.0
        engine = self.engines[replica]
        outcome = engine.end()
        self._policy.sample(replica, outcome.sample, self.now)
        self._wanted |= self._waiting > 0
        for request in outcome.finished:
            self._turn_ended(request.key)
        for request in outcome.aborted:
            self._submit(request.key, self._states[request.key].goal, request.tokens, request.generate, request.held)
        if engine.idle:
            self._go_on(replica, engine.begin(self.now))

    def _turn_ended(self, key: int) -> None:
        state = self._states[key]
        turn = state.traced.turns[state.turn]
        state.tokens += turn.gen_tokens
        size = self._machine.block_size
        state.held = (state.tokens - 1) // size * size
        state.turn += 1
        self._wanted = True
        if state.turn < len(state.traced.turns):
            state.state = "tool"
            self._policy.turn_done(key, state.tokens, self.now)
            self._push(self.now + turn.tool_latency_s, "tool", key)
            return
        state.state = "done"
        self._open -= 1
        self._took_s.append(self.now - state.placed_at)
        self._policy.leave(key, state.tokens, True)


def size_for(kind: str, replicas: int) -> Size:
    """At 8 replicas 128 x 32 (agentic 64 x 16); at 64 the report's batch of 16,384 (agentic 8,192); more in proportion."""
    full = workload.FULL[kind]
    factor = max(1.0, replicas / (8 if kind == "agentic" else 16))
    return Size(groups=round(full.groups * factor), samples=full.samples)


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def simulate(
    make: MakePolicy, trace: Sequence[Traced], machine: Machine, replicas: int, host_blocks: int = 0
) -> Result:
    most = max(row.total_tokens for row in trace)
    return Simulation(make(most), trace, machine, replicas, host_blocks).run()


Cell = tuple[str, int, int]  # kind, replicas, seed


def summary(results: Mapping[Cell, Mapping[str, Result]], bounds: Mapping[Cell, float]) -> dict[str, Any]:
    """The metrics of the JSON line."""
    metrics: dict[str, Any] = {"replicas": sorted({replicas for _, replicas, _ in results})}
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    best = {cell: min(result.makespan_s for result in found.values()) for cell, found in results.items()}
    for name in names:
        cells = {cell: found for cell, found in results.items() if name in found}
        metrics[f"recomputed_tokens_{name}"] = sum(found[name].recomputed_tokens for found in cells.values())
        metrics[f"preemptions_{name}"] = sum(found[name].preemptions for found in cells.values())
        regrets = [found[name].makespan_s / best[cell] for cell, found in cells.items()]
        metrics[f"regret_{name}"] = {"geomean": geomean(regrets), "worst": max(regrets)}
        ratios = {
            cell: found[name].makespan_s / found[OURS].makespan_s for cell, found in cells.items() if OURS in found
        }
        if name == OURS or not ratios:
            continue
        by_kind: dict[str, float] = {}
        for kind, replicas in dict.fromkeys(cell[:2] for cell in ratios):
            of_kind = [ratio for cell, ratio in ratios.items() if cell[:2] == (kind, replicas)]
            by_kind[f"{kind}@{replicas}"] = geomean(of_kind)
        metrics[f"makespan_ratio_{name}"] = by_kind | {"overall": geomean(list(ratios.values()))}
    ours = [found[OURS].makespan_s / bounds[cell] for cell, found in results.items() if OURS in found]
    metrics["bound_ratio"] = geomean(ours) if ours else None
    return metrics


def table(results: Mapping[Cell, Mapping[str, Result]], bounds: Mapping[Cell, float]) -> list[list[str]]:
    """A row per workload, size and policy; means over seeds."""
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
            generated = mean("generated_tokens")
            rows.append(
                [
                    f"{kind} x {replicas}",
                    name,
                    f"{mean('makespan_s'):.1f}",
                    f"{geomean(ratios):.3f}" if ratios else "",
                    f"{geomean([results[cell][name].makespan_s / bounds[cell] for cell in cells]):.2f}",
                    f"{mean('busy'):.2f}",
                    f"{mean('preemptions'):.0f}",
                    f"{mean('recomputed_tokens') / generated:.2f}",
                    f"{mean('trajectory_p99_s'):.0f}",
                    f"{mean('moves'):.0f}",
                    f"{mean('decide_us'):.0f}",
                    f"{mean('wall_s'):.1f}",
                ]
            )
    return rows


HEADER = (
    "workload x replicas",
    "policy",
    "makespan s",
    "/ ours",
    "/ bound",
    "busy",
    "preempted",
    "recomputed / generated",
    "p99 trajectory s",
    "moves",
    "us a decision",
    "wall s",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sim_fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the groups, three kinds, few policies")
    parser.add_argument("--replicas", default="8", help="numbers, with commas")
    parser.add_argument("--kinds", help=f"of {', '.join(workload.KINDS)}")
    parser.add_argument("--policies", help=f"of {', '.join(POLICIES)}, cap_<N>")
    parser.add_argument("--seeds", default="101", help="101 to 103 are for development")
    parser.add_argument("--groups", type=int, help="groups of each workload")
    parser.add_argument("--kv", type=float, default=1.0, help="KV blocks times this")
    options = parser.parse_args()
    machine = H200
    kinds = (options.kinds or ("math8k,agentic,uniform" if options.quick else ",".join(workload.KINDS))).split(",")
    quick = "kv_aware,static,round_robin,thunder"
    policies = (options.policies or (quick if options.quick else ",".join(POLICIES))).split(",")
    before = environment()
    results: dict[Cell, dict[str, Result]] = {}
    bounds: dict[Cell, float] = {}
    for replicas in map(int, options.replicas.split(",")):
        for kind in kinds:
            for seed in map(int, options.seeds.split(",")):
                size = size_for(kind, replicas)
                groups = options.groups or (size.groups // 4 if options.quick else size.groups)
                trace = workload.generate(kind, seed, Size(groups=groups, samples=size.samples))
                cell = (kind, replicas, seed)
                bounds[cell] = lower_bound_s(trace, machine, replicas)
                results[cell] = {}
                for name in policies:
                    results[cell][name] = simulate(POLICIES[name], trace, machine, replicas)
    config = vars(options)
    finish(
        "sim_fleet",
        "Simulated fleets",
        HEADER,
        table(results, bounds),
        config=config,
        metrics=summary(results, bounds),
        environment=before,
    )


if __name__ == "__main__":
    main()
