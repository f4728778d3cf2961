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
MOST_REPEATS = 10_000  # that a schema may count: the engine compiles a state for each
DEEPEST = 64  # objects and lists within each other in a schema
MOST_SPACE = 64  # characters of white space in a row in JSON, so that no model spaces for ever
SPACE = {"type": "regex", "pattern": r"[ \n]?"}
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
UNENFORCED = (
    "multipleOf",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "not",
    "if",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
)
"""Keywords of JSON Schema that xgrammar reads over."""
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
    """Returns a keyword of a JSON schema that the grammar would not enforce; None if there is none.

    >>> unenforced({"type": "array", "items": {"type": "integer", "multipleOf": 2}})
    'multipleOf'
    """
    return next((word for part in _objects(schema) for word in UNENFORCED if part.get(word)), None)


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
    for part in _objects(schema):
        for word in COUNTS:
            if isinstance(part.get(word), int) and part[word] > MOST_REPEATS:
                raise ValueError(f"{word} must be at most {MOST_REPEATS} in an enforced JSON schema, got {part[word]}")
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_SPACE}


def _sequence(*elements: Mapping[str, Any]) -> Mapping[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": [*elements]}


def _objects(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yields all objects in a JSON value, itself included. Raises ValueError if they are too deep."""
    if depth > DEEPEST:
        raise ValueError(f"a JSON schema may nest objects and lists at most {DEEPEST} deep")
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _objects(part, depth + 1)
