"""What an evaluation says about a policy, with its uncertainty.

Invariants
- pass@k and pass^k are unbiased for any k up to the number of samples; beyond it there is no estimate.
- An interval treats the samples of one problem as correlated: problems, not samples, are what was drawn.
- An interval of scores stays inside [0, 1], and no finite sample gives one of width 0.

Shape legend: P problems, K samples of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate between two bounds."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    Source: Codex (arXiv 2107.03374, eq. 1). Raises ValueError unless 0 <= correct <= samples and 1 <= k <= samples.

    >>> pass_at_k(4, 2, 2)
    0.8333333333333334
    """
    _check(samples, correct, k)
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_hat_k(samples: int, correct: int, k: int) -> float:
    """The chance that all of k samples are correct: C(c, k) / C(n, k). Source: tau-bench (arXiv 2406.12045).

    Raises ValueError as `pass_at_k`.
    """
    _check(samples, correct, k)
    return math.comb(correct, k) / math.comb(samples, k)


def _check(samples: int, correct: int, k: int) -> None:
    if not 0 <= correct <= samples:
        raise ValueError(f"correct must be in [0, {samples}], got {correct}")
    if not 1 <= k <= samples:
        raise ValueError(f"k must be in [1, {samples}], got {k}")


def avg_at_k(scores_PK: NDArray[np.float64], confidence: float = 0.95) -> Interval:
    """Mean score over problems and samples, with the interval for problems of this kind (not for these alone).

    Wilson's interval at the effective number of samples p (1 - p) / (standard error clustered by problem)^2: between
    P, when the samples of a problem all agree, and P K. Source: Wilson (1927); clustered standard errors for
    evaluations as in arXiv 2411.00640, section 2.2.
    Raises ValueError unless scores are in [0, 1], [P, K], with at least one of each.
    """
    scores_PK = np.asarray(scores_PK, np.float64)
    if scores_PK.ndim != 2 or not scores_PK.size:
        raise ValueError(f"scores [P, K] expected, got shape {scores_PK.shape}")
    if not ((scores_PK >= 0) & (scores_PK <= 1)).all():
        raise ValueError("scores must be in [0, 1]")
    problems = len(scores_PK)
    mean, variance = float(scores_PK.mean()), _variance_of_mean(scores_PK.mean(1))
    effective = mean * (1 - mean) / variance if 0 < variance < math.inf else problems
    effective = min(max(effective, problems), scores_PK.size)
    return _wilson(mean, effective, _quantile(confidence, problems - 1))


def paired_difference(
    ours_PK: NDArray[np.float64], theirs_PK: NDArray[np.float64], confidence: float = 0.95
) -> Interval:
    """Mean of ours - theirs over the same problems: how hard a problem is cancels, unlike in two intervals.

    Source: arXiv 2411.00640, section 4. The numbers of samples may differ; with problems drawn at random the interval
    is Student's. Raises ValueError unless there are two problems or more, the same number of each.
    """
    ours_P, theirs_P = np.asarray(ours_PK, np.float64).mean(1), np.asarray(theirs_PK, np.float64).mean(1)
    if ours_P.shape != theirs_P.shape or len(ours_P) < 2:
        raise ValueError(f"the same two or more problems expected, got {len(ours_P)} and {len(theirs_P)}")
    mean = float((ours_P - theirs_P).mean())
    margin = _quantile(confidence, len(ours_P) - 1) * math.sqrt(_variance_of_mean(ours_P - theirs_P))
    return Interval(mean, mean - margin, mean + margin)


def _variance_of_mean(values_P: NDArray[np.float64]) -> float:
    return float(values_P.var(ddof=1) / len(values_P)) if len(values_P) > 1 else math.inf


def _wilson(mean: float, count: float, quantile: float) -> Interval:
    shrink = quantile**2 / count
    centre = (mean + shrink / 2) / (1 + shrink)
    margin = quantile * math.sqrt(mean * (1 - mean) / count + shrink / (4 * count)) / (1 + shrink)
    return Interval(mean, max(0.0, centre - margin), min(1.0, centre + margin))


def _quantile(confidence: float, freedom: int) -> float:
    """Student's two-sided quantile: exact for 1 and 2 degrees of freedom, beyond within 1 % up to a confidence of 0.99.

    Source: Abramowitz and Stegun, 26.7.5. Raises ValueError unless confidence is in (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence!r}")
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
