"""RoC against the paper."""

import math
from collections import Counter

import numpy as np
import pytest

from algo.group.roc import RoC, draw, error_penalty, format_penalty, penalty
from algo.reward.answers import answers
from tests.support.algo_fakes import trajectory
from tests.support.golden import over, rows


@over(rows("roc_penalty", definition="paper"))
def test_penalties_match_the_paper(row):
    inputs, outputs = row["inputs"], row["outputs"]
    failed = inputs["n_tool_errors"]
    outcomes = ("timeout", "malformed", "error")[:failed] + ("ok",) * (inputs["n_tool_calls"] - failed)
    rollout = trajectory(inputs["text"], outcomes=outcomes, turns=inputs["n_turns"])
    assert len(answers(inputs["text"])) == inputs["n_answers"]
    assert error_penalty(rollout) == pytest.approx(outputs["p_err"], abs=1e-12)
    assert format_penalty(rollout) == pytest.approx(outputs["p_format"], abs=1e-12)
    assert penalty(rollout) == pytest.approx(outputs["p_total"], abs=1e-12)


@over(rows("roc_quota"), lambda row: row["params"]["case"])
def test_quota_is_the_papers_when_half_is_kept(row):
    positives, negatives = row["inputs"]["n_positive"], row["inputs"]["n_negative"]
    kept = RoC(row["params"]["m"]).quota(positives, negatives)
    assert sum(kept) == row["params"]["m"]
    half = row["outputs"]["paper_half_positive"]
    if half is not None:
        assert kept == (math.ceil(half), negatives // 2)


@over(rows("roc_inclusion", definition="paper_positive"))
def test_positives_are_drawn_with_the_inclusion_probabilities_of_successive_draws(row):
    for key, smoothing in (("1/(p+0.01)", 0.01), ("1/(p+0.1)", 0.1)):
        check_inclusion(row, key, smoothing)


def check_inclusion(row, key, smoothing):
    penalties, count, trials = np.asarray(row["inputs"]["p_total"]), row["params"]["k"], 20_000
    expected = row["outputs"]["alternatives"][key]["successive_without_replacement"]
    rng = np.random.default_rng(7)
    drawn = np.concatenate([draw(penalties, smoothing, count, rng) for _ in range(trials)])
    observed = np.bincount(drawn, minlength=len(penalties)) / trials
    assert observed == pytest.approx(expected, abs=4.5 * 0.5 / trials**0.5)


@over(rows("roc_inclusion", definition="paper_negative"))
def test_negatives_are_uniform_whatever_they_look_like(row):
    count = row["inputs"]["n"]
    kinds = [("error",), ("ok",), ()]
    group = [trajectory(reward=0.0, outcomes=kinds[index % 3]) for index in range(count)]
    rng, trials = np.random.default_rng(3), 5_000
    kept = Counter(index for _ in range(trials) for index in RoC(row["params"]["k"])(group, rng))
    observed = [kept[index] / trials for index in range(count)]
    assert observed == pytest.approx(row["outputs"]["inclusion"], abs=4.5 * 0.5 / trials**0.5)
