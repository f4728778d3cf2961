"""Advantages and flat groups against the peers."""

import numpy as np
import pytest

from algo.group.advantages import Advantage, is_flat
from tests.support.golden import numbers, over, rows

RLOO = Advantage(baseline="leave_one_out", scale="none")


def standardised(index, rewards, params):
    """The peer's definition by ours, of one of the batch's groups."""
    rewards_G = rewards[index]
    definition, eps = params["definition"], params.get("eps") or 1e-6
    if definition in ("grpo_nostd", "grpo_nostd_wholerow"):
        return Advantage(scale="none").of_group(rewards_G)
    if definition in ("rloo", "loo_mean", "loo_no_std"):
        return RLOO.of_group(rewards_G)
    if definition == "grpo_mean_group_std_batch":
        return Advantage(scale="batch", eps=eps).of_batch(rewards)[index]
    baseline = "leave_one_out" if definition.startswith("loo") else "mean"
    return Advantage(baseline=baseline, eps=eps).of_group(rewards_G)


def peer_differs(rewards_G, params):
    """Why a group's golden advantages are not ours, or None."""
    if len(rewards_G) == 1 and params["singleton"] != "0":
        return "a group of one: its reward, its share of a batch or NaN instead of 0"
    if np.ptp(rewards_G) == 0:
        return "a flat group in float32: rounding noise over a tiny deviation instead of 0"
    if params.get("var_floor", 0) > rewards_G.var(ddof=1):
        return "a variance below its floor: advantages shrink"
    return None


@over(rows("group_advantage"))
def test_matches_golden(row):
    inputs, params = row["inputs"], {"singleton": "0"} | row["params"]
    rewards_B, groups = np.asarray(inputs["rewards"]), list(inputs["group_ids"])
    if params["definition"].endswith("wholerow") or params["definition"] == "batch_norm":
        groups = [0] * len(groups)
    members_of = {group: [index for index, other in enumerate(groups) if other == group] for group in groups}
    rewards = [rewards_B[members] for members in members_of.values()]
    for number, members in enumerate(members_of.values()):
        ours = standardised(number, rewards, params)
        if peer_differs(rewards_B[members], params):
            assert not ours.any()
            continue
        for index, advantage in zip(members, ours, strict=True):
            mask = np.asarray(inputs["response_mask"][index])
            theirs = np.asarray(numbers(row["outputs"]["token_advantages"][index]))
            assert advantage * mask == pytest.approx(theirs * mask, rel=params["tol"], abs=params["tol"])


KEEPERS_OF_NOISE = "std>0 (ddof=0) or group of one"  # SkyRL: rounding makes [0.1] * 7 look uneven


@over([row for row in rows("dynamic_sampling") if "keep" in row["outputs"]])
def test_flat_groups_match_golden(row):
    params, rewards_G = row["params"], np.asarray(row["inputs"]["rewards"])
    tolerance = params.get("tolerance", params.get("threshold", 0.0))
    if params["peer"] == "rStar":  # torch.allclose: relative to the rewards
        tolerance = 1e-8 + 1e-5 * abs(rewards_G).max()
    flat = is_flat(rewards_G, tolerance)
    if len(rewards_G) == 1 or (params["definition"] == KEEPERS_OF_NOISE and np.ptp(rewards_G) == 0):
        assert flat  # SkyRL keeps a group of one
    else:
        assert flat is not row["outputs"]["keep"]


@over(rows("dynamic_sampling", definition="rstar_batch_with_world_size_cut"))
def test_whole_groups_are_dropped_and_never_a_tail_of_one(row):
    uids, rewards = row["inputs"]["uids"], row["inputs"]["rewards"]
    groups = {uid: [reward for other, reward in zip(uids, rewards, strict=True) if other == uid] for uid in uids}
    kept = [index for index, uid in enumerate(uids) if not is_flat(np.asarray(groups[uid]))]
    world_size = row["params"]["world_size"]  # rStar cuts at the tail to a multiple of it
    assert kept[: len(kept) // world_size * world_size] == row["outputs"]["kept_indices"]
