import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algo.group.batch import join, prepare
from algo.group.roc import RoC, draw, error_penalty, format_penalty, penalty
from algo.group.selection import KeepAll, RandomSubset
from algo.reward.answers import answers
from engine.types import Group
from tests.support.algo_fakes import trajectory
from tests.support.golden import name, rows


@pytest.mark.parametrize("row", rows("roc_penalty", definition="paper"), ids=name)
def test_penalties_match_the_paper(row):
    inputs, outputs = row["inputs"], row["outputs"]
    failed = inputs["n_tool_errors"]
    outcomes = ("timeout", "malformed", "error")[:failed] + ("ok",) * (inputs["n_tool_calls"] - failed)
    rollout = trajectory(inputs["text"], outcomes=outcomes, turns=inputs["n_turns"])
    assert len(answers(inputs["text"])) == inputs["n_answers"]
    assert error_penalty(rollout) == pytest.approx(outputs["p_err"], abs=1e-12)
    assert format_penalty(rollout) == pytest.approx(outputs["p_format"], abs=1e-12)
    assert penalty(rollout) == pytest.approx(outputs["p_total"], abs=1e-12)


@pytest.mark.parametrize("row", rows("roc_quota"), ids=lambda row: row["params"]["case"])
def test_quota_is_the_papers_when_half_is_kept(row):
    positives, negatives = row["inputs"]["n_positive"], row["inputs"]["n_negative"]
    kept = RoC(row["params"]["m"]).quota(positives, negatives)
    assert sum(kept) == row["params"]["m"]
    half = row["outputs"]["paper_half_positive"]
    if half is not None:
        assert kept == (math.ceil(half), negatives // 2)


@pytest.mark.parametrize("row", rows("roc_inclusion", definition="paper_positive"), ids=name)
@pytest.mark.parametrize(("key", "smoothing"), [("1/(p+0.01)", 0.01), ("1/(p+0.1)", 0.1)])
def test_positives_are_drawn_with_the_inclusion_probabilities_of_successive_draws(row, key, smoothing):
    penalties, count, trials = np.asarray(row["inputs"]["p_total"]), row["params"]["k"], 20_000
    expected = row["outputs"]["alternatives"][key]["successive_without_replacement"]
    rng = np.random.default_rng(7)
    drawn = np.concatenate([draw(penalties, smoothing, count, rng) for _ in range(trials)])
    observed = np.bincount(drawn, minlength=len(penalties)) / trials
    assert observed == pytest.approx(expected, abs=4.5 * 0.5 / trials**0.5)


@pytest.mark.parametrize("row", rows("roc_inclusion", definition="paper_negative"), ids=name)
def test_negatives_are_uniform_whatever_they_look_like(row):
    count = row["inputs"]["n"]
    kinds = [("error",), ("ok",), ()]
    group = [trajectory(reward=0.0, outcomes=kinds[index % 3]) for index in range(count)]
    rng, trials = np.random.default_rng(3), 5_000
    kept = Counter(index for _ in range(trials) for index in RoC(row["params"]["k"])(group, rng))
    observed = [kept[index] / trials for index in range(count)]
    assert observed == pytest.approx(row["outputs"]["inclusion"], abs=4.5 * 0.5 / trials**0.5)


flags = st.lists(st.tuples(st.booleans(), st.sampled_from(["ok", "error", "timeout"])), max_size=40)


@given(flags, st.integers(1, 20), st.integers(0, 99))
def test_keeps_exactly_k_in_proportion_without_duplicates(kinds, keep, seed):
    group = [trajectory(reward=float(good), outcomes=(outcome,)) for good, outcome in kinds]
    kept = RoC(keep)(group, np.random.default_rng(seed))
    assert kept == RoC(keep)(group, np.random.default_rng(seed))
    assert kept == sorted(set(kept))
    assert len(kept) == min(keep, len(group))
    if len(group) > keep:
        negatives = [index for index, (good, _) in enumerate(kinds) if not good]
        assert sum(index in negatives for index in kept) == len(negatives) * keep // len(group)


def test_clean_positives_are_preferred():
    group = [trajectory(reward=1.0, outcomes=("error",)) for _ in range(8)]
    group += [trajectory(reward=1.0, outcomes=("ok",)) for _ in range(8)]
    rng, trials = np.random.default_rng(1), 300
    clean = sum(index >= 8 for _ in range(trials) for index in RoC(8)(group, rng)) / (8 * trials)
    control = sum(index >= 8 for _ in range(trials) for index in RandomSubset(8)(group, rng)) / (8 * trials)
    assert clean > 0.85
    assert 0.45 < control < 0.55


def test_a_single_failure_is_not_kept():
    group = [trajectory(reward=float(index > 0)) for index in range(16)]
    assert 0 not in RoC(8)(group, np.random.default_rng(0))


def test_other_selectors():
    group = [trajectory(reward=1.0) for _ in range(5)]
    assert KeepAll()(group, np.random.default_rng(0)) == [0, 1, 2, 3, 4]
    kept = RandomSubset(3)(group, np.random.default_rng(0))
    assert kept == sorted(set(kept))
    assert len(kept) == 3
    assert RandomSubset(9)(group, np.random.default_rng(0)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("chosen", [[0, 0, 1], [-3, 0, 1], [True, False, True]])
def test_a_selector_that_gives_an_index_twice_is_refused(chosen):
    """As a mask does, or a draw with replacement: it would be trained twice, and counted as sampled twice."""
    members = tuple(trajectory(reward=reward) for reward in (1.0, 0.0, 1.0))
    group = Group(prompt=members[0].prompt, trajectories=members, lease=0)
    assert prepare(lambda trajectories, rng: [2, 1], seed=0)(group).kept == (2, 1)
    with pytest.raises(ValueError, match=f"selector.*{re.escape(str(chosen))}"):
        prepare(lambda trajectories, rng: chosen, seed=0)(group)


def test_what_another_temperature_sampled_is_not_trained():
    """Its log-probabilities are those of temperature 1: it was not sampled with these probabilities."""
    members = tuple(replace(trajectory(reward=reward), temperature=0.6) for reward in (1.0, 0.0))
    group = prepare(KeepAll(), seed=0)(Group(prompt=members[0].prompt, trajectories=members, lease=0))
    with pytest.raises(ValueError, match=r"temperature 1.*0\.6"):
        join(1, [group])
    assert join(1, [replace(group, kept=(), advantages_K=None, drop="easy")]).lengths_B.size == 0


def test_misuse_is_refused():
    for arguments in ({"keep": 0}, {"keep": 2, "smoothing": 0.0}, {"keep": 2, "compat": "released"}):
        with pytest.raises(ValueError, match=r"RoC\."):
            RoC(**arguments)
    with pytest.raises(ValueError, match="keep"):
        RandomSubset(0)
    with pytest.raises(ValueError, match="ungraded"):
        RoC(1)([trajectory(), trajectory()], np.random.default_rng(0))
