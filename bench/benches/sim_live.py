"""How near the simulator is to two live replicas: costs are fitted to a record, and its runs are simulated.

    rocstar bench fleet record=steps.jsonl && rocstar bench sim_live record=steps.jsonl

A record has a JSON object per report of an engine: {"run", "kind", "seed", "policy", "replica", "t", "free_blocks",
"running", "waiting", "preempted", "prefilled", "steps"}; t in seconds from the beginning of its run, the counts those
at the end of the steps that it stands for. A round is one live run of each policy on each workload.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from bench.benches.fleet import fleet
from bench.benches.fleet.replay import Step
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import count, ratio, seconds
from bench.measuring.result import Figures
from bench.placement.policies import POLICIES
from bench.placement.workload import load
from bench.simulator.fit import Fit, features, fitted
from bench.simulator.fleet import Simulation
from bench.simulator.machine import Machine

FEWEST = 100  # steps of a record


@dataclass(frozen=True, kw_only=True)
class Options:
    record: Annotated[Path, "the record of a live run"]
    groups: Annotated[int | None, "groups of each trace that the live runs took; none: all"] = None

    def __post_init__(self) -> None:
        if not self.record.is_file():
            raise ValueError(f"record must be a file, got {str(self.record)!r}")


METRICS = {
    "live_s": seconds("live", "makespan of the live run"),
    "simulated_s": seconds("simulated", "makespan of the simulated run"),
    "ratio": ratio("simulated / live", "makespans", form=".3f"),
    "steady_ratio": ratio(
        "steady", "the same, had the machine been as fast in this run as in all of the record", form=".3f"
    ),
    "live_preemptions": count("preempted", "in the live run"),
    "simulated_preemptions": count("simulated preempted", "in the simulated run"),
    "r2": count("r2", "of the fit of the steps' seconds", form=".3f"),
}


@dataclass(slots=True)
class LiveRun:
    """A policy's run over one trace."""

    kind: str
    seed: int
    policy: str
    steps: list[Step] = field(default_factory=list)


def read(path: str | Path) -> list[LiveRun]:
    """Returns the runs of a record. Raises ValueError naming the line that is not a step."""
    runs: dict[int, LiveRun] = {}
    names = ("replica", "t", "free_blocks", "running", "waiting", "preempted", "prefilled", "steps")
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            run = runs.setdefault(row["run"], LiveRun(row["kind"], row["seed"], row["policy"]))
            run.steps.append(Step(*(row[name] for name in names)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not an engine step: {error!r}") from error
    return list(runs.values())


def calibrated(runs: Iterable[LiveRun]) -> tuple[Machine, Fit]:
    """Returns the live engines with the costs that their steps show. Raises ValueError for fewer than FEWEST steps."""
    engine = fleet.ENGINE
    features_N4, seconds_N = features([run.steps for run in runs], engine.blocks, engine.block_size)
    if len(seconds_N) < FEWEST:
        raise ValueError(f"a record needs {FEWEST} steps of busy engines, got {len(seconds_N)}")
    fit = fitted(features_N4, seconds_N)
    machine = Machine(
        blocks=engine.blocks,
        block_size=engine.block_size,
        cost=fit.cost,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=32_768,
    )
    return machine, fit


def compared(run: LiveRun, machine: Machine, groups: int | None = None) -> dict[str, float]:
    """Simulates a live run. groups: the live run took so many of its trace."""
    features_N4, seconds_N = features([run.steps], machine.blocks, machine.block_size)
    expected_s = sum(
        machine.cost.step_s(n, kv_tokens=kv_tokens, prompt_tokens=prompt)
        for _, n, kv_tokens, prompt in features_N4.tolist()
    )
    live_s = max(step.t for step in run.steps)
    trace = [row for row in load(fleet.trace_of(run.kind, run.seed)) if groups is None or row.group < groups]
    policy = POLICIES[run.policy](fleet.setting_of(trace))
    result = Simulation(policy, trace, machine, fleet.REPLICAS, longest_segment=1, tick_s=0.0).run()
    return {
        "live_s": live_s,
        "simulated_s": result.makespan_s,
        "ratio": result.makespan_s / live_s,
        "steady_ratio": result.makespan_s / live_s * float(seconds_N.sum()) / expected_s,
        "live_preemptions": sum(step.preempted for step in run.steps),
        "simulated_preemptions": result.preemptions,
    }


def rounds_of(runs: Sequence[LiveRun]) -> list[list[LiveRun]]:
    """Returns the n-th run of each policy on each workload, for each n."""
    rounds: list[list[LiveRun]] = []
    seen: dict[tuple[str, str], int] = {}
    for run in runs:
        number = seen[run.kind, run.policy] = seen.get((run.kind, run.policy), -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(run)
    return rounds


def measure(options: Options, keep: Keep) -> None:
    runs = read(options.record)
    machine, fit = calibrated(runs)
    for live in rounds_of(runs):
        figures: Figures = {f"{run.kind}/{run.policy}": compared(run, machine, options.groups) for run in live}
        keep({**figures, "fit": {"r2": fit.r2}})


BENCH = Bench(
    options=Options, metrics=METRICS, measure=measure, headline=("ratio", "live_s", "simulated_s"), simulated=True
)
