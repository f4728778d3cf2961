"""Runs a recipe and reads a few figures out of the files that any run leaves: pace, tokens, learning, staleness."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measuring.metric import count, rate, seconds, share
from engine import metric_names as metric

SKIP = 2  # first steps, in which caches and the allocator warm up
METRICS = {
    "step_s": seconds("step", "without evaluations; median of a run's steps but the first two"),
    "tokens_per_s": rate("tokens/s", "sampled, per second of the steps but the first two"),
    "accuracy": count("accuracy", "held out, of the last evaluation", form=".3f"),
    "to_goal_s": seconds("to the goal", "training until an evaluation gave the accuracy of `goal`", form=".1f"),
    "train_s": seconds("training", "time of all steps, without evaluations", form=".1f"),
    "reward": count("reward", "mean of the last quarter of the steps", form=".3f"),
    "goodput": share("goodput", "share of the sampled tokens that were trained"),
    "staleness_mean": count("staleness", "versions by which a trained token is behind, mean", form=".2f"),
    "kl": count("KL", "from sampler to learner, nats per token", form=".1e"),
}
HEADLINE = ("step_s", "tokens_per_s", "accuracy", "to_goal_s")


def run_recipe(recipe: Path, folder: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the recipe anew in this folder, its output on stderr, and returns the rows of its metrics.

    Raises subprocess.CalledProcessError.
    """
    command = [sys.executable, str(recipe), f"runs={folder.parent}", f"name={folder.name}", "fresh=true", *fields]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(rows: Sequence[Mapping[str, Any]], goal: float) -> dict[str, float]:
    """Returns the metrics above of which the rows have anything.

    Raises ValueError where no step was trained.
    """
    steps = [row for row in rows if metric.TIME_STEP_S in row]
    if not steps:
        raise ValueError("the run has trained no step. Fix: steps=3 or more")
    settled = steps[SKIP:] or steps
    evaluations = [row for row in rows if metric.EVAL_ACCURACY in row]
    reached = [row for row in evaluations if row[metric.EVAL_ACCURACY] >= goal and metric.TIME_TRAIN_TOTAL_S in row]
    step_s = [row[metric.TIME_STEP_S] for row in settled]
    values: dict[str, float | None] = {
        "step_s": statistics.median(step_s),
        "tokens_per_s": sum(row.get(metric.TOKENS_GENERATED, 0) for row in settled) / sum(step_s) or None,
        "accuracy": evaluations[-1][metric.EVAL_ACCURACY] if evaluations else None,
        "to_goal_s": reached[0][metric.TIME_TRAIN_TOTAL_S] if reached else None,
        "train_s": steps[-1].get(metric.TIME_TRAIN_TOTAL_S),
        "reward": _mean(steps[-(-3 * len(steps) // 4) :] or steps, metric.REWARD),
        "goodput": _mean(settled, metric.TOKENS_GOODPUT),
        "staleness_mean": _mean(settled, metric.ROLLOUT_STALENESS_MEAN),
        "kl": _mean(settled, metric.LEARNER_KL),
    }
    return {name: value for name, value in values.items() if value is not None}


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return statistics.fmean(values) if values else None
