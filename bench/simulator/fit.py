"""Finds the cost of a step in what engines did.

Legend: N steps; a row of features is (1, n, S, P): requests that decode, tokens of KV, prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.balancing.step_cost import StepCost

Values = NDArray[np.float64]
FEWEST = 10  # steps of which a fit is made


class EngineStep(Protocol):
    """Holds what a replica reported of its newest steps, `t` seconds after the run began. Its counts are the last."""

    @property
    def replica(self) -> int: ...
    @property
    def t(self) -> float: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def preempted(self) -> int: ...
    @property
    def prefilled(self) -> int: ...
    @property
    def steps(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A fitted cost, and how well it fits: r2 of the steps' seconds, steps used and left out as outliers."""

    cost: StepCost
    r2: float
    steps: int
    outliers: int


def fitted(features_N4: Values, seconds_N: Values) -> Fit:
    """Returns the cost by least squares, no constant of which is negative.

    Outliers (steps in which the machine did something else) do not bend the constants, but their time is spread over
    all steps, since it passed all the same. Raises ValueError where there are fewer than FEWEST steps.
    """
    if len(seconds_N) < FEWEST:
        raise ValueError(f"a fit needs at least {FEWEST} steps of busy engines, got {len(seconds_N)}")
    kept_N = np.ones(len(seconds_N), bool)
    for _ in range(4):
        constants = _non_negative(features_N4[kept_N], seconds_N[kept_N])
        residuals_N = seconds_N - features_N4 @ constants
        middle = np.median(residuals_N[kept_N])
        spread = 1.4826 * float(np.median(np.abs(residuals_N - middle)))
        kept_N = np.abs(residuals_N - middle) <= 6 * max(spread, 1e-6)
    variance = float(seconds_N[kept_N].var())
    explained = 1 - float(residuals_N[kept_N].var()) / variance if variance else 0.0
    fixed_s, per_request_s, per_kv_token_s, per_token_s = (float(value) for value in constants)
    fixed_s += max(0.0, float(np.mean(seconds_N - features_N4 @ constants)))
    cost = StepCost(
        fixed_s=fixed_s, per_request_s=per_request_s, per_kv_token_s=per_kv_token_s, per_token_s=per_token_s
    )
    return Fit(cost=cost, r2=explained, steps=int(kept_N.sum()), outliers=int((~kept_N).sum()))


def features(runs: Iterable[Sequence[EngineStep]], blocks: int, block_size: int) -> tuple[Values, Values]:
    """Returns features [N, 4] and seconds [N] of each step of an engine that was busy before it.

    A step's seconds are the distance to its engine's step before; steps that were told together took equal parts of it.
    What ran at the end of that one and was not preempted decodes in this one.
    """
    rows, seconds = [], []
    for steps in runs:
        last: dict[int, EngineStep] = {}
        for step in steps:
            before = last.get(step.replica)
            last[step.replica] = step
            if before is not None and before.running > 0:
                kv_tokens = (blocks - before.free_blocks) * block_size
                row = (1.0, max(0, before.running - step.preempted), kv_tokens, step.prefilled / step.steps)
                rows += [row] * step.steps
                seconds += [(step.t - before.t) / step.steps] * step.steps
    return np.asarray(rows, np.float64).reshape(-1, 4), np.asarray(seconds, np.float64)


def _non_negative(features_N4: Values, seconds_N: Values) -> Values:
    """Returns least squares with constants >= 0: a negative one is left out and the rest fitted again."""
    used = list(range(features_N4.shape[1]))
    while True:
        solution = np.linalg.lstsq(features_N4[:, used], seconds_N, rcond=None)[0]
        worst = int(np.argmin(solution))
        if solution[worst] >= 0 or len(used) == 1:
            constants = np.zeros(features_N4.shape[1])
            constants[used] = np.maximum(solution, 0)
            return constants
        del used[worst]
