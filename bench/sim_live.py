"""The simulator against two live replicas: constants fitted to a record of `bench.fleet`, then the same runs replayed.

A record has a JSON object per engine step: {"run", "kind", "seed", "policy", "replica", "t", "free_blocks", "running",
"waiting", "preempted", "prefilled"}; t in seconds from the begin of its run, the counts those at the end of the step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench import fleet
from bench.sim_costs import Fit, Machine, Values, fit
from bench.sim_run import Simulation
from bench.workload import Traced, load


@dataclass(frozen=True, slots=True)
class LiveStep:
    """A line of the record."""

    replica: int
    t: float
    free_blocks: int
    running: int
    preempted: int
    prefilled: int


@dataclass(slots=True)
class LiveRun:
    """A policy's run over one trace."""

    kind: str
    seed: int
    policy: str
    steps: list[LiveStep] = field(default_factory=list)

    @property
    def makespan_s(self) -> float:
        return max(step.t for step in self.steps)

    @property
    def preemptions(self) -> int:
        return sum(step.preempted for step in self.steps)

    @property
    def prefilled_tokens(self) -> int:
        return sum(step.prefilled for step in self.steps)


def read(path: str | Path) -> list[LiveRun]:
    """The runs of a record. Raises ValueError naming the line that is not a step."""
    runs: dict[int, LiveRun] = {}
    names = ("replica", "t", "free_blocks", "running", "preempted", "prefilled")
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            run = runs.setdefault(row["run"], LiveRun(row["kind"], row["seed"], row["policy"]))
            run.steps.append(LiveStep(*(row[name] for name in names)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not an engine step: {error!r}") from error
    return list(runs.values())


def features(runs: Iterable[LiveRun], blocks: int, block_size: int) -> tuple[Values, Values]:
    """Per step of an engine that was busy before it: (1, n, S, P) [steps, 4] and its seconds [steps].

    Its seconds are the distance to the engine's step before. What ran at the end of that one and was not preempted
    decodes in this one. Raises ValueError when there are fewer than 100 steps.
    """
    rows, seconds = [], []
    for run in runs:
        last: dict[int, LiveStep] = {}
        for step in run.steps:
            before = last.get(step.replica)
            last[step.replica] = step
            if before is not None and before.running > 0:
                kv_tokens = (blocks - before.free_blocks) * block_size
                rows.append((1.0, max(0, before.running - step.preempted), kv_tokens, step.prefilled))
                seconds.append(step.t - before.t)
    if len(rows) < 100:
        raise ValueError(f"a fit needs 100 steps of busy engines, got {len(rows)}")
    return np.asarray(rows, np.float64), np.asarray(seconds, np.float64)


def calibrated(runs: Sequence[LiveRun]) -> tuple[Machine, Fit]:
    """The live engines with the costs that their steps show."""
    engine = fleet.ENGINE
    found = fit(*features(runs, engine.blocks, engine.block_size))
    machine = Machine(
        blocks=engine.blocks,
        block_size=engine.block_size,
        costs=found.costs,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=32_768,
    )
    return machine, found


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Of a policy on a workload: medians of the live and the simulated runs, seconds, and counts."""

    kind: str
    policy: str
    live_s: float
    simulated_s: float
    live_preemptions: float
    simulated_preemptions: float
    live_prefilled: float
    simulated_prefilled: float

    @property
    def ratio(self) -> float:
        """Simulated over live makespan."""
        return self.simulated_s / self.live_s


def compare(runs: Sequence[LiveRun], machine: Machine, groups: int | None = None) -> list[Comparison]:
    """Replays what the record holds. groups: the live runs took so many of each trace."""
    found = []
    for kind, policy in dict.fromkeys((run.kind, run.policy) for run in runs):
        live = [run for run in runs if (run.kind, run.policy) == (kind, policy)]
        simulated = []
        for run in live:
            trace = load(fleet.TRACES / f"{run.kind}.{run.seed}.jsonl.gz")
            simulated.append(_simulate([row for row in trace if groups is None or row.group < groups], policy, machine))
        median = statistics.median
        found.append(
            Comparison(
                kind=kind,
                policy=policy,
                live_s=median(run.makespan_s for run in live),
                simulated_s=median(result["makespan_s"] for result in simulated),
                live_preemptions=median(run.preemptions for run in live),
                simulated_preemptions=median(result["preemptions"] for result in simulated),
                live_prefilled=median(run.prefilled_tokens for run in live),
                simulated_prefilled=median(result["prefilled_tokens"] for result in simulated),
            )
        )
    return found


def _simulate(trace: Sequence[Traced], policy: str, machine: Machine) -> Mapping[str, float]:
    balancer = fleet.POLICIES[policy](max(row.total_tokens for row in trace))
    result = Simulation(balancer, trace, machine, fleet.ENGINE.replicas, longest_segment=1, tick_s=0.0).run()
    return {name: getattr(result, name) for name in ("makespan_s", "preemptions", "prefilled_tokens")}
