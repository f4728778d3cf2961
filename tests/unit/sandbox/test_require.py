"""The rules of configurations: what each admits, and that the error names field, rule and value."""

import math

import pytest

from sandbox.require import at_least, finite, none_or, one_of, positive, require, true_or_false, whole, within

RULES = [
    (positive, (1, 0.5, math.inf), (0, -1, math.nan, None, "1")),
    (finite, (0, -1.5), (math.inf, math.nan, None)),
    (true_or_false, (True, False), (0, 1, None)),
    (at_least(2), (2, 2.5), (1, math.nan, None, "2")),
    (whole(0), (0, 3), (-1, 1.0, None)),
    (within("[0, 1]"), (0, 1, 0.5), (-0.1, 1.1, math.nan, None)),
    (within("(0, 1)"), (0.5,), (0, 1)),
    (within("[0, 1)"), (0,), (1,)),
    (within("(0, inf)"), (1e300,), (0, math.inf)),
    (one_of("a", None), ("a", None), ("b",)),
    (none_or(positive), (None, 1), (0, "1")),
]


@pytest.mark.parametrize(("rule", "good", "bad"), RULES, ids=[rule.text for rule, *_ in RULES])
def test_a_rule_admits_what_its_words_say(rule, good, bad):
    for value in good:
        require("field", value, rule)
    for value in bad:
        with pytest.raises(ValueError, match=r"^field must be ") as refusal:
            require("field", value, rule)
        assert rule.text in str(refusal.value)
        assert repr(value) in str(refusal.value)
