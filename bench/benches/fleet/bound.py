"""A lower bound of the makespan, from the step costs that the run itself shows.

seconds per step = fixed + per_sequence x running + per_prefilled x prefilled tokens, fitted by least squares to the
steps of an engine that had work. With them no policy can be faster than the larger of
- chain: the longest trajectory alone on an engine, and its tools;
- work: all engines always full and nothing computed twice. Every generated token needs its context in the cache for one
  step, so that there are at least (sum of contexts over generated tokens) / (tokens of KV) steps; prompts of a group,
  which are shared, are left out, and tool-waiting trajectories hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.benches.fleet.replay import Step
from bench.placement.workload import Traced


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds: fixed per step, per running sequence, per prefilled token."""

    fixed_s: float
    per_sequence_s: float
    per_prefilled_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What a policy has to work with: so many replicas, each with `blocks` usable blocks of KV."""

    replicas: int
    blocks: int
    block_size: int
    max_num_seqs: int


def durations(steps: Sequence[Step]) -> Iterable[tuple[float, Step]]:
    """Seconds of each step before which its engine had work, from the step before it, and the step."""
    last: dict[int, Step] = {}
    for step in steps:
        before = last.get(step.replica)
        if before is not None and before.running + before.waiting > 0:
            yield step.t - before.t, step
        last[step.replica] = step


def fit(runs: Iterable[Sequence[Step]]) -> StepCost:
    """Least squares over the steps of all runs but the slowest twentieth; a coefficient below zero is left out.

    Raises ValueError when there are fewer than 10 steps.
    """
    rows = [(seconds, 1.0, step.running, step.prefilled) for steps in runs for seconds, step in durations(steps)]
    if len(rows) < 10:
        raise ValueError(f"a fit needs at least 10 steps, got {len(rows)}")
    table = np.array(rows)
    table = table[table[:, 0] <= np.quantile(table[:, 0], 0.95)]
    columns = [n for n in (1, 2, 3) if table[:, n].any()]
    found = np.zeros(4)
    while columns:
        found[:] = 0
        found[columns] = np.linalg.lstsq(table[:, columns], table[:, 0], rcond=None)[0]
        if not (negative := [n for n in columns if found[n] < 0]):
            break
        columns.remove(min(negative, key=lambda n: found[n]))
    return StepCost(fixed_s=found[1], per_sequence_s=found[2], per_prefilled_s=found[3])


def lower_bound_s(traces: Sequence[Traced], cost: StepCost, engine: Engine) -> float:
    """Seconds that no policy beats at this cost."""
    alone = cost.fixed_s + cost.per_sequence_s
    chain = max(trace.gen_tokens * alone + sum(turn.tool_latency_s for turn in trace.turns[:-1]) for trace in traces)
    generated = sum(trace.gen_tokens for trace in traces)
    kv_tokens = engine.blocks * engine.block_size
    steps = max(sum(map(_context_steps, traces)) / kv_tokens, generated / engine.max_num_seqs)
    prompts = {trace.group: trace.turns[0].prompt_new_tokens for trace in traces}
    prefilled = sum(prompts.values()) + sum(turn.prompt_new_tokens for trace in traces for turn in trace.turns[1:])
    work = cost.fixed_s * steps + cost.per_sequence_s * generated + cost.per_prefilled_s * prefilled
    return max(chain, work / engine.replicas)


def _context_steps(trace: Traced) -> float:
    """Sum over generated tokens of the trajectory's own tokens in the cache, its shared prompt left out."""
    total, context = 0.0, 0
    for number, turn in enumerate(trace.turns):
        context += turn.prompt_new_tokens if number else 0
        total += turn.gen_tokens * context + turn.gen_tokens * (turn.gen_tokens - 1) / 2
        context += turn.gen_tokens
    return total
