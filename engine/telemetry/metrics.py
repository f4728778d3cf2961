"""The numbers of a step and of an evaluation, from the trajectories themselves.

Shape legend: M trajectories.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine.types import Group, StopReason, ToolUse, Trajectory, Turn

Row = Mapping[str, float]
SOURCES = 32  # data sets that get metrics of their own, the first ones by name


def is_step(row: Row) -> bool:
    """Whether a row of metrics is of a training step. (One in which nothing could be graded has no reward.)"""
    return "tokens/generated" in row or "reward" in row


def tool_error_share(trajectories: Sequence[Trajectory]) -> float:
    """Failed calls / calls over the given trajectories; 0 when they made none."""
    uses = [use for trajectory in trajectories for use in trajectory.tool_uses]
    return sum(use.failed for use in uses) / len(uses) if uses else 0.0


def correct(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [trajectory for trajectory in trajectories if (trajectory.reward or 0.0) > 0]


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927).

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
    """The mean of each data set under `name/source`. values: (source, value); those of no source are not reported.

    It is there for a single source too: of a mixture a step may hold one source by chance.

    >>> by_source("reward", [("gsm8k", 1.0), ("gsm8k", 0.0), ("math", 1.0), ("", 1.0)])
    {'reward/gsm8k': 0.5, 'reward/math': 1.0}
    """
    of: dict[str, list[float]] = defaultdict(list)
    for source, value in values:
        if source:
            of[source].append(value)
    return {f"{name}/{source}": float(np.mean(found)) for source, found in sorted(of.items())}


def scores(prefix: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each score under `{prefix}/{name}`, over the trajectories that have it; where some could not be had,
    their number under `{prefix}_missing/{name}`.
    """
    of: dict[str, list[float | None]] = defaultdict(list)
    for trajectory in trajectories:
        for name, score in trajectory.scores.items():
            of[name].append(score)
    found: dict[str, float] = {}
    for name, values in sorted(of.items()):
        there = [value for value in values if value is not None]
        if there:
            found[f"{prefix}/{name}"] = float(np.mean(there))
        if len(there) < len(values):
            found[f"{prefix}_missing/{name}"] = len(values) - len(there)
    return found


def evaluation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """pass@1 with its interval, and how tools were used. Trajectories with an infrastructure error do not count."""
    graded = [trajectory for trajectory in trajectories if trajectory.error is None]
    right = correct(graded)
    low, high = wilson(len(right), len(graded))
    return {
        "eval/accuracy": len(right) / max(1, len(graded)),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/n": len(graded),
        "eval/tool_error_share_correct": tool_error_share(right),
        "eval/tool_rate": sum(bool(trajectory.tool_uses) for trajectory in graded) / max(1, len(graded)),
        "eval/tokens": sum(trajectory.sampled_tokens for trajectory in trajectories),
        "eval/tool_calls": sum(use.executed for trajectory in trajectories for use in trajectory.tool_uses),
        "eval/tool_calls_jailed": sum(use.jailed for trajectory in trajectories for use in trajectory.tool_uses),
        **scores("eval/score", graded),
    }


def step(groups: Sequence[Group], version: int, full_reward: float = 1.0) -> dict[str, float]:
    """What the rollouts of one step were like. version: the weights that the step trained on top of. full_reward: of a
    trajectory that has solved its prompt.

    Every name but `reward` has the prefix of its group, as TensorBoard shows them.
    What could not be measured has no number: no reward where nothing was graded, no latency where nothing was called.
    Tokens are counted to the last one: generated = trained + the sum of waste. Everything else is about the groups'
    trajectories: what was cancelled or refilled has left its tokens only.
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
    drops = Counter(flat=0, error=0)
    drops.update(group.drop for group in groups if group.drop)
    staleness = [version - int(member.sampled_versions.min()) for member in trained if member.sampled_tokens]
    return {
        **_grades(graded),
        **by_source("reward", [(member.prompt.source, member.reward or 0.0) for member in graded]),
        **_by_source(groups, full_reward),
        **scores("score", graded),
        "rollout/response_tokens": sampled / max(1, len(everyone)),
        "rollout/trajectories": len(everyone),
        "rollout/trajectories_trained": len(trained),
        "rollout/trajectories_failed": len(everyone) - len(graded),
        **{f"stop/{reason}": sum(member.stop == reason for member in everyone) for reason in StopReason},
        "groups/all": len(groups),
        "groups/solved": sum(solved(group, full_reward) for group in groups),
        **{f"groups/{reason}": count for reason, count in sorted(drops.items())},
        "groups/refilled": sum(group.refills for group in groups),
        "tokens/generated": kept + waste.total(),
        "tokens/trained": kept,
        "tokens/goodput": kept / max(1, kept + waste.total()),
        **{f"waste/{reason}_tokens": tokens for reason, tokens in sorted(waste.items())},
        **({"rollout/staleness_mean": float(np.mean(staleness))} if staleness else {}),
        **({"rollout/staleness_max": max(staleness)} if staleness else {}),
        "rollout/prefix_hit_rate": cached / max(1, prompted),
        "tools/calls": sum(use.executed for use in uses),
        "tools/calls_refused": sum(not use.executed for use in uses),
        "tools/calls_jailed": sum(use.jailed for use in uses),
        **_latencies([use for use in uses if use.executed]),
        **{f"tools/wait/{name}_s": seconds for name, seconds in sorted(_tool_waits(turns).items())},
    }


def _grades(graded: Sequence[Trajectory]) -> dict[str, float]:
    """What is known of graded trajectories only."""
    if not graded:
        return {}
    return {
        "reward": float(np.mean([member.reward for member in graded])),
        "tools/error_share_correct": tool_error_share(correct(graded)),
        "tools/error_share": tool_error_share(graded),
        "tools/rate": sum(bool(member.tool_uses) for member in graded) / len(graded),
    }


def _latencies(executed: Sequence[ToolUse]) -> dict[str, float]:
    if not executed:
        return {}
    latencies_ms = np.asarray([use.finished_at - use.dispatched_at for use in executed]) * 1e3
    return {
        "tools/latency_p50_ms": float(np.percentile(latencies_ms, 50)),
        "tools/latency_p99_ms": float(np.percentile(latencies_ms, 99)),
        "tools/overlap_saved_ms": float(np.mean([use.overlap_s for use in executed])) * 1e3,
    }


def _tool_waits(turns: Sequence[Turn]) -> dict[str, float]:
    """Seconds in which trajectories waited after a turn for its tool calls, by the tool that answered last."""
    waits: dict[str, float] = defaultdict(float)
    for turn in turns:
        executed = [use for use in turn.tool_uses if use.executed]
        if executed:
            last = max(executed, key=lambda use: use.finished_at)
            waits[last.name] += max(0.0, last.finished_at - turn.finished_at)
    return waits


def _by_source(groups: Sequence[Group], full_reward: float) -> dict[str, float]:
    """Returns the metrics of each source, under the names that those of all sources have."""
    of: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.prompt.source:
            of[group.prompt.source].append(group)
    found: dict[str, float] = {}
    for source, theirs in sorted(of.items())[:SOURCES]:
        everyone = [member for group in theirs for member in group.trajectories]
        graded = [member for member in everyone if member.error is None]
        kept = sum(group.trajectories[index].sampled_tokens for group in theirs for index in group.kept)
        sampled = sum(member.sampled_tokens for member in everyone)
        found |= {
            f"rollout/response_tokens/{source}": sampled / max(1, len(everyone)),
            f"tools/error_share/{source}": tool_error_share(graded),
            f"tokens/goodput/{source}": kept / max(1, kept + _waste(theirs).total()),
            f"groups/all/{source}": len(theirs),
            f"groups/flat/{source}": sum(group.drop == "flat" for group in theirs),
            f"groups/solved/{source}": sum(solved(group, full_reward) for group in theirs),
        }
    return found


def _waste(groups: Sequence[Group]) -> Counter[str]:
    """Sampled tokens that are not trained, by reason: the group's, else the trajectory's own."""
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
    """Whether it was dropped as flat with the full reward.

    Flat is what a selector kept, so a few of its trajectories may have failed: the median decides.
    """
    rewards = [member.reward for member in group.trajectories if member.reward is not None]
    return group.drop == "flat" and bool(rewards) and float(np.median(rewards)) >= full_reward
