"""Tool calls: what comes out depends on the text alone, never on how it was cut."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.rollout.tool_call_parser import CLOSE, HIDDEN, OPEN, MalformedCall, ToolCall, ToolCallParser
from tests.support.examples import examples


def parse(chunks):
    parser = ToolCallParser()
    return [call for chunk in chunks for call in parser.feed(chunk)], parser.finish()


def call(**content):
    return OPEN + json.dumps(content) + CLOSE


GOOD = call(name="python", arguments={"code": "print('x')"})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"name": "f", "arguments": "x=1"}, "'arguments' must be an object"),
        ({"name": "f", "arguments": [1, 2]}, "'arguments' must be an object"),
        ({"name": "f", "arguments": None}, "'arguments' must be an object"),
        ({"name": "f"}, "'arguments' must be an object"),
        ({"name": "", "arguments": {}}, "'name' must be a non-empty string"),
        ({"name": 3, "arguments": {}}, "'name' must be a non-empty string"),
        ({"arguments": {}}, "'name' must be a non-empty string"),
        ([1], "a call must be a JSON object"),
        ({"name": "f", "arguments": {"x": float("nan")}}, "NaN is not JSON"),
        ({"name": "f", "arguments": {"x": float("-inf")}}, "-Infinity is not JSON"),
    ],
)
def test_what_is_not_a_name_and_an_object_is_refused_with_a_reason(content, reason):
    text = json.dumps(content)
    assert parse([OPEN + text + CLOSE]) == ([MalformedCall(text=text, reason=reason)], [])


def test_what_a_record_or_a_tool_could_not_hold_is_refused():
    deep = '{"name": "f", "arguments": {"x": %s}}'
    for value, reason in [
        ('"\\ud83d"', r"character '\\ud83d' in position \d+: surrogates not allowed"),
        ('{"\\ud83d": 1}', "surrogates not allowed"),
        ("1e999", "Out of range float"),
        ("[" * 99 + "]" * 99, "nested more than 100 deep"),
    ]:
        [found], [] = parse([OPEN + deep % value + CLOSE])
        assert isinstance(found, MalformedCall), value
        assert re.search(reason, found.reason)
    for value in ('"\\ud83d\\ude00"', str(2**64), str(-(10**4000)), "[" * 98 + "]" * 98):
        [found], [] = parse([OPEN + deep % value + CLOSE])
        assert found.arguments == {"x": json.loads(value)}


def test_deep_nesting_and_endless_numbers_are_malformed_and_no_crash():
    for text in ("[" * 100_000, '{"name": "f", "arguments": {"x": ' + "9" * 10_000 + "}}"):
        [found], [] = parse([OPEN + text + CLOSE])
        assert isinstance(found, MalformedCall)
        assert found.reason


def test_a_call_comes_out_at_the_character_that_closes_it():
    parser = ToolCallParser()
    counts = [len(parser.feed(char)) for char in GOOD + "\n" + GOOD]
    assert [at for at, count in enumerate(counts) if count] == [len(GOOD) - 1, 2 * len(GOOD)]


@pytest.mark.parametrize("code", ["'</tool_call>'", '"</tool_call>"', "'<tool_call>'", '"\\"</tool_call>', "\\", '\\"'])
def test_tags_quotes_and_backslashes_inside_a_string_belong_to_the_string(code):
    assert parse(call(name="f", arguments={"code": code})) == ([ToolCall(name="f", arguments={"code": code})], [])


def test_text_like_a_tag_around_calls():
    text = f"< <tool <tool_calls> <<tool_call {OPEN}< </tool </tool_call >{CLOSE} </tool_call> <{GOOD}<"
    bad, good = parse(text)[0]
    assert isinstance(bad, MalformedCall)
    assert good == ToolCall(name="python", arguments={"code": "print('x')"})


@pytest.mark.parametrize(
    "bad",
    [
        "{bad}",
        '{"name": "f", "arguments": {"code": "print(1)}}',  # a quote is missing: it hides the closing tag
        '{"name": "f", arguments": {"code": "print(\\"1\\")"}}',
        '"',
        "",
    ],
)
@pytest.mark.parametrize("order", ["bad first", "good first", "between"])
def test_a_bad_call_gets_an_error_and_the_good_ones_run(bad, order):
    good = call(name="python", arguments={"code": 'print("x")'})
    pieces = {"bad first": [bad, good], "good first": [good, bad], "between": [good, bad, good]}[order]
    calls, rest = parse("".join(p if p == good else OPEN + p + CLOSE for p in pieces))
    kinds = [isinstance(c, ToolCall) for c in calls + rest]
    assert kinds == [p == good for p in pieces]
    assert [c.text for c in calls + rest if isinstance(c, MalformedCall)] == [bad]


@pytest.mark.parametrize("ended", [False, True])
def test_a_bad_call_that_hides_very_many_is_one(ended):
    """Each that hides all behind it would have the rest of the turn read once more: minutes for a long turn."""
    bad = '{"name": "f", "arguments": {"code": \\"1\\"}}'
    for count, pieces in ((HIDDEN, HIDDEN), (HIDDEN + 1, 1), (100_000, 1)):
        calls, rest = parse([(OPEN + bad + CLOSE) * count + f'"{CLOSE}' * ended])
        assert len(calls + rest) == pieces
        assert all(isinstance(each, MalformedCall) for each in calls + rest)


@pytest.mark.parametrize("tail", ["<", "<<", "</", "</tool_", "</tool_call"])
def test_the_beginning_of_a_tag_before_the_closing_tag(tail):
    assert parse([OPEN + "{}" + tail + CLOSE]) == ([MalformedCall(text="{}" + tail, reason="Extra data")], [])


def test_a_call_that_is_never_closed_is_never_executed():
    whole = json.dumps({"name": "f", "arguments": {}})
    assert parse([OPEN + whole]) == ([], [MalformedCall(text=whole, reason="tool call not closed")])
    assert parse([OPEN + whole + "</tool_cal"])[0] == []
    assert parse([OPEN[:-1]]) == ([], [])


HALVES = ['{"name": "f", "arguments": {"c": "', '"}}']
FRAGMENTS = [OPEN, CLOSE, GOOD, *HALVES, '"', "\\", "{", "}", "<", "</", ">", "é𝄞", " ", "\n"]


@examples(300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.lists(st.integers(0, 60), max_size=8))
def test_the_calls_do_not_depend_on_the_chunking(text, cuts):
    whole = parse([text])
    assert parse(text) == whole, "one character at a time"
    marks = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(marks)]
    assert parse(pieces) == whole, pieces


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=3)


@examples(150)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=8), arguments), max_size=4), st.booleans(), st.integers(1, 9))
def test_whatever_was_encoded_comes_back(calls, ascii_only, width):
    text = " and ".join(
        OPEN + json.dumps({"name": name, "arguments": content}, ensure_ascii=ascii_only) + CLOSE
        for name, content in calls
    )
    found, rest = parse([text[at : at + width] for at in range(0, len(text), width)])
    assert [(c.name, c.arguments) for c in found] == calls
    assert rest == []
