"""Plain values as text: what goes in comes out as Python's own types, and no other text does harm."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algo.reward.code.guest.plain import decode, encode

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
LEAVES |= st.complex_numbers(allow_nan=False)
HASHABLE = st.recursive(
    LEAVES, lambda of: st.lists(of, max_size=3).map(tuple) | st.frozensets(of, max_size=3), max_leaves=4
)
PLAIN = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=3),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(HASHABLE, of, max_size=3) | st.tuples(of, of),
    max_leaves=8,
)


def types(value: object) -> object:
    if isinstance(value, dict):
        return dict, [(types(key), types(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(part) for part in value]
    return type(value)


@given(PLAIN)
def test_a_plain_value_comes_back_with_its_types(value: object) -> None:
    text = encode(value)
    assert text.isascii()
    assert "\n" not in text
    back = decode(text)
    assert (back, types(back)) == (value, types(value))


KINDS = st.sampled_from(["tuple", "set", "dict", "int", "bytes", "complex"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda of: st.lists(of) | st.dictionaries(KINDS, of, max_size=2)
)


@given(st.text() | JSON.map(json.dumps))
def test_any_text_is_a_plain_value_or_refused(text: str) -> None:
    try:
        value = decode(text)
    except ValueError:
        return
    assert type(value) in (type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)


Point = namedtuple("Point", "x y")
Colour = IntEnum("Colour", "RED")


class Equal(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Counter("ab"), {"a": 1, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (Colour.RED, 1),
        (np.float64(0.5), 0.5),
        (np.int32(3), 3),
        pytest.param(10**5000, 10**5000, id="long"),
        ([math.inf, -math.inf], [math.inf, -math.inf]),
        (Equal("a"), "a"),
    ],
)
def test_a_subclass_is_its_plain_base(value: object, expected: object) -> None:
    back = decode(encode(value))
    assert (back, types(back)) == (expected, types(expected))


@pytest.mark.parametrize("value", [object(), print, iter([]), np.zeros(2), [1, {2: object()}], range(3)])
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="no plain value"):
        encode(value)


def test_deep_and_cyclic_values_are_refused() -> None:
    cyclic: list[object] = []
    cyclic.append(cyclic)
    with pytest.raises(ValueError, match="deep"):
        encode(cyclic)
    with pytest.raises(ValueError, match="no plain value"):
        decode("[" * 100_000 + "]" * 100_000)
