"""Penalties of long answers against the peers."""

import numpy as np
import pytest

from algo.group.selection import KeepAll, KeepFinished
from algo.reward.overlong import overlong_penalty
from engine.types import StopReason
from tests.support.algo_fakes import trajectory
from tests.support.golden import over, rows

SOFT = [row for row in rows("overlong") if row["params"]["definition"] != "filter_mask"]


@over(SOFT)
def test_matches_golden(row):
    params, inputs = row["params"], row["inputs"]
    limits = {"longest": params["max_response_length"], "buffer": params["buffer"], "factor": params["factor"]}
    ours = [
        reward + overlong_penalty(length, **limits)
        for length, reward in zip(inputs["lengths"], inputs["rewards"], strict=True)
    ]
    assert ours == pytest.approx(row["outputs"]["rewards"], rel=params["tol"], abs=params["tol"])


@over(rows("overlong", definition="filter_mask"))
def test_what_a_limit_cut_off_is_filtered_as_in_golden(row):
    stops = {"length": StopReason.LENGTH, "abort": StopReason.DEADLINE, "stop": StopReason.ANSWER}
    group = [trajectory(reward=0.0, stop=stops[reason]) for reason in row["inputs"]["stop_reasons"]]
    kept = KeepFinished(KeepAll())(group, np.random.default_rng(0))
    assert kept == [index for index, mask in enumerate(row["outputs"]["loss_masks"]) if any(mask)]
