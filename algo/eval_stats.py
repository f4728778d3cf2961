"""Estimates of a policy's accuracy from an evaluation, with their uncertainty.

Invariants
- pass@k and pass^k are unbiased for any k up to the number of samples; beyond it there is no estimate.
- An interval treats the samples of one problem as correlated: problems, not samples, are what was drawn.
- An interval of scores stays inside [0, 1]. No finite sample gives an interval of width 0, and equal pairs do not
  either.

Shape legend: P problems, K samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from sandbox.require import require, within


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate between two bounds."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimates the chance that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    Source: Codex (arXiv 2107.03374, eq. 1). Raises ValueError unless 0 <= correct <= samples and 1 <= k <= samples.

    >>> pass_at_k(4, 2, 2)
    0.8333333333333334
    """
    _check(samples, correct, k)
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_hat_k(samples: int, correct: int, k: int) -> float:
    """Estimates the chance that all of k samples are correct: C(c, k) / C(n, k). Source: tau-bench (arXiv 2406.12045).

    Raises ValueError as `pass_at_k` does.
    """
    _check(samples, correct, k)
    return math.comb(correct, k) / math.comb(samples, k)


def _check(samples: int, correct: int, k: int) -> None:
    require("correct", correct, within(f"[0, {samples}]"))
    require("k", k, within(f"[1, {samples}]"))


def avg_at_k(scores_PK: NDArray[np.float64], confidence: float = 0.95) -> Interval:
    """Returns the mean score over problems and samples, with its interval for all problems of this kind.

    The interval is the exact one of a binomial with an effective number of samples, p (1 - p) / (standard error
    clustered by problem)^2, which lies between P, when the samples of a problem all agree, and P K. Source: Korn and
    Graubard (1998) with the interval of Clopper and Pearson (1934). The clustered variance counts one more problem,
    half of it solved: the few problems that a weak model solves decide its mean, and if none of them was drawn, the
    scores alone show no variance. The interval covers the mean at least as often as `confidence` promises, with thirty
    problems too.

    Raises ValueError unless scores are in [0, 1], [P, K], with at least one of each.
    """
    scores_PK = np.asarray(scores_PK, np.float64)
    if scores_PK.ndim != 2 or not scores_PK.size:
        raise ValueError(f"scores [P, K] expected, got shape {scores_PK.shape}")
    if not ((scores_PK >= 0) & (scores_PK <= 1)).all():
        raise ValueError("scores must be in [0, 1]")
    problems, scores_P = len(scores_PK), scores_PK.mean(1)
    mean = float(scores_P.mean())
    centre = (scores_P.sum() + 0.5) / (problems + 1)
    squares = ((scores_P - centre) ** 2).sum() + ((1 - centre) ** 2 + centre**2) / 2
    effective = float(centre * (1 - centre) * problems * (problems + 1) / squares)
    effective = min(max(effective, problems), scores_PK.size)
    normal = NormalDist().inv_cdf((1 + _checked(confidence)) / 2)
    effective *= (normal / _quantile(confidence, problems - 1)) ** 2
    return Interval(mean, *_binomial_bounds(mean, effective, confidence))


def paired_difference(
    ours_PK: NDArray[np.float64], theirs_PK: NDArray[np.float64], confidence: float = 0.95
) -> Interval:
    """Returns the mean of ours - theirs over the same problems, so that their difficulty cancels.

    Source: arXiv 2411.00640, section 4. The numbers of samples may differ. Since problems are drawn at random, the
    interval is Student's. Its variance counts two more problems, one to each side, that differ by as much as those that
    do differ, or by 1 if none does: that all pairs are equal does not show that the next one will be, and leaves about
    3 / P open.

    Raises ValueError unless there are two or more problems, the same number on both sides.
    """
    ours_P, theirs_P = np.asarray(ours_PK, np.float64).mean(1), np.asarray(theirs_PK, np.float64).mean(1)
    if ours_P.shape != theirs_P.shape or len(ours_P) < 2:
        raise ValueError(f"the same two or more problems expected, got {len(ours_P)} and {len(theirs_P)}")
    differences_P = ours_P - theirs_P
    problems, mean = len(differences_P), float(differences_P.mean())
    unequal = differences_P[differences_P != 0]
    square = float((unequal**2).mean()) if len(unequal) else 1.0
    variance = (((differences_P - mean) ** 2).sum() + 2 * square) / (problems + 1)
    margin = _quantile(confidence, problems - 1) * math.sqrt(variance / problems)
    return Interval(mean, mean - margin, mean + margin)


def mean_of_runs(values_S: Sequence[float], confidence: float = 0.95) -> Interval:
    """Returns the mean over independent runs (seeds, say) with Student's interval.

    The differences of runs paired by seed are such values too. Raises ValueError for fewer than two values.
    """
    if len(values_S) < 2:
        raise ValueError(f"two runs or more expected, got {len(values_S)}")
    mean = float(np.mean(values_S))
    margin = _quantile(confidence, len(values_S) - 1) * float(np.std(values_S, ddof=1)) / math.sqrt(len(values_S))
    return Interval(mean, mean - margin, mean + margin)


def student_p(statistic: float, freedom: float) -> float:
    """Returns how often chance alone makes Student's t this large, in either direction.

    >>> round(student_p(2.045, 29), 3)
    0.05
    """
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + statistic**2)) if statistic else 1.0


def _binomial_bounds(share: float, count: float, confidence: float) -> tuple[float, float]:
    """Returns Clopper and Pearson's bounds for a share of `count` samples, which need not be a whole number."""
    tail, right = (1 - confidence) / 2, share * count
    wrong = count - right
    low = _beta_quantile(tail, right, wrong + 1) if right > 0 else 0.0
    return low, 1 - _beta_quantile(tail, wrong, right + 1) if wrong > 0 else 1.0


def _beta_quantile(share: float, a: float, b: float) -> float:
    """Returns the point at which the distribution function of Beta(a, b) reaches a share, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _incomplete_beta(a, b, middle) < share else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Returns the regularised incomplete beta function, computed as a continued fraction.

    Source: Abramowitz and Stegun, 26.5.8, evaluated from the front (Lentz, 1976).
    """
    if x > (a + 1) / (a + b + 2):  # there the fraction of the complement converges faster
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    above, below = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = below
    for m in range(1, 10_000):
        before = fraction
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            above, below = 1 + term / above, 1 / (1 + term * below)
            fraction *= above * below
        if abs(fraction - before) < 1e-12 * abs(fraction):
            break
    return math.exp(log_front) * fraction / a


def _quantile(confidence: float, freedom: int) -> float:
    """Returns Student's two-sided quantile: exact for 1 and 2 degrees of freedom, else within 1 % up to 0.99.

    Source: Abramowitz and Stegun, 26.7.5. Raises ValueError unless confidence is in (0, 1).
    """
    confidence = _checked(confidence)
    if freedom <= 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (index + 1) for index, term in enumerate(terms))


def _checked(confidence: float) -> float:
    require("confidence", confidence, within("(0, 1)"))
    return confidence
