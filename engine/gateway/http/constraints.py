"""Reads which turns a request allows, in either vendor's words: tool_choice, response_format, output_config. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.gateway.grammar import ANY_OBJECT, unenforced
from engine.gateway.requests import BadRequest, Constraint

Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a request says of calls: none of them, as the model likes, or at least one.

    names: the tools one of which must be called; None for any. once: whether one call is all that the turn may have.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None
    once: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The JSON that a request wants as the answer. field: the part of the request that says so."""

    field: str
    schema: Mapping[str, Any]


def constraint_of(choice: Choice, tools: Sequence[Mapping[str, Any]], format: Format | None) -> Constraint | None:
    """Returns what a turn must be; None for a free one. tools: those that are offered. Raises BadRequest.

    A turn that must call has no answer; one that may call has either calls or the answer.
    """
    offered = () if choice.mode == "none" else tuple(tools)
    if choice.mode == "required":
        if not offered:
            raise BadRequest("tool_choice", "it is only allowed when tools are given, and there are none")
        return Constraint(field="tool_choice", tools=_named(offered, choice.names), once=choice.once)
    if format is None:
        return None
    return Constraint(field=format.field, tools=offered, once=choice.once, schema=format.schema)


def _named(tools: tuple[Mapping[str, Any], ...], names: Sequence[str] | None) -> tuple[Mapping[str, Any], ...]:
    if names is None:
        return tools
    known = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if name not in known:
            raise BadRequest("tool_choice", f"there is no tool {name!r} among the tools {sorted(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def openai_choice(choice: Any, *, parallel: bool | None) -> Choice:
    """Returns OpenAI's tool_choice, as chat completions and responses write it. Raises BadRequest.

    >>> openai_choice({"type": "function", "function": {"name": "f"}}, parallel=None)
    Choice(mode='required', names=('f',), once=True)
    """
    once = parallel is False
    if choice in (None, "auto"):
        return Choice(once=once)
    if choice in ("none", "required"):
        return Choice(mode=choice, once=once)
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            return Choice(mode="required", names=(_function_name(choice),), once=True)
        allowed = choice.get("allowed_tools", choice)
        if choice.get("type") == "allowed_tools" and isinstance(allowed, Mapping) and allowed.get("mode") == "required":
            allowed_tools = allowed.get("tools")
            if isinstance(allowed_tools, list) and allowed_tools:
                return Choice(mode="required", names=tuple(map(_function_name, allowed_tools)), once=once)
    raise BadRequest(
        "tool_choice",
        "must be 'none', 'auto', 'required', a function by its name, or allowed_tools of mode 'required', got "
        f"{choice!r:.100}",
    )


def _function_name(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise BadRequest("tool_choice", f"must name a function, got {choice!r:.100}")
    return name


def anthropic_choice(choice: Mapping[str, Any] | None) -> Choice:
    """Returns Anthropic's tool_choice. Raises BadRequest.

    >>> anthropic_choice({"type": "any"}).mode, anthropic_choice({"type": "tool", "name": "f"}).names
    ('required', ('f',))
    """
    choice = choice or {}
    kind, once = choice.get("type", "auto"), bool(choice.get("disable_parallel_tool_use", False))
    if kind == "auto":
        return Choice(once=once)
    if kind == "none":
        return Choice(mode="none")
    if kind == "any":
        return Choice(mode="required", once=once)
    if kind == "tool":
        return Choice(mode="required", names=(_function_name(choice),), once=True)
    raise BadRequest("tool_choice", f"type must be 'auto', 'any', 'tool' or 'none', got {kind!r:.100}")


def openai_format(format: Any, field: str = "response_format") -> Format | None:
    """Returns OpenAI's response_format, or text.format of its responses; None for free text. Raises BadRequest.

    >>> openai_format({"type": "json_object"})
    Format(field='response_format', schema={'type': 'object'})
    """
    if not format:
        return None
    kind = format.get("type") if isinstance(format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Format(field=field, schema=ANY_OBJECT)
    if kind != "json_schema":
        raise BadRequest(field, f"type must be 'text', 'json_object' or 'json_schema', got {format!r:.100}")
    named = format.get("json_schema", format)
    if not isinstance(named, Mapping):
        raise BadRequest(field, f"json_schema must be an object with a schema, got {named!r:.100}")
    schema = _schema(named.get("schema", ANY_OBJECT), field)
    if named.get("strict") and (word := _unenforced(schema, field)):
        raise BadRequest(field, f"strict is not possible with {word!r}, which the grammar does not enforce")
    return Format(field=field, schema=schema)


def anthropic_format(config: Any) -> Format | None:
    """Returns the format of Anthropic's output_config; None for free text. Raises BadRequest."""
    field = "output_config"
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise BadRequest(field, f"must be an object, got {config!r:.100}")
    format = config.get("format")
    if format is None:
        return None
    if not isinstance(format, Mapping) or format.get("type") != "json_schema":
        raise BadRequest(field, f"format.type must be 'json_schema', got {format!r:.100}")
    schema = _schema(format.get("schema"), field)
    if word := _unenforced(schema, field):
        raise BadRequest(field, f"the schema has {word!r}, which the grammar does not enforce")
    return Format(field=field, schema=schema)


def _schema(schema: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise BadRequest(field, f"schema must be a JSON schema, which is an object, got {schema!r:.100}")
    return schema


def _unenforced(schema: Mapping[str, Any], field: str) -> str | None:
    try:
        return unenforced(schema)
    except ValueError as error:
        raise BadRequest(field, str(error)) from error
