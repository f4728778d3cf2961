"""When a replica's log-probabilities are the learner's: how far they may be from them, by dtype."""

import numpy as np
import pytest

from engine.canary import CanaryFailed, Weights, compare, tolerance


@pytest.mark.parametrize(("dtype", "ordinary", "broken"), [("float32", 2e-6, 1e-3), ("bfloat16", 0.05, 0.38)])
def test_rounding_passes_and_weights_that_are_partly_old_do_not(dtype, ordinary, broken):
    """0.38: the least that a stale lm_head was seen to make."""
    learner = np.asarray([-1.0, -2.0, -3.0], np.float32)
    weights = Weights("/w", 7, learner)
    assert compare(1, learner + np.float32(ordinary), weights, tolerance(dtype)) == pytest.approx(ordinary, rel=0.1)
    with pytest.raises(CanaryFailed, match="replica 1 after weight update 7"):
        compare(1, learner - np.float32(broken), weights, tolerance(dtype))
    with pytest.raises(CanaryFailed):
        compare(1, learner * np.float32(np.nan), weights, tolerance(dtype))


def test_a_dtype_that_was_never_measured_is_refused():
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, got 'float16'"):
        tolerance("float16")
