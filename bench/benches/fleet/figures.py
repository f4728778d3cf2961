"""Figures of the runs of `bench fleet`: per policy over the rounds of a workload, ratios, and over all workloads.

Pure: runs go in, numbers come out. A figure of a policy is the mean over its runs where it counts something, else the
median.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.benches.fleet.bound import Engine, fit, lower_bound_s
from bench.benches.fleet.replay import Record
from bench.placement.workload import Traced

OURS = "kv_aware"
COUNTS = ("preemptions", "prefilled_tokens", "recomputed_tokens", "moves", "rehomed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A policy's run over one trace. balancer_cpu_share: of one core; decide_us: mean CPU of one decision."""

    round: int
    kind: str
    seed: int
    policy: str
    traces: Sequence[Traced]
    record: Record
    balancer_cpu_share: float = 0.0
    decide_us: float = 0.0

    def figures(self, blocks: int) -> dict[str, float]:
        record = self.record
        return {
            "makespan_s": record.makespan_s,
            "tokens_per_s": record.generated / record.makespan_s,
            "preemptions": record.preemptions,
            "prefilled_tokens": record.prefilled,
            "recomputed_tokens": record.recomputed,
            "prefix_hits": record.prefix_hits,
            "moves": record.moves,
            "rehomed": record.rehomed,
            "free_spread": record.spread(blocks),
            "p99_completion_s": quantile(record.completed_s, 0.99),
            "p99_trajectory_s": quantile(record.lasted_s, 0.99),
            "balancer_cpu_share": self.balancer_cpu_share,
            "decide_us": self.decide_us,
        }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def of_policy(runs: Sequence[Run], policy: str, blocks: int) -> dict[str, float]:
    rows = [run.figures(blocks) for run in runs if run.policy == policy]
    summary = {name: statistics.fmean if name in COUNTS else statistics.median for row in rows for name in row}
    return {name: summarise([row[name] for row in rows]) for name, summarise in summary.items()}


def ratios(runs: Sequence[Run], policy: str) -> list[float]:
    """Makespans, theirs / ours, of the rounds that have both."""
    ours = {run.round: run.record.makespan_s for run in runs if run.policy == OURS}
    return [
        run.record.makespan_s / ours[run.round] for run in runs if run.policy == policy != OURS and run.round in ours
    ]


def workload_metrics(runs: Sequence[Run], engine: Engine) -> dict[str, Any]:
    """Of the runs of one kind: figures by policy, ratios with their range, ours / lower bound."""
    found: dict[str, Any] = {"policies": {}}
    for policy in dict.fromkeys(run.policy for run in runs):
        figures = found["policies"][policy] = of_policy(runs, policy, engine.blocks)
        found[f"preemptions_{policy}"] = figures["preemptions"]
        found[f"recomputed_tokens_{policy}"] = figures["recomputed_tokens"]
        if paired := ratios(runs, policy):
            found[f"makespan_ratio_{policy}"] = statistics.median(paired)
            found[f"makespan_ratio_range_{policy}"] = [min(paired), max(paired)]
    ours = [run for run in runs if run.policy == OURS]
    if ours:
        found["step_cost"] = asdict(fit(run.record.steps for run in ours))
        costs = [fit([run.record.steps]) for run in ours]  # of each run: on a shared machine a step costs more or less
        bounds_s = [lower_bound_s(run.traces, cost, engine) for run, cost in zip(ours, costs, strict=True)]
        found["bound_ratio"] = statistics.median(
            run.record.makespan_s / bound_s for run, bound_s in zip(ours, bounds_s, strict=True)
        )
    return found


def overall(workloads: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Over workloads: the geometric mean of ratios, the mean of counts."""
    found = {}
    for name in dict.fromkeys(name for row in workloads.values() for name in row):
        values = [row[name] for row in workloads.values() if name in row]
        if name.startswith(("preemptions_", "recomputed_tokens_")):
            found[name] = statistics.fmean(values)
        elif name == "bound_ratio" or (name.startswith("makespan_ratio_") and "_range_" not in name):
            found[name] = statistics.geometric_mean(values)
    return found


COLUMNS = {
    "makespan s": ("makespan_s", ".2f"),
    "tok/s": ("tokens_per_s", ".0f"),
    "preempted": ("preemptions", ".1f"),
    "recomputed": ("recomputed_tokens", ".0f"),
    "prefix hits": ("prefix_hits", ".2f"),
    "free spread": ("free_spread", ".2f"),
    "moves": ("moves", ".1f"),
    "rehomed": ("rehomed", ".1f"),
    "p99 end s": ("p99_completion_s", ".2f"),
    "from 1st token": ("p99_trajectory_s", ".2f"),
    "decide us": ("decide_us", ".0f"),
}
HEADER = ("workload", "policy", "theirs / ours", *COLUMNS)


def table(kind: str, found: Mapping[str, Any]) -> list[list[str]]:
    """Rows under HEADER, fastest first."""
    rows = []
    for policy, figures in sorted(found["policies"].items(), key=lambda item: item[1]["makespan_s"]):
        low, high = found.get(f"makespan_ratio_range_{policy}", (1, 1))
        ratio = f"{found.get(f'makespan_ratio_{policy}', 1):.2f} [{low:.2f}-{high:.2f}]"
        rows.append([kind, policy, ratio, *(format(figures[name], form) for name, form in COLUMNS.values())])
    return rows


def write_steps(path: Path, runs: Sequence[Run], written: int = 0) -> None:
    """JSON lines: the fields of Step, and the run to which it belongs (t counts from its begin).

    written: runs that the file has; with 0 it is begun anew.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if written else "w") as file:
        for number, run in enumerate(runs, written):
            of = {"run": number, "kind": run.kind, "seed": run.seed, "policy": run.policy}
            file.writelines(json.dumps(asdict(step) | of) + "\n" for step in run.record.steps)
