"""The cost of a replica's step: the formula that the node, the simulator and the lower bound share, and how a node
learns it from its steps.

Legend: _s seconds; n requests decode over S tokens of KV in all, while P prompt tokens are computed that attend to A
tokens in all (the sum of the contexts of the prompt tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.replica.port import KvSample

MEMORY = 1 - 1 / 4096  # each step multiplies the weight of all earlier ones by it
ENOUGH = 64  # samples before the first estimate, and between two
PAUSE = 20.0  # a gap of so many mean steps is no step: weights were updated, or the process was stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """The constants of a replica's step.

    step_s = fixed + per_request n + per_token P + per_kv_token S + per_attended A + max(0, weights - per_token (n + P))

    The last term is the time to read the weights that computing does not hide. A node knows the first three terms.

    >>> round(StepCost(fixed_s=0.004, per_request_s=0.001, per_token_s=0.0001).step_s(3, prompt_tokens=20), 6)
    0.009
    """

    fixed_s: float
    per_request_s: float
    per_token_s: float
    per_kv_token_s: float = 0.0
    per_attended_s: float = 0.0
    weights_s: float = 0.0

    def step_s(
        self, requests: float, *, prompt_tokens: float = 0, kv_tokens: float = 0.0, attended: float = 0.0
    ) -> float:
        """Returns the seconds of a step that gives each of `requests` a token."""
        seconds = self.fixed_s + self.per_request_s * requests + self.per_token_s * prompt_tokens
        seconds += self.per_kv_token_s * kv_tokens + self.per_attended_s * attended
        if not self.weights_s:
            return seconds
        return seconds + max(0.0, self.weights_s - self.per_token_s * (requests + prompt_tokens))


class LearntStepCost:
    """Learns the cost of a step from every sample, by least squares over all replicas with a memory of some thousand
    steps. Only steps that followed busy ones count, since an idle engine does not step. Pauses do not count.
    """

    def __init__(self) -> None:
        self.cost: StepCost | None = None  # None as long as too little is known
        self._moments = np.zeros((4, 4))  # second moments of (1, running, prefilled, seconds)
        self._rows: list[tuple[float, float, float, float, int]] = []  # not yet in the moments; the last is a weight
        self._last: dict[int, tuple[float, bool]] = {}
        self._seen = 0
        self._mean_s = 0.0

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
        """Returns the seconds of a step that generates a token for each of `running` requests."""
        return None if self.cost is None else self.cost.step_s(running)

    def prefill_s(self, tokens: float) -> float | None:
        """Returns the seconds that computing a prompt of so many tokens takes from the others on the replica."""
        return None if self.cost is None else self.cost.per_token_s * tokens

    def _solve(self) -> None:
        rows_N5 = np.array(self._rows)
        self._rows.clear()
        values_N4, weights_N = rows_N5[:, :4], rows_N5[:, 4]
        self._moments *= MEMORY ** weights_N.sum()
        self._moments += (values_N4 * weights_N[:, None]).T @ values_N4
        normal, right = self._moments[:3, :3], self._moments[:3, 3]
        scale = np.sqrt(np.diag(normal)) + 1e-12
        scaled = normal / np.outer(scale, scale) + 1e-6 * np.eye(3)
        fixed_s, per_request_s, per_token_s = np.maximum(np.linalg.solve(scaled, right / scale) / scale, 0.0).tolist()
        if normal[2, 2]:  # otherwise no step has computed a prompt, and the cost of one is unknown
            self.cost = StepCost(fixed_s=fixed_s, per_request_s=per_request_s, per_token_s=per_token_s)
