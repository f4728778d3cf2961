"""What an engine step costs, in seconds, and what a workload costs at least.

    step_s = o + b n + c S + max(w, d (n + P)) + d2 P L

n sequences decode over S tokens of KV in all while P prompt tokens are computed for contexts of L tokens. o: fixed; b:
per sequence; c: reading a token of KV; w: reading the weights; d: computing a token; d2: attention of a prompt token to
one of its context. Legend: _s seconds, _B a value per replica of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.placement.workload import Traced

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The constants of the formula above, in seconds. restore: copying a token's KV from host memory."""

    o: float
    b: float
    c: float
    d: float
    w: float = 0.0
    d2: float = 0.0
    restore: float = 3e-6

    def __post_init__(self) -> None:
        for name in ("o", "b", "c", "d", "w", "d2", "restore"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.o + self.w <= 0:
            raise ValueError("o + w must be positive: a step takes time")

    def step_s(self, sequences: int, kv_tokens: float, prompt_tokens: int = 0, prompt_work: float = 0.0) -> float:
        """prompt_work: sum over prompt tokens of the context that each attends to."""
        compute_s = max(self.w, self.d * (sequences + prompt_tokens))
        return self.o + self.b * sequences + self.c * kv_tokens + compute_s + self.d2 * prompt_work


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One engine: its KV blocks, vLLM's limits and its costs."""

    blocks: int
    block_size: int
    costs: Costs
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens must hold max_num_seqs, got {self.max_num_batched_tokens}")

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_size


# First principles, not a measurement: a 14B model in bf16 (29.5 GB, 160 KiB of KV a token) on one H200 (141 GB, 3.84
# TB/s, 650 TFLOP/s reached). KV gets 0.9 of the memory less the weights and 5 GB.
H200 = Machine(
    blocks=35_200, block_size=16, costs=Costs(o=1e-3, b=10e-6, c=163_840 / 3.84e12, d=45e-6, w=7.7e-3, d2=2e-9)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Costs fitted to a live run, and how well: r2 of step seconds, steps used and left out as outliers."""

    costs: Costs
    r2: float
    steps: int
    outliers: int


def fit(features: Values, seconds: Values) -> Fit:
    """Least squares without outliers (steps in which the machine did something else), constants not negative.

    features: (1, n, S, P) [steps, 4]; seconds [steps].
    """
    kept = np.ones(len(seconds), bool)
    for _ in range(4):
        constants = _non_negative(features[kept], seconds[kept])
        residuals = seconds - features @ constants
        spread = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals[kept]))))
        kept = np.abs(residuals - np.median(residuals[kept])) <= 6 * max(spread, 1e-6)
    explained = 1 - residuals[kept].var() / seconds[kept].var()
    # outliers are time that passed all the same: spread over all steps
    o, n, c, d = (float(value) for value in constants)
    o += max(0.0, float(np.mean(seconds - features @ constants)))
    # d (n + P) holds what a decoded token shares with a prompt token
    costs = Costs(o=o, b=max(0.0, n - d), c=c, d=d)
    return Fit(costs=costs, r2=float(explained), steps=int(kept.sum()), outliers=int((~kept).sum()))


def _non_negative(features: Values, seconds: Values) -> Values:
    """Least squares with constants >= 0: a negative one is left out and the rest fitted again."""
    used = list(range(features.shape[1]))
    while True:
        found = np.linalg.lstsq(features[:, used], seconds, rcond=None)[0]
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(used) == 1:
            constants = np.zeros(features.shape[1])
            constants[used] = np.maximum(found, 0)
            return constants
        del used[worst]


def lower_bound_s(trace: Sequence[Traced], machine: Machine, replicas: int) -> float:
    """No schedule ends earlier: the larger of all work at full KV without recompute, spread evenly, and of the longest
    trajectory alone on an engine with its tools. Tool-waiting KV costs nothing here: loose where tools are slow.
    """
    chain_s = max(_alone_s(row, machine) for row in trace)
    return max(_work_s(trace, machine) / replicas, chain_s)


def _alone_s(row: Traced, machine: Machine) -> float:
    """A turn's first token comes with its prompt; another of the group may have computed the first prompt."""
    costs, tokens, total_s = machine.costs, 0, 0.0
    for number, turn in enumerate(row.turns):
        tokens += turn.prompt_new_tokens
        total_s += costs.step_s(0, 0, turn.prompt_new_tokens if number else 0)
        total_s += (turn.gen_tokens - 1) * costs.step_s(1, tokens + turn.gen_tokens / 2) + turn.tool_latency_s
        tokens += turn.gen_tokens
    return total_s


def _work_s(trace: Iterable[Traced], machine: Machine) -> float:
    """Engine seconds. max(w, d x) >= w and >= d x: each alternative is a bound of its own.

    A token of a trajectory that holds L tokens of its own has at least the share max(L / C, 1 / max_num_seqs) of what a
    step costs regardless of its size (C tokens of KV; the group's prompt is shared).
    """
    costs = machine.costs
    samples: dict[int, int] = {}
    rows = list(trace)
    for row in rows:
        samples[row.group] = samples.get(row.group, 0) + 1
    shares = linear_s = tokens = prompts = 0.0
    for row in rows:
        shared = row.turns[0].prompt_new_tokens
        length = 0
        for number, turn in enumerate(row.turns):
            prompts += turn.prompt_new_tokens if number else shared / samples[row.group]
            length += turn.prompt_new_tokens
            mean = length + turn.gen_tokens / 2
            own = mean - shared * (1 - 1 / samples[row.group])
            decoded = turn.gen_tokens - 1  # the first token comes with the prompt
            shares += decoded * max(own / machine.kv_tokens, 1 / machine.max_num_seqs)
            linear_s += decoded * (costs.b + costs.c * mean)
            tokens += decoded
            length += turn.gen_tokens
    return linear_s + shares * costs.o + max(shares * costs.w, (tokens + prompts) * costs.d)
