"""Which tier a call runs in: a hint that any text must give."""

from __future__ import annotations

import pytest
from hypothesis import example, given

from sandbox.tiers import LOOKED_AT, TIERS, choose
from tests.support.odd_texts import ODD_TEXTS, in_no_time


@pytest.mark.parametrize(
    ("code", "tier"),
    [
        ("import math", "bare"),
        ("from numpy import array", "math"),
        ("import math, numpy.linalg as la, sympy", "math"),
        ("import numpy as np, scipy.stats", "full"),
        ("x = 1; import scipy", "bare"),
        ("if x:\n\timport scipy", "full"),
        ("import pandas", "full"),
        ("import .x", "bare"),
        ("import ...", "bare"),
        ("import ,, .a, numpy", "math"),
        ('"""\nimport ... as of\n"""\nfrom . import numpy', "bare"),
        ("", "bare"),
    ],
)
def test_a_call_runs_in_the_first_tier_that_has_its_imports(code: str, tier: str) -> None:
    assert choose(code, TIERS) == tier


@given(ODD_TEXTS)
@example("import " + "a," * LOOKED_AT)
@example("import a\n" * LOOKED_AT)
@example(" " * LOOKED_AT * 10)
def test_no_text_is_too_odd_to_choose_by(code: str) -> None:
    tier = in_no_time(lambda: choose(code, TIERS))
    assert tier in {known.name for known in TIERS}
