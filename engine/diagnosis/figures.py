"""Computes the figures of a run's newest steps, all over the same window. Pure: rows of metrics.jsonl go in.

A rate is the sum of what it counts over the sum of the seconds, a share the sum of the parts over the sum of the whole.
A mean per trajectory or call counts each of them once. Peaks are the largest of the window.
"""

from __future__ import annotations

from engine import metric_names as metric
from engine.diagnosis.step_window import StepWindow

Figures = dict[str, float | None]


def figures_of(steps: StepWindow) -> Figures:
    """Returns the figures by name; None for what was not measured in any step of the window.

    Names that end in _s are seconds, _ms milliseconds, _share and _rate parts of 1.
    """
    checked = steps.total(metric.LEARNER_MISMATCH_CHECKED) or not steps.knows(metric.LEARNER_MISMATCH_CHECKED)
    return {
        "reward": steps.mean_per(metric.REWARD, metric.ROLLOUT_TRAJECTORIES),
        "step_s": steps.seconds / len(steps.rows),
        "tokens_per_s": _ratio(steps.sum_of(metric.TOKENS_GENERATED), steps.seconds),
        "goodput_share": _ratio(steps.sum_of(metric.TOKENS_TRAINED), steps.total(metric.TOKENS_GENERATED)),
        "flat_share": _ratio(steps.sum_of(metric.GROUPS_FLAT), steps.total(metric.GROUPS_ALL)),
        "truncated_share": _ratio(
            steps.sum_of(metric.member(metric.STOP, "length")), steps.total(metric.ROLLOUT_TRAJECTORIES)
        ),
        "response_tokens": steps.mean_per(metric.ROLLOUT_RESPONSE_TOKENS, metric.ROLLOUT_TRAJECTORIES),
        "entropy": steps.mean_per(metric.LEARNER_ENTROPY, metric.LEARNER_TOKENS),
        "staleness_mean": steps.mean_per(metric.ROLLOUT_STALENESS_MEAN, metric.ROLLOUT_TRAJECTORIES),
        "staleness_max": steps.peak(metric.ROLLOUT_STALENESS_MAX),
        "kv_peak_share": steps.peak(metric.KV_PEAK),
        "preemptions": steps.sum_of(metric.KV_PREEMPTIONS),
        "tool_latency_p50_ms": steps.mean_per(metric.TOOLS_LATENCY_P50_MS, metric.TOOLS_CALLS),
        "tool_latency_p99_ms": steps.peak(metric.TOOLS_LATENCY_P99_MS),
        "tool_error_share": steps.mean_per(metric.TOOLS_ERROR_SHARE, metric.TOOLS_CALLS),
        "tool_error_correct_share": steps.mean_per(metric.TOOLS_ERROR_SHARE_CORRECT, metric.TOOLS_CALLS),
        "replicas_live": steps.rows[-1].get(metric.REPLICAS_LIVE),
        "deaths": steps.sum_of(metric.REPLICAS_DEATHS),
        "learner_tokens_per_s": steps.mean_per(metric.LEARNER_TOKENS_PER_S, metric.LEARNER_TRAIN_S),
        "learner_peak_bytes": steps.peak(metric.LEARNER_PEAK_BYTES),
        "canary": steps.peak(metric.CANARY_MAX_ABS),
        "mismatch": steps.peak(metric.LEARNER_MISMATCH_FRESH_MAX) if checked else None,
        "others_cpu_share": steps.mean_per(metric.HOST_OTHERS_CPU_SHARE, metric.TIME_STEP_S),
    }


def _ratio(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole else None
