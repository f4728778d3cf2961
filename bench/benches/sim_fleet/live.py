"""The simulator against two live replicas: constants fitted to a record of `bench fleet`, then the same runs replayed.

A record has a JSON object per engine step: {"run", "kind", "seed", "policy", "replica", "t", "free_blocks", "running",
"waiting", "preempted", "prefilled"}; t in seconds from the begin of its run, the counts those at the end of the step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.benches.fleet import fleet
from bench.placement.workload import load
from bench.simulator.costs import Fit, Machine, Values, fit
from bench.simulator.fleet import Simulation


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


def after_idle(run: LiveRun) -> Iterable[LiveStep]:
    """Steps before which their engine did nothing."""
    running: dict[int, int] = {}
    for step in run.steps:
        if not running.get(step.replica):
            yield step
        running[step.replica] = step.running


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
class Figures:
    """Of a run. slow: how much longer its steps took than the fit over all runs says (the machine's mood)."""

    makespan_s: float
    steps: int
    preemptions: int
    prefilled_tokens: int
    slow: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Of a policy on a workload: medians of the live and of the simulated runs."""

    kind: str
    policy: str
    live: Figures
    simulated: Figures

    @property
    def ratio(self) -> float:
        """Simulated over live makespan."""
        return self.simulated.makespan_s / self.live.makespan_s

    @property
    def steady_ratio(self) -> float:
        """The same had the machine been as fast in this run as in all: says more where it was not idle."""
        return self.ratio * self.live.slow


def compare(runs: Sequence[LiveRun], machine: Machine, groups: int | None = None) -> list[Comparison]:
    """Replays what the record holds. groups: the live runs took so many of each trace."""
    found = []
    for kind, policy in dict.fromkeys((run.kind, run.policy) for run in runs):
        of_policy = [run for run in runs if (run.kind, run.policy) == (kind, policy)]
        live = [_live(run, machine) for run in of_policy]
        simulated = [_simulated(run, machine, groups) for run in of_policy]
        found.append(Comparison(kind=kind, policy=policy, live=_median(live), simulated=_median(simulated)))
    return found


def _live(run: LiveRun, machine: Machine) -> Figures:
    rows, seconds = features([run], machine.blocks, machine.block_size)
    expected_s = sum(machine.costs.step_s(n, kv_tokens, prompt) for _, n, kv_tokens, prompt in rows.tolist())
    return Figures(
        makespan_s=max(step.t for step in run.steps),
        steps=len(seconds) + sum(step.prefilled > 0 for step in after_idle(run)),
        preemptions=sum(step.preempted for step in run.steps),
        prefilled_tokens=sum(step.prefilled for step in run.steps),
        slow=float(seconds.sum()) / expected_s,
    )


def _simulated(run: LiveRun, machine: Machine, groups: int | None) -> Figures:
    trace = load(fleet.TRACES / f"{run.kind}.{run.seed}.jsonl.gz")
    trace = [row for row in trace if groups is None or row.group < groups]
    balancer = fleet.POLICIES[run.policy](max(row.total_tokens for row in trace))
    simulation = Simulation(balancer, trace, machine, fleet.ENGINE.replicas, longest_segment=1, tick_s=0.0)
    result = simulation.run()
    return Figures(
        makespan_s=result.makespan_s,
        steps=sum(engine.steps for engine in simulation.engines),
        preemptions=result.preemptions,
        prefilled_tokens=result.prefilled_tokens,
    )


def _median(runs: Sequence[Figures]) -> Figures:
    return Figures(**{name: statistics.median(getattr(run, name) for run in runs) for name in Figures.__slots__})
