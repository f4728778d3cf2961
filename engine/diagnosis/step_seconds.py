"""Splits the seconds of a step into parts that add up to it. Pure: a row of metrics.jsonl goes in.

A replica is at each moment busy or idle for one cause, so the seconds of all replicas by cause, divided by how many
there are, are the seconds of the step. A row without them is split into rollout, learner, weights and the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import metric_names as metric

SAMPLING = "sampling"
TEXTS = {
    "busy": SAMPLING,
    "tool_wait": "waits for tools",
    "long_tail": "waits for the last rollouts",
    "kv_blocked": "waits for KV blocks",
    "staleness_gate": "waits for the learner",
    "reward": "waits for grading",
    "weight_sync": "loads weights",
    "host": "waits for the node",
    "down": "dead replicas",
}
_PHASES = {
    metric.TIME_ROLLOUT_S: "waits for rollouts",
    metric.TIME_LEARN_S: "waits for the learner",
    metric.TIME_SYNC_S: "loads weights",
}
REST = "other"
GERUNDS = {
    "waits for tools": "waiting for tools",
    "waits for the last rollouts": "waiting for the last rollouts",
    "waits for KV blocks": "waiting for KV blocks",
    "waits for the learner": "waiting for the learner",
    "waits for grading": "waiting for grading",
    "waits for rollouts": "waiting for rollouts",
    "waits for the node": "waiting for the node",
    "loads weights": "loading weights",
}
"""The parts as a sentence has them after a duration."""


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of a step by part; they sum to its `time/step_s`.

    >>> row = {"time/step_s": 2.0, "replicas/busy_s": 3.0, "idle/long_tail_s": 1.0}
    >>> parts_of(row)
    {'sampling': 1.5, 'waits for the last rollouts': 0.5}
    """
    step_s = float(row[metric.TIME_STEP_S])
    by_cause = {"busy": float(row.get(metric.REPLICAS_BUSY_S, 0.0))}
    by_cause |= {cause: float(row.get(metric.member(metric.IDLE, cause), 0.0)) for cause in TEXTS if cause != "busy"}
    if (total := sum(by_cause.values())) > 0:
        return {TEXTS[cause]: step_s * value / total for cause, value in by_cause.items() if value > 0}
    parts = {text: float(row.get(name, 0.0)) for name, text in _PHASES.items()}
    return {name: value for name, value in {**parts, REST: step_s - sum(parts.values())}.items() if value}
