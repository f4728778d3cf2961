"""What a step of a replica costs, learnt from the steps themselves.

step_s = fixed + per_request * running + per_token * prefilled, by least squares over all replicas with a memory of
some thousand steps. Only steps that followed busy ones count (an idle engine does not step), and pauses do not.
"""

from __future__ import annotations

import numpy as np

from engine.balancing.length_forecast import Reals
from engine.replica.port import KvSample

MEMORY = 1 - 1 / 4096  # weight of all that was before, per step
ENOUGH = 64  # samples before anything is said, and between two solutions
PAUSE = 20.0  # a gap of so many usual steps is none (weights are updated, the process was stopped)


class StepTime:
    """Fed with every sample; gives seconds, or None as long as it knows too little."""

    def __init__(self) -> None:
        self._moments = np.zeros((4, 4))  # of (1, running, prefilled, seconds)
        self._rows: list[tuple[float, float, float, float, int]] = []  # not yet in them; the last number is a weight
        self._last: dict[int, tuple[float, bool]] = {}
        self._seen = 0
        self._mean_s = 0.0
        self._solution = np.zeros(3)

    def forget(self, replica: int) -> None:
        self._last.pop(replica, None)

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        before = self._last.get(replica)
        self._last[replica] = now, sample.running + sample.waiting > 0
        if before is None or not before[1]:
            return
        step_s = (now - before[0]) / sample.steps
        if step_s <= 0 or (self._seen >= ENOUGH and step_s > PAUSE * self._mean_s):
            return
        self._seen += 1
        self._mean_s += (step_s - self._mean_s) / min(self._seen, 256)
        self._rows.append((1.0, sample.running, sample.prefilled / sample.steps, step_s, sample.steps))
        if len(self._rows) >= ENOUGH:
            self._solve()

    def step_s(self, running: float) -> float | None:
        """Seconds of a step that generates a token for each of `running` requests."""
        found = self._coefficients()
        return None if found is None else float(found[0] + found[1] * running)

    def prefill_s(self, tokens: float) -> float | None:
        """Seconds that computing a prompt of so many tokens takes from the others on the replica."""
        found = self._coefficients()
        return None if found is None else float(found[2] * tokens)

    def _coefficients(self) -> Reals | None:
        """(seconds, seconds per running request, seconds per prefilled token), none negative."""
        return None if self._moments[2, 2] == 0 else self._solution

    def _solve(self) -> None:
        rows_N5 = np.array(self._rows)
        self._rows.clear()
        values_N4, weights_N = rows_N5[:, :4], rows_N5[:, 4]
        self._moments *= MEMORY ** weights_N.sum()
        self._moments += (values_N4 * weights_N[:, None]).T @ values_N4
        left, right = self._moments[:3, :3], self._moments[:3, 3]
        scale = np.sqrt(np.diag(left)) + 1e-12
        scaled = left / np.outer(scale, scale) + 1e-6 * np.eye(3)
        self._solution = np.maximum(np.linalg.solve(scaled, right / scale) / scale, 0.0)
