import math

import numpy as np
import pytest

from algo.eval_stats import (
    _binomial_bounds,
    _quantile,
    avg_at_k,
    mean_of_runs,
    paired_difference,
    pass_at_k,
    pass_hat_k,
)


def test_impossible_counts_are_refused():
    for arguments in ((4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)):
        for function in (pass_at_k, pass_hat_k):
            with pytest.raises(ValueError, match=r"correct|k must"):
                function(*arguments)


@pytest.mark.parametrize(
    ("freedom", "at_95", "at_99"),
    [
        (1, 12.7062, 63.6567),
        (2, 4.30265, 9.92484),
        (3, 3.18245, 5.84091),
        (5, 2.57058, 4.03214),
        (29, 2.04523, 2.75639),
    ],
)
def test_quantiles_of_student_match_the_table(freedom, at_95, at_99):
    tolerance = {1: 1e-5, 2: 1e-5, 3: 0.01, 5: 1e-3, 29: 1e-5}[freedom]
    assert _quantile(0.95, freedom) == pytest.approx(at_95, rel=tolerance)
    assert _quantile(0.99, freedom) == pytest.approx(at_99, rel=tolerance)


# Problems, samples of each, their mean score, and how differently hard they are: Beta with so many pseudo-counts.
KINDS = [(30, 16, 0.05, 0.3), (30, 16, 0.02, 1.0), (30, 64, 0.05, 0.1), (30, 1, 0.5, 0.8), (200, 4, 0.5, 0.8)]


@pytest.mark.parametrize(("problems", "samples", "score", "counts"), KINDS)
def test_the_interval_covers_the_mean_of_all_problems_of_the_kind(problems, samples, score, counts):
    """Problems of very different difficulty: an interval that takes samples for independent covers half the time."""
    rng, trials = np.random.default_rng(5), 150
    difficulty = rng.beta(counts * score, counts * (1 - score), (trials, problems))
    found = [avg_at_k(rng.random((problems, samples)) < difficulty_P[:, None]) for difficulty_P in difficulty]
    covered = sum(interval.low <= score <= interval.high for interval in found) / trials
    assert covered > 0.94
    assert (
        np.mean([interval.high - interval.low for interval in found])
        < 4 * (score * (1 - score) / problems) ** 0.5 + 2 / problems
    )


@pytest.mark.parametrize(("share", "count", "low", "high"), [(0.0, 10, 0.0, 0.30850), (0.1, 20, 0.01235, 0.31698)])
def test_the_bounds_of_a_binomial_match_the_table(share, count, low, high):
    assert _binomial_bounds(share, count, 0.95) == pytest.approx((low, high), abs=1e-5)
    assert _binomial_bounds(1 - share, count, 0.95) == pytest.approx((1 - high, 1 - low), abs=1e-5)


@pytest.mark.parametrize("differing", [0.01, 0.05, 0.3])
def test_a_paired_difference_covers_where_few_problems_differ(differing):
    """Ours solves a share of the problems that theirs does not; often none of these is among the thirty."""
    rng, trials = np.random.default_rng(7), 2_000
    ours = (rng.random((trials, 30, 1)) < differing).astype(float)
    found = [paired_difference(ours_PK, np.zeros_like(ours_PK)) for ours_PK in ours]
    assert sum(interval.low <= differing <= interval.high for interval in found) / trials > 0.94


def test_equal_pairs_leave_a_difference_open():
    scores_PK = np.random.default_rng(0).random((30, 4))
    interval = paired_difference(scores_PK, scores_PK)
    assert interval.mean == 0
    assert interval.high == -interval.low == pytest.approx(3 / 30, abs=0.01)  # the rule of three


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_agreement_of_all_samples_is_no_certainty(score):
    interval = avg_at_k(np.full((30, 16), score))
    assert interval.mean == score
    assert 0 <= interval.low < interval.high <= 1
    assert interval.high - interval.low == pytest.approx(0.125, abs=0.002)  # about 4 / 30, whatever the samples


def test_one_problem_says_little_about_its_kind():
    interval = avg_at_k(np.asarray([[1.0, 0.0, 1.0, 1.0]]))
    assert interval.low < 0.1
    assert interval.high > 0.9


def test_a_paired_difference_is_narrower_than_the_two_intervals():
    rng = np.random.default_rng(2)
    difficulty_P = rng.beta(0.4, 0.4, 100)
    theirs_PK = rng.random((100, 8)) < difficulty_P[:, None]
    ours_PK = rng.random((100, 16)) < (0.9 * difficulty_P + 0.1)[:, None]
    paired, ours, theirs = paired_difference(ours_PK, theirs_PK), avg_at_k(ours_PK), avg_at_k(theirs_PK)
    assert paired.mean == pytest.approx(ours.mean - theirs.mean)
    assert paired.low > 0
    assert paired.high - paired.low < 0.5 * ((ours.high - ours.low) + (theirs.high - theirs.low))


def test_what_is_no_table_of_scores_is_refused():
    for scores in (np.zeros(3), np.zeros((0, 4)), np.zeros((2, 0)), np.full((2, 2), 1.5), np.full((2, 2), math.nan)):
        with pytest.raises(ValueError, match="scores"):
            avg_at_k(scores)
    for pair in ((np.zeros((3, 1)), np.zeros((2, 1))), (np.zeros((1, 4)), np.zeros((1, 4)))):
        with pytest.raises(ValueError, match="problems"):
            paired_difference(*pair)
    with pytest.raises(ValueError, match="confidence"):
        avg_at_k(np.zeros((2, 2)), confidence=1.0)


def test_the_mean_of_runs_is_students():
    """Seeds are runs, not problems: equal ones leave nothing open, and their level does not widen the interval."""
    interval = mean_of_runs([10.30, 10.31, 10.32])
    assert (interval.mean, interval.high - interval.mean) == pytest.approx((10.31, 4.30265 * 0.01 / math.sqrt(3)))
    assert mean_of_runs([0.5, 0.5]).high == 0.5
    with pytest.raises(ValueError, match="two runs"):
        mean_of_runs([0.5])
