"""Computes the metrics of a step and of an evaluation from their trajectories.

Shape legend: M trajectories.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine import metric_names as metric
from engine.types import Group, StopReason, ToolUse, Trajectory, Turn

Row = Mapping[str, float]
SOURCES = 32  # the first data sets by name, as many as get metrics of their own


def is_step(row: Row) -> bool:
    """Returns whether a row of metrics belongs to a training step. A step without graded trajectories has no reward."""
    return metric.TOKENS_GENERATED in row or metric.REWARD in row


def tool_error_share(trajectories: Sequence[Trajectory]) -> float:
    """Returns failed calls / calls over the given trajectories; 0 if they made none."""
    uses = [use for trajectory in trajectories for use in trajectory.tool_uses]
    return sum(use.failed for use in uses) / len(uses) if uses else 0.0


def correct(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [trajectory for trajectory in trajectories if (trajectory.reward or 0.0) > 0]


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the 95 % interval of a proportion (Wilson 1927).

    >>> low, high = wilson(95, 100); round(low, 3), round(high, 3)
    (0.888, 0.978)
    """
    if trials == 0:
        return 0.0, 1.0
    share, n = successes / trials, trials
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def by_source(name: str, values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns the mean of a metric for each data set. values: (source, value); an empty source is left out.

    A single source is reported too: a step of a mixture may hold only one by chance.

    >>> by_source("reward", [("gsm8k", 1.0), ("gsm8k", 0.0), ("math", 1.0), ("", 1.0)])
    {'reward/gsm8k': 0.5, 'reward/math': 1.0}
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for source, value in values:
        if source:
            by_name[source].append(value)
    return {metric.of_source(name, source): float(np.mean(theirs)) for source, theirs in sorted(by_name.items())}


def scores(family: str, missing: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean of each score over the trajectories that have it, and the number of trajectories whose score is
    None, if there are any. family, missing: the names of these metrics, `metric_names.SCORE` for example.
    """
    by_name: dict[str, list[float | None]] = defaultdict(list)
    for trajectory in trajectories:
        for name, score in trajectory.scores.items():
            by_name[name].append(score)
    metrics: dict[str, float] = {}
    for name, values in sorted(by_name.items()):
        known = [value for value in values if value is not None]
        if known:
            metrics[metric.member(family, name)] = float(np.mean(known))
        if len(known) < len(values):
            metrics[metric.member(missing, name)] = len(values) - len(known)
    return metrics


def evaluation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns pass@1 with its interval, and the use of tools. Trajectories that failed by our fault do not count."""
    graded = [trajectory for trajectory in trajectories if trajectory.error is None]
    right = correct(graded)
    low, high = wilson(len(right), len(graded))
    return {
        metric.EVAL_ACCURACY: len(right) / max(1, len(graded)),
        metric.EVAL_ACCURACY_LOW: low,
        metric.EVAL_ACCURACY_HIGH: high,
        metric.EVAL_N: len(graded),
        metric.EVAL_TOOL_ERROR_SHARE_CORRECT: tool_error_share(right),
        metric.EVAL_TOOL_RATE: sum(bool(trajectory.tool_uses) for trajectory in graded) / max(1, len(graded)),
        metric.EVAL_TOKENS: sum(trajectory.sampled_tokens for trajectory in trajectories),
        metric.EVAL_TURNS: sum(len(trajectory.turns) for trajectory in trajectories),
        metric.EVAL_TOOL_CALLS: sum(use.executed for trajectory in trajectories for use in trajectory.tool_uses),
        metric.EVAL_TOOL_CALLS_JAILED: sum(use.jailed for trajectory in trajectories for use in trajectory.tool_uses),
        **scores(metric.EVAL_SCORE, metric.EVAL_SCORE_MISSING, graded),
    }


def step(groups: Sequence[Group], version: int, full_reward: float = 1.0) -> dict[str, float]:
    """Returns the metrics of one step's rollouts. version: that of the weights that the step updates. full_reward: the
    reward of a trajectory that has solved its prompt.

    A metric that could not be measured is left out: no reward if nothing was graded, no latency if nothing was called.
    Every sampled token is counted: generated = trained + the sum of waste. The other metrics cover the groups'
    trajectories only; of those that were cancelled or refilled, only the tokens are known. Each name but `reward` has a
    prefix, by which TensorBoard groups it.
    """
    everyone = [member for group in groups for member in group.trajectories]
    graded = [member for member in everyone if member.error is None]
    trained = [group.trajectories[index] for group in groups for index in group.kept]
    turns = [turn for member in everyone for turn in member.all_turns]
    uses = [use for turn in turns for use in turn.tool_uses]
    sampled = sum(member.sampled_tokens for member in everyone)
    cached = sum(turn.cached_tokens for turn in turns)
    prompted = sum(turn.start for turn in turns)
    kept = sum(member.sampled_tokens for member in trained)
    waste = _waste(groups)
    stops = Counter(member.stop for member in everyone)
    drops = Counter(flat=0, error=0)
    drops.update(group.drop for group in groups if group.drop)
    staleness = [version - int(member.sampled_versions.min()) for member in trained if member.sampled_tokens]
    return {
        **_grades(graded),
        **by_source(metric.REWARD, [(member.prompt.source, member.reward or 0.0) for member in graded]),
        **_by_source(groups, full_reward),
        **scores(metric.SCORE, metric.SCORE_MISSING, graded),
        metric.ROLLOUT_RESPONSE_TOKENS: sampled / max(1, len(everyone)),
        metric.ROLLOUT_TRAJECTORIES: len(everyone),
        metric.ROLLOUT_TRAJECTORIES_TRAINED: len(trained),
        metric.ROLLOUT_TRAJECTORIES_FAILED: len(everyone) - len(graded),
        **{metric.member(metric.STOP, reason): stops[reason] for reason in StopReason},
        metric.GROUPS_ALL: len(groups),
        metric.GROUPS_SOLVED: sum(solved(group, full_reward) for group in groups),
        **{metric.member(metric.GROUPS_DROPPED, reason): count for reason, count in sorted(drops.items())},
        metric.GROUPS_REFILLED: sum(group.refills for group in groups),
        metric.TOKENS_GENERATED: kept + waste.total(),
        metric.TOKENS_TRAINED: kept,
        metric.TOKENS_GOODPUT: kept / max(1, kept + waste.total()),
        **{metric.member(metric.WASTE, reason): tokens for reason, tokens in sorted(waste.items())},
        **({metric.ROLLOUT_STALENESS_MEAN: float(np.mean(staleness))} if staleness else {}),
        **({metric.ROLLOUT_STALENESS_MAX: max(staleness)} if staleness else {}),
        metric.ROLLOUT_PREFIX_HIT_RATE: cached / max(1, prompted),
        metric.TOOLS_CALLS: sum(use.executed for use in uses),
        metric.TOOLS_CALLS_REFUSED: sum(not use.executed for use in uses),
        metric.TOOLS_CALLS_JAILED: sum(use.jailed for use in uses),
        **_token_ms(turns),
        **_latencies([use for use in uses if use.executed]),
        **{metric.member(metric.TOOLS_WAIT, name): seconds for name, seconds in sorted(_tool_waits(turns).items())},
    }


def _grades(graded: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics that need graded trajectories."""
    if not graded:
        return {}
    return {
        metric.REWARD: float(np.mean([member.reward for member in graded])),
        metric.TOOLS_ERROR_SHARE_CORRECT: tool_error_share(correct(graded)),
        metric.TOOLS_ERROR_SHARE: tool_error_share(graded),
        metric.TOOLS_RATE: sum(bool(member.tool_uses) for member in graded) / len(graded),
    }


def _token_ms(turns: Sequence[Turn]) -> dict[str, float]:
    """Returns the milliseconds of a token by replica: the seconds of its turns over their tokens."""
    tokens: dict[int, int] = defaultdict(int)
    seconds: dict[int, float] = defaultdict(float)
    for turn in turns:
        tokens[turn.replica] += turn.end - turn.start
        seconds[turn.replica] += turn.finished_at - turn.started_at
    return {
        metric.member(metric.REPLICAS_TOKEN_MS, replica): 1e3 * seconds[replica] / tokens[replica]
        for replica in sorted(tokens)
        if tokens[replica]
    }


def _latencies(executed: Sequence[ToolUse]) -> dict[str, float]:
    if not executed:
        return {}
    latencies_ms = np.asarray([use.finished_at - use.dispatched_at for use in executed]) * 1e3
    return {
        metric.TOOLS_LATENCY_P50_MS: float(np.percentile(latencies_ms, 50)),
        metric.TOOLS_LATENCY_P99_MS: float(np.percentile(latencies_ms, 99)),
        **_queue_and_run(executed),
        metric.TOOLS_OVERLAP_SAVED_MS: float(np.mean([use.overlap_s for use in executed])) * 1e3,
    }


def _queue_and_run(executed: Sequence[ToolUse]) -> dict[str, float]:
    """Returns the two parts of the latencies; nothing if no tool measures them."""
    parts = [
        (use.queue_s, use.finished_at - use.dispatched_at - use.queue_s) for use in executed if use.queue_s is not None
    ]
    if not parts:
        return {}
    (queue_p50, run_p50), (queue_p99, run_p99) = np.percentile(np.asarray(parts) * 1e3, (50, 99), axis=0).tolist()
    return {
        metric.TOOLS_QUEUE_P50_MS: queue_p50,
        metric.TOOLS_QUEUE_P99_MS: queue_p99,
        metric.TOOLS_RUN_P50_MS: run_p50,
        metric.TOOLS_RUN_P99_MS: run_p99,
    }


def _tool_waits(turns: Sequence[Turn]) -> dict[str, float]:
    """Returns the seconds in which trajectories waited after a turn for its calls, by the tool that answered last."""
    waits: dict[str, float] = defaultdict(float)
    for turn in turns:
        executed = [use for use in turn.tool_uses if use.executed]
        if executed:
            last = max(executed, key=lambda use: use.finished_at)
            waits[last.name] += max(0.0, last.finished_at - turn.finished_at)
    return waits


def _by_source(groups: Sequence[Group], full_reward: float) -> dict[str, float]:
    """Returns the metrics of each source, under the names that those of all sources have."""
    by_name: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.prompt.source:
            by_name[group.prompt.source].append(group)
    metrics: dict[str, float] = {}
    for source, theirs in sorted(by_name.items())[:SOURCES]:
        everyone = [member for group in theirs for member in group.trajectories]
        graded = [member for member in everyone if member.error is None]
        kept = sum(group.trajectories[index].sampled_tokens for group in theirs for index in group.kept)
        sampled = sum(member.sampled_tokens for member in everyone)
        values = {
            metric.ROLLOUT_RESPONSE_TOKENS: sampled / max(1, len(everyone)),
            metric.TOOLS_ERROR_SHARE: tool_error_share(graded),
            metric.TOKENS_GOODPUT: kept / max(1, kept + _waste(theirs).total()),
            metric.GROUPS_ALL: len(theirs),
            metric.GROUPS_FLAT: sum(group.drop == "flat" for group in theirs),
            metric.GROUPS_SOLVED: sum(solved(group, full_reward) for group in theirs),
        }
        metrics |= {metric.of_source(name, source): value for name, value in values.items()}
    return metrics


def _waste(groups: Sequence[Group]) -> Counter[str]:
    """Counts the sampled tokens that are not trained, by reason: the group's, else the trajectory's own."""
    waste = Counter(flat=0, error=0, surplus=0, not_selected=0)
    for group in groups:
        waste.update(group.waste)
        for index, member in enumerate(group.trajectories):
            if forced := member.forced_tokens:
                waste["forced"] += forced
            if index not in group.kept:
                reason = group.drop or ("error" if member.error else "not_selected")
                waste[reason] += member.sampled_tokens
    return waste


def solved(group: Group, full_reward: float) -> bool:
    """Returns whether the group was dropped as flat with the full reward.

    A group is flat if the trajectories that its selector kept are; a few others may have failed, so the median decides.
    """
    rewards = [member.reward for member in group.trajectories if member.reward is not None]
    return group.drop == "flat" and bool(rewards) and float(np.median(rewards)) >= full_reward
