"""Does the quick start learn, and how fast? Runs of recipes/quickstart.py with different seeds.

    rocstar bench quickstart [rounds=3] [steps=40] [field=value of the quick start ...]

A round is a seed. Accuracy is that of 512 held-out problems, one sample each at temperature 1.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bench import ROOT
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import count, milliseconds, seconds, share
from bench.measuring.processes import child
from bench.measuring.terminal import say
from engine import metric_names as metric
from engine.console.options import Rest
from sandbox.require import at_least, require_fields

QUICKSTART = ROOT / "recipes" / "quickstart.py"
GOAL = 0.9  # held-out accuracy whose time is told


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "seeds"] = 3
    seed: Annotated[int, "the first seed"] = 0
    steps: Annotated[int, "steps of a run"] = 40
    fields: Annotated[tuple[str, ...], Rest("options of the quick start")] = ()

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "steps")


METRICS = {
    "accuracy_initial": count("accuracy before", "held out", form=".3f"),
    "accuracy_final": count("accuracy after", "held out", form=".3f"),
    "tool_errors_initial": share("tool errors before", "in correct held-out trajectories"),
    "tool_errors_final": share("tool errors after", "in correct held-out trajectories"),
    "train_s": seconds("training", "time of all steps, without evaluations", form=".0f"),
    "to_goal_s": seconds(f"to {GOAL}", f"training until an evaluation gave {GOAL} or more", form=".0f"),
    "first_step_s": seconds("first step", "from the start of the process until a step was trained", form=".1f"),
    "step_s": seconds("step", "median"),
    "tool_calls": count("tool calls", "all of them executed and jailed"),
    "tool_latency_s": milliseconds("tool latency", "median of a call beside the busy engines, median over steps"),
    "canary_max": count("canary", "largest difference of a replica's and the learner's log-probabilities", form=".1e"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its summary, and the rows of its metrics by step."""

    summary: dict[str, Any]
    rows: list[dict[str, Any]]

    def evaluation(self, step: int) -> dict[str, float]:
        """Returns accuracy and tool errors of the evaluation after a step."""
        row = next(row for row in self.rows if row.get("step") == step and metric.EVAL_ACCURACY in row)
        return {"accuracy": row[metric.EVAL_ACCURACY], "tool_errors": row[metric.EVAL_TOOL_ERROR_SHARE_CORRECT]}


def run_once(fields: Sequence[str]) -> Run:
    """Runs the quick start in a process of its own. Raises BenchFailed where it fails."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, str(QUICKSTART), f"runs={runs}", "name=run", *fields]
        with child(command) as process:
            if code := process.wait():
                raise BenchFailed(f"the quick start ended with exit code {code}; see above")
        folder = Path(runs) / "run"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return Run(summary=json.loads((folder / "summary.json").read_text()), rows=rows)


def measure(options: Options, keep: Keep) -> None:
    for number in range(options.rounds):
        seed = options.seed + number
        say(f"round {number + 1} of {options.rounds}: {options.steps} steps with seed {seed}")
        run = run_once([f"steps={options.steps}", f"seed={seed}", *options.fields])
        keep({"": figures(run, options.steps)})


def figures(run: Run, steps: int) -> dict[str, float]:
    trained = [row for row in run.rows if metric.TIME_STEP_S in row]
    reached = [
        row[metric.TIME_TRAIN_TOTAL_S]
        for row in run.rows
        if row.get(metric.EVAL_ACCURACY, 0.0) >= GOAL and metric.TIME_STEP_S in row
    ]
    before, after = run.evaluation(0), run.evaluation(steps)
    values = {
        "accuracy_initial": before["accuracy"],
        "accuracy_final": after["accuracy"],
        "tool_errors_initial": before["tool_errors"],
        "tool_errors_final": after["tool_errors"],
        "train_s": trained[-1][metric.TIME_TRAIN_TOTAL_S],
        "first_step_s": run.summary["first_step_s"],
        "step_s": statistics.median(row[metric.TIME_STEP_S] for row in trained),
        "tool_calls": run.summary["tool_calls_jailed"],
        "tool_latency_s": 1e-3 * statistics.median(row[metric.TOOLS_LATENCY_P50_MS] for row in trained),
        "canary_max": run.summary["canary_max_abs"],
    }
    return values | ({"to_goal_s": reached[0]} if reached else {})


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("accuracy_final", "step_s", "train_s", "to_goal_s"),
    quick={"rounds": "1", "steps": "8"},
)
