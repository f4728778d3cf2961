"""What a constraint lets a model write: exactly the turns that the parser, and the client, can read."""

import json

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.grammar import MOST_CHARS, MOST_REPEATS, grammar_of, unenforced
from engine.gateway.requests import BadRequest, Constraint
from engine.rollout.tool_call_parser import ToolCall, ToolCallParser

END = 256
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*(bytes([byte]) for byte in range(256)), b"</s>"], stop_token_ids=[END]), max_threads=1
)
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
ODD = 'o"d \\ d.(ö)'


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


TOOLS = (tool("add", ADD), tool("now"), tool(ODD, {"type": "object", "properties": {}, "additionalProperties": False}))


def accepts(constraint, text, thoughts="none"):
    """Whether a turn may be this text and end there."""
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(grammar_of(constraint, thoughts)))
    return matcher.accept_string(text) and matcher.accept_token(END)


def wanting(tools=TOOLS, **fields):
    return Constraint(field="tool_choice", tools=tools, **fields)


def call(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


SUM = call("add", {"a": 1, "b": -2})


@pytest.mark.parametrize(
    "text",
    [
        SUM,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>',
        SUM + call("now", {"anything": [None, {"x": "</tool_call>"}]}),
        f"{SUM}\n{SUM}\n{SUM}",
        call(ODD, {}),
    ],
)
def test_a_required_call_may_be_written_as_models_write_it_and_the_parser_reads_it(text):
    assert accepts(wanting(), text)
    parser = ToolCallParser()
    found = [*parser.feed(text), *parser.finish()]
    assert found
    assert all(isinstance(each, ToolCall) for each in found)
    assert {each.name for each in found} <= {"add", "now", ODD}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        f"I add. {SUM}",
        f"{SUM} and that is it",
        call("other", {}),
        call("add", {"a": 1}),
        call("add", {"a": 1, "b": "2"}),
        call("add", {"a": 1, "b": 2, "c": 3}),
        call("now", []),
        SUM.removesuffix("</tool_call>"),
    ],
)
def test_what_is_no_call_of_an_offered_tool_cannot_be_written(text):
    assert not accepts(wanting(), text)


def test_one_call_may_be_all_that_is_allowed():
    assert accepts(wanting(once=True), SUM)
    assert not accepts(wanting(once=True), SUM + SUM)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ('{"name": "Ann", "age": 7}', True),
        ('{\n  "name": "A\\"nn",\n  "age": 7\n}', True),
        ('{"name": "Ann"}', False),
        ('{"name": "Ann", "age": 7.5}', False),
        ('{"name": "Ann", "age": 7} done', False),
        (SUM, False),
        ("", False),
    ],
)
def test_an_answer_is_json_of_its_schema(text, possible):
    assert accepts(Constraint(field="response_format", schema=PERSON), text) == possible


def test_with_tools_a_turn_is_calls_or_the_answer():
    constraint = Constraint(field="response_format", tools=TOOLS, schema=PERSON)
    assert accepts(constraint, SUM)
    assert accepts(constraint, '{"name": "Ann", "age": 7}')
    assert not accepts(constraint, SUM + '{"name": "Ann", "age": 7}')


def test_any_object_is_the_answer_of_json_object():
    constraint = Constraint(field="response_format", schema={"type": "object"})
    assert accepts(constraint, '{"x": [1, {"y": null}]}')
    assert not accepts(constraint, "[1]")


@pytest.mark.parametrize(
    ("thoughts", "text", "possible"),
    [
        ("possible", "<think>\nI add: {}\n</think>\n\n" + SUM, True),
        ("possible", SUM, True),
        ("possible", "<think>I add.", False),
        ("possible", f"<think>I add.</think> Well, {SUM}", False),
        ("begun", f"I add.\n</think>\n\n{SUM}", True),
        ("begun", SUM, False),
        ("none", f"<think>I add.</think>{SUM}", False),
    ],
)
def test_a_model_thinks_before_it_obeys(thoughts, text, possible):
    assert accepts(wanting(), text, thoughts) == possible


INTEGERS = {"type": "array", "items": {"type": "integer"}}
TWO = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
READ_OVER = {  # what the refusal names: a schema with it, and a value that the schema forbids
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, "0.3"),
    "uniqueItems": ({**INTEGERS, "uniqueItems": True}, "[1, 1]"),
    "contains": ({**INTEGERS, "contains": {"const": 5}}, "[1]"),
    "not": ({"type": "integer", "not": {"const": 3}}, "3"),
    "if": ({"type": "integer", "if": {"const": 3}, "then": False}, "3"),
    "dependentRequired": ({**TWO, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "dependentSchemas": ({**TWO, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}'),
    "propertyNames": ({**TWO, "propertyNames": {"pattern": "^a", "type": "string"}}, '{"b": 1}'),
    "required of a property that has no schema": ({"type": "object", "required": ["a"]}, "{}"),
    "allOf": ({"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]}, '"maybe"'),
    "a length beside pattern or format": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
    "a pattern that looks ahead or behind": ({"type": "string", "pattern": "^(?!a).*$"}, '"a"'),
    "format": ({"type": "string", "format": "weird"}, '"x"'),
    "maximum beside $ref": ({"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": {"type": "integer"}}}, "9"),
    "minimum without a type": ({"minimum": 3}, "1"),
    "$ref to another document": ({"$ref": "https://example.org/a"}, "1"),
}


@pytest.mark.parametrize("word", READ_OVER)
def test_what_is_not_enforced_is_known_wherever_it_is(word):
    """Once xgrammar enforces it, it need not be refused any more."""
    schema, forbidden = READ_OVER[word]
    assert accepts(Constraint(field="response_format", schema=schema), forbidden)
    whole = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, schema]}}}
    assert unenforced(whole) == word


def test_names_of_properties_and_values_are_no_keywords():
    names = {name: {"type": "string"} for name in ("not", "if", "format", "contains", "pattern")}
    schema = {"type": "object", "properties": names, "default": {"not": 1}, "enum": [{"if": 1}]}
    assert unenforced(schema) is None
    assert unenforced({**INTEGERS, "uniqueItems": False}) is None
    assert unenforced({"$ref": "#/$defs/x", "description": "It.", "$defs": {"x": {"type": "integer"}}}) is None


ENFORCED = {
    "enum": ({"enum": ["a", "b"]}, '"a"', '"c"'),
    "const": ({"const": 5}, "5", "6"),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", '"x"'),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, '"abc"', '"abd"'),
    "maxLength": ({"type": "string", "maxLength": 2}, '"ab"', '"abc"'),
    "minItems": ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[1, 2]", "[1]"),
    "maximum": ({"type": "integer", "minimum": 1, "maximum": 12}, "12", "13"),
    "multipleOf": ({"type": "integer", "multipleOf": 2}, "4", "3"),
    "format": ({"type": "string", "format": "email"}, '"a@b.org"', '"x"'),
    "minProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2},
        '{"a": 1, "b": 2}',
        "{}",
    ),
    "ref": ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}}, "true", "1"),
}


@pytest.mark.parametrize("word", ENFORCED)
def test_what_clients_write_into_schemas_is_enforced(word):
    schema, good, bad = ENFORCED[word]
    constraint = Constraint(field="response_format", schema=schema)
    assert accepts(constraint, good)
    assert not accepts(constraint, bad)
    assert unenforced(schema) is None


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (nested(5000), "deep"),
        ({"type": "string", "maxLength": MOST_REPEATS + 1}, "maxLength"),
        ({"type": "array", "items": {"type": "array", "minItems": 10**30}}, "minItems"),
        ({"enum": ["x" * MOST_CHARS]}, "characters"),
        ({"type": "array", "minItems": -1}, "minItems"),
        ({"properties": {"a": {"anyOf": []}}}, "anyOf must have"),
        ({"enum": []}, "enum must have"),
    ],
)
def test_what_an_engine_cannot_compile_soon_or_at_all_is_refused(schema, named):
    with pytest.raises(BadRequest, match=named) as caught:
        grammar_of(Constraint(field="response_format", schema=schema), "none")
    assert caught.value.field == "response_format"


@pytest.mark.parametrize("parameters", [[1], "text", 7])
def test_parameters_that_are_no_schema_are_refused(parameters):
    with pytest.raises(BadRequest, match="parameters"):
        grammar_of(wanting((tool("f", parameters),)), "none")


def test_a_tool_without_a_name_cannot_be_called():
    with pytest.raises(BadRequest, match="name"):
        grammar_of(wanting((tool(""),)), "none")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800")
KEYS = st.text(max_size=5) | st.sampled_from(["type", "properties", "items", "minItems", "$ref", "\ud800"])
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@given(name=st.text(max_size=8), schema=ANYTHING, parameters=ANYTHING, thoughts=st.sampled_from(["none", "begun"]))
def test_whatever_a_request_holds_gives_a_grammar_or_a_refusal(name, schema, parameters, thoughts):
    schema = schema if isinstance(schema, dict) else None
    tools = (tool(name, parameters),)
    constraint = Constraint(field="tool_choice", tools=tools, schema=schema)
    try:
        if schema is not None:
            unenforced(schema)
        text = grammar_of(constraint, thoughts)
    except BadRequest:
        return
    assert text.isascii()
    assert json.loads(text)["type"] == "structural_tag"
