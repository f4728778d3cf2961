"""Writes what a turn must be as a grammar that the engine obeys: an xgrammar structural tag, as JSON text. Pure.

A turn is a thought, where the model thinks, and then calls in the form that `engine.rollout.tool_call_parser` reads, or
an answer in JSON. The grammar leaves the model what does not matter: how it sets white space, and how long it thinks.

Invariants
- A complete turn that obeys the grammar of a call has a call that the parser decodes, of an allowed tool.
- A complete turn that obeys the grammar of an answer is one JSON value after its thought.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.gateway.requests import BadRequest, Constraint
from engine.rollout.chat_template import THOUGHT, Thoughts
from engine.rollout.tool_call_parser import CLOSE, OPEN

MOST_CHARS = 1 << 18  # of a grammar: it is compiled on the machine of the engines
MOST_REPEATS = 2_000  # that a schema may count: the engine compiles a state for each
DEEPEST = 64  # objects and lists within each other in a schema
MOST_SPACE = 16  # characters of white space in a row in JSON: a small model would space until its tokens end
SPACE = {"type": "regex", "pattern": r"[ \n]?"}
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
UNENFORCED = (
    *("uniqueItems", "contains", "not", "if"),
    *("dependentRequired", "dependentSchemas", "propertyNames"),
)  # keywords that xgrammar reads over
NEEDS_TYPE = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "pattern", "format"),
)  # keywords that it reads over where no type is given
FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer"),
    *("time", "uri", "uri-reference", "uri-template", "uuid"),
}  # that it knows; any other is no constraint
SAYS_NOTHING = {"$comment", "$defs", "$ref", "default", "definitions", "deprecated", "description", "examples", "title"}
CHOICES = ("anyOf", "oneOf", "enum")
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DATA = ("enum", "const", "default", "examples")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def grammar_of(constraint: Constraint, thoughts: Thoughts) -> str:
    """Returns the grammar of a turn. Raises BadRequest for what no grammar can express, or only a large one.

    thoughts: those of the chat template (`ChatTemplate.thoughts`).
    """
    forms: list[Mapping[str, Any]] = []
    try:
        if constraint.tools:
            forms.append(_calls(constraint.tools, once=constraint.once))
        if constraint.schema is not None:
            forms.append(_json(constraint.schema))
    except ValueError as error:
        raise BadRequest(constraint.field, str(error)) from error
    turn = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
    format = _sequence(*_thought(thoughts), turn)
    text = json.dumps({"type": "structural_tag", "format": format})  # in ASCII: half a surrogate pair has no bytes
    if len(text) > MOST_CHARS:
        raise BadRequest(constraint.field, f"its grammar must have at most {MOST_CHARS} characters, got {len(text)}")
    return text


def unenforced(schema: Mapping[str, Any]) -> str | None:
    """Returns what of a JSON schema xgrammar would not enforce; None if there is nothing. Raises ValueError.

    >>> unenforced({"type": "array", "items": {"type": "number", "multipleOf": 0.5}})
    'multipleOf'
    """
    return next((word for part in _schemas(schema) if (word := _unenforced(part))), None)


def _unenforced(schema: Mapping[str, Any]) -> str | None:
    kind, pattern, alls = schema.get("type"), schema.get("pattern"), schema.get("allOf")
    if word := next((word for word in UNENFORCED if schema.get(word)), None):
        return word
    if "multipleOf" in schema and kind != "integer":
        return "multipleOf"
    if isinstance(alls, list) and len(alls) > 1:
        return "allOf"
    if ("pattern" in schema or "format" in schema) and ("minLength" in schema or "maxLength" in schema):
        return "a length beside pattern or format"
    if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
        return "a pattern that looks ahead or behind"
    if "format" in schema and schema["format"] not in FORMATS:
        return "format"
    if "$ref" in schema and not str(schema["$ref"]).startswith("#"):
        return "$ref to another document"
    if "$ref" in schema and (beside := sorted(schema.keys() - SAYS_NOTHING)):
        return f"{beside[0]} beside $ref"
    properties, required = schema.get("properties") or {}, schema.get("required")
    if (
        isinstance(required, list)
        and isinstance(properties, Mapping)
        and any(isinstance(name, str) and name not in properties for name in required)
    ):
        return "required of a property that has no schema"
    if kind is None and (word := next((word for word in NEEDS_TYPE if word in schema), None)):
        return f"{word} without a type"
    return None


def _thought(thoughts: Thoughts) -> Iterator[Mapping[str, Any]]:
    begin, end = THOUGHT
    space = {"type": "regex", "pattern": r"\s{0,4}"}
    if thoughts == "begun":
        yield {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
        yield space
    elif thoughts == "possible":
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
        yield {"type": "optional", "content": _sequence(thought, space)}


def _calls(tools: Sequence[Mapping[str, Any]], *, once: bool) -> Mapping[str, Any]:
    calls = [_call(tool["function"]) for tool in tools]
    call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    return call if once else _sequence(call, {"type": "star", "content": _sequence(SPACE, call)})


def _call(function: Mapping[str, Any]) -> Mapping[str, Any]:
    if not function["name"]:
        raise ValueError("a tool without a name cannot be called")
    name = re.escape(json.dumps(function["name"], ensure_ascii=False))
    begin = rf'\{{[ \n]?"name"[ \n]?:[ \n]?{name}[ \n]?,[ \n]?"arguments"[ \n]?:[ \n]?'
    return _sequence(
        {"type": "const_string", "value": OPEN},
        SPACE,
        {"type": "regex", "pattern": begin},
        _json(_arguments(function)),
        {"type": "regex", "pattern": r"[ \n]?\}[ \n]?"},
        {"type": "const_string", "value": CLOSE},
    )


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments, which are an object whatever the tool says."""
    parameters = function.get("parameters") or ANY_OBJECT
    if not isinstance(parameters, Mapping):
        raise ValueError(
            f"the parameters of the tool {function['name']!r} must be a JSON schema, got {parameters!r:.80}"
        )
    return parameters if parameters.get("type") == "object" else {**parameters, "type": "object"}


def _json(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the form of a JSON value. Raises ValueError for a schema that takes the engine too long to compile."""
    for part in _schemas(schema):
        for word in COUNTS:
            if isinstance(part.get(word), int) and not 0 <= part[word] <= MOST_REPEATS:
                raise ValueError(
                    f"{word} must be from 0 to {MOST_REPEATS} in an enforced JSON schema, got {part[word]}"
                )
        for word in CHOICES:
            if part.get(word) == []:
                raise ValueError(f"{word} must have a member in an enforced JSON schema: an empty one allows nothing")
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_SPACE}


def _sequence(*elements: Mapping[str, Any]) -> Mapping[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": [*elements]}


def _schemas(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yields a JSON schema and those in it. Raises ValueError if they are too deep within each other."""
    if depth > DEEPEST:
        raise ValueError(f"a JSON schema may nest objects and lists at most {DEEPEST} deep")
    if isinstance(value, Mapping):
        yield value
        for word, part in value.items():
            if word in BY_NAME and isinstance(part, Mapping):
                part = list(part.values())
            if word not in DATA:
                yield from _schemas(part, depth + 1)
    elif isinstance(value, list):
        for part in value:
            yield from _schemas(part, depth + 1)
