"""RoC against the released code."""

import pytest

from tests.golden.roc_release import error_penalty, format_penalty, quota, select
from tests.support.golden import over, rows


@over(rows("roc_penalty", definition="released"))
def test_penalties_match_the_release(row):
    text, outputs = row["inputs"]["text"], row["outputs"]
    assert error_penalty(text) == outputs["p_err"]
    assert format_penalty(text) == outputs["p_format"]


@over(rows("roc_quota"))
def test_quota_matches_the_release(row):
    params, inputs, outputs = row["params"], row["inputs"], row["outputs"]
    arguments = (
        inputs["n_positive"],
        inputs["n_negative"],
        params["m"],
        params["min_positive"],
        params["min_negative"],
    )
    if outputs.get("error") == "AssertionError":
        with pytest.raises(ValueError, match="cannot keep 3"):
            quota(*arguments)
    else:
        assert quota(*arguments) == (outputs["positives"], outputs["negatives"])


@over(rows("roc_quota_splits"))
def test_quota_matches_the_release_over_all_splits(row):
    """Computed by the released code for each number of positives; null where its assertion fails."""
    params = row["params"]
    for positives, kept in zip(row["inputs"]["n_positive"], row["outputs"]["kept"], strict=True):
        split = (positives, params["n"] - positives, params["m"], params["min_positive"], params["min_negative"])
        if kept is None:
            with pytest.raises(ValueError, match=f"cannot keep {params['m']}"):
                quota(*split)
        else:
            assert quota(*split) == tuple(kept), split


@over(rows("roc_select"))
def test_selection_matches_the_release_group_by_group(row):
    params, inputs, outputs = row["params"], row["inputs"], row["outputs"]
    errors, formats = [error_penalty(text) for text in inputs["texts"]], [format_penalty(t) for t in inputs["texts"]]
    assert (errors, formats) == (outputs["p_err"], outputs["p_format"])
    use = params["roc_error_ratio"], params["roc_answer_format"]
    penalties = [use[0] * error + use[1] * shape for error, shape in zip(errors, formats, strict=True)]
    least = params["min_non_zero_reward_trace_num"], params["min_zero_reward_trace_num"]
    kept = []
    for uid in sorted(set(inputs["uids"])):
        members = [index for index, other in enumerate(inputs["uids"]) if other == uid]
        group = [penalties[index] for index in members], [inputs["rewards"][index] for index in members]
        if outputs.get("error") == "AssertionError":
            with pytest.raises(ValueError, match="cannot keep"):
                select(*group, params["down_sample_to_n"], *least)
            return
        kept += [members[index] for index in select(*group, params["down_sample_to_n"], *least)]
    size = params["world_size"]  # the release then cuts the batch at its tail to a multiple of the world size
    assert sorted(kept)[: len(kept) // size * size] == (outputs["kept_indices"] or [])
