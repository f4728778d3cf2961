"""GRPO-RoC: keeps clean successes and a fair share of the failures of an oversampled group.

Source: rStar2-Agent (arXiv 2508.20722), section on resampling on correct. Of 2G rollouts it keeps G: floor(negatives /
2) negatives, drawn uniformly, and for the rest positives, with probability inversely proportional to p_err + p_format.

Invariants
- It keeps exactly min(keep, N) different trajectories; failures keep their share of the group, rounded down.
- Positives are drawn one after another without replacement with weight 1 / (p_total + smoothing).
- Failures are drawn uniformly: they are what the policy has to learn to avoid, whatever they look like.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algo.reward.answers import answers
from engine.types import Trajectory
from sandbox.require import at_least, positive, require

QUADRATURE = 128  # points


def error_penalty(trajectory: Trajectory) -> float:
    """Returns p_err: failed calls / calls, or 0.5 without a call. Malformed calls, timeouts and kills are failures."""
    uses = trajectory.tool_uses
    return sum(use.failed for use in uses) / len(uses) if uses else 0.5


def format_penalty(trajectory: Trajectory) -> float:
    """Returns p_format: 1 without a closed answer tag, else min(1, (answers - 1) / turns), truncated turns included."""
    count = len(answers(trajectory.text))
    return min(1.0, (count - 1) / len(trajectory.turns)) if count else 1.0


def penalty(trajectory: Trajectory) -> float:
    """Returns p_total, in [0, 2]."""
    return error_penalty(trajectory) + format_penalty(trajectory)


@dataclass(frozen=True, slots=True)
class RoC:
    """Selects `keep` trajectories; a positive is one with reward > 0.

    A penalty in the reward can turn a right answer into a failure: with DAPO's (`algo.reward.overlong`) an answer of
    the longest length has reward 1 - 1 = 0, so it counts as a negative and is drawn uniformly. A factor below 1
    prevents that. A single failure among 2G is not kept (floor(1 / 2) = 0): the group is then flat and dropped, as in
    the paper.

    smoothing: is added to p_total, since a clean trajectory has penalty 0 and would have infinite weight.

    >>> RoC(keep=8)([], np.random.default_rng(0))
    []
    """

    keep: int
    smoothing: float = 0.05

    def __post_init__(self) -> None:
        require("RoC.keep", self.keep, at_least(1))
        require("RoC.smoothing", self.smoothing, positive)

    def quota(self, positives: int, negatives: int) -> tuple[int, int]:
        """Returns how many of each kind are kept, if there are more than `keep` in all."""
        kept_negatives = negatives * self.keep // (positives + negatives)
        return self.keep - kept_negatives, kept_negatives

    def penalty(self, trajectory: Trajectory) -> float:
        """Returns p_total of a success."""
        return penalty(trajectory)

    def explain(self, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        """Returns p_err and p_format of each trajectory, and the probability with which it is kept."""
        return [
            {"p_err": error_penalty(member), "p_format": format_penalty(member), "probability": chance}
            for member, chance in zip(trajectories, self._probabilities(trajectories).tolist(), strict=True)
        ]

    def _probabilities(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
        if len(trajectories) <= self.keep:
            return np.ones(len(trajectories))
        good = np.asarray([_reward(trajectory) > 0 for trajectory in trajectories])
        wanted_positives, wanted_negatives = self.quota(int(good.sum()), int((~good).sum()))
        penalties_P = np.asarray(
            [self.penalty(member) for member, right in zip(trajectories, good, strict=True) if right]
        )
        chances = np.full(len(trajectories), wanted_negatives / max(1, int((~good).sum())))
        chances[good] = inclusion(penalties_P, self.smoothing, wanted_positives)
        return chances

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        """Returns the indices to keep, ascending. Raises ValueError for an ungraded or failed trajectory."""
        rewards = [_reward(trajectory) for trajectory in trajectories]
        if len(trajectories) <= self.keep:
            return list(range(len(trajectories)))
        good = np.asarray(rewards) > 0
        positives, negatives = np.flatnonzero(good), np.flatnonzero(~good)
        wanted_positives, wanted_negatives = self.quota(len(positives), len(negatives))
        penalties_P = np.asarray([self.penalty(trajectories[index]) for index in positives])
        kept_positives = positives[draw(penalties_P, self.smoothing, wanted_positives, rng)]
        kept_negatives = rng.choice(negatives, wanted_negatives, replace=False)
        return sorted(int(index) for index in (*kept_positives, *kept_negatives))


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None or trajectory.error is not None:
        raise ValueError(f"prompt {trajectory.prompt.id}, sample {trajectory.sample}: ungraded or failed")
    return trajectory.reward


def draw(penalties_P: NDArray[np.float64], smoothing: float, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draws `count` times without replacement with weight 1 / (penalty + smoothing), as an exponential race.

    The first arrivals of independent exponential clocks with these rates have exactly that distribution.
    """
    arrivals_P = rng.exponential(size=len(penalties_P)) * (penalties_P + smoothing)
    return np.argsort(arrivals_P)[:count]


def inclusion(penalties_P: NDArray[np.float64], smoothing: float, count: int) -> NDArray[np.float64]:
    """Returns the probability with which each is among the `count` of `draw`.

    It is the probability that the clock of i rings at time t and fewer than `count` of the others before it, integrated
    over t by Gauss-Legendre quadrature in u = exp(-rate_i t). The number of others that have rung by t is a sum of
    independent bits, whose distribution is built bit by bit. Those with the same penalty have the same probability,
    which is computed once.

    >>> inclusion(np.asarray([0.0, 0.0, 0.0, 0.0]), 0.05, 1).round(6).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    total = len(penalties_P)
    if count >= total:
        return np.ones(total)
    rates_P = 1 / (penalties_P + smoothing)
    rates_D, first_D, which_P = np.unique(rates_P, return_index=True, return_inverse=True)  # D: the different rates
    u_Q, weights_Q = _quadrature()
    # [d, c, q]: the probability that c of the others have rung when the first one with rate d rings at point q
    rung_DCQ = np.zeros((len(rates_D), count, len(u_Q)))
    rung_DCQ[:, :1] = 1.0
    for other, rate in enumerate(rates_P):
        chance_DQ = 1 - u_Q ** (rate / rates_D)[:, None]  # the probability that `other` has rung by then
        chance_DQ[first_D == other] = 0.0
        before_DCQ = rung_DCQ[:, :-1] * chance_DQ[:, None]
        rung_DCQ *= 1 - chance_DQ[:, None]
        rung_DCQ[:, 1:] += before_DCQ
    return np.asarray((rung_DCQ.sum(1) * weights_Q).sum(1)[which_P])


@functools.cache
def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns points in (0, 1) and their weights. They are cached, since finding them takes longer than using them."""
    nodes_Q, weights_Q = np.polynomial.legendre.leggauss(QUADRATURE)
    return (nodes_Q + 1) / 2, weights_Q / 2
