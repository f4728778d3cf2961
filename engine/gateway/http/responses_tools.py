"""The tools of a request of OpenAI's Responses API, as the functions that a chat template shows. Pure.

A tool that takes free text becomes a function with one argument, `input`. The functions of a namespace are shown as
`namespace__name`. A tool that OpenAI's servers run and that clients offer unasked is left out: the model cannot call
it, as a model may decide in any case. Every other kind of tool is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.gateway.lineage import is_malformed
from engine.gateway.requests import BadRequest
from engine.rollout.tool_call_messages import decoded_arguments

LEFT_OUT = ("web_search", "image_generation")  # also with a suffix, as in web_search_preview
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Offered:
    """The tools that a request offers to the model.

    functions: the schemas, in the form of chat completions. free_text: the names of those that take free text.
    namespaces: the namespace and the own name of a function, by the name that the model reads. left_out: the kinds of
    tools that were left out.
    """

    functions: tuple[dict[str, Any], ...] = ()
    free_text: frozenset[str] = frozenset()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, tools: Sequence[Any]) -> Offered:
        """Returns the tools of a request. Raises BadRequest naming the tool."""
        functions: list[dict[str, Any]] = []
        free_text: set[str] = set()
        namespaces: dict[str, tuple[str, str]] = {}
        left_out: list[str] = []
        for where, namespace, tool in _each(tools):
            kind = tool.get("type")
            if kind not in ("function", "custom"):
                hosted = [name for name in LEFT_OUT if isinstance(kind, str) and kind.startswith(name)]
                if hosted:
                    left_out += hosted
                    continue
                cause = f"tools of type {kind!r} are not supported"
                raise BadRequest(where, f"{cause}. Fix: offer a function that the client runs")
            own = tool.get("name")
            if not isinstance(own, str) or not own:
                raise BadRequest(f"{where}.name", f"must be a non-empty string, got {own!r}")
            name = shown_name(namespace, own)
            if namespace is not None:
                namespaces[name] = namespace, own
            if kind == "custom":
                free_text.add(name)
            functions.append(_function(tool, name, where))
        return cls(
            functions=tuple(functions), free_text=frozenset(free_text), namespaces=namespaces, left_out=tuple(left_out)
        )

    def item(self, call: Mapping[str, Any], item_id: str) -> dict[str, Any]:
        """Returns a call of the model as an item. call: in the form of chat completions.

        A call of a free-text tool whose arguments are not just its text becomes an ordinary call: its item must say
        all that the model wrote.
        """
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        namespace, own = self.namespaces.get(name, (None, name))
        head = {"id": item_id, "call_id": call["id"], "name": own}
        if namespace is not None:
            head["namespace"] = namespace
        text = _only_text(call) if name in self.free_text else None
        if text is not None:
            return {"type": "custom_tool_call", **head, "input": text, "status": "completed"}
        return {"type": "function_call", **head, "arguments": arguments, "status": "completed"}


def shown_name(namespace: Any, name: str) -> str:
    """Returns the name of a function that the model reads.

    >>> shown_name(None, "add"), shown_name("math", "add")
    ('add', 'math__add')
    """
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def arguments_of(text: str) -> str:
    """Returns the arguments of a call of a free-text tool.

    >>> arguments_of("ls")
    '{"input": "ls"}'
    """
    return json.dumps({"input": text})


def _each(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Yields each tool with its place in the request and its namespace."""
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if not isinstance(tool, Mapping):
            raise BadRequest(where, f"must be an object, got {tool!r}")
        if tool.get("type") != "namespace":
            yield where, None, tool
            continue
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not namespace or not isinstance(inner, list):
            raise BadRequest(where, "a namespace must have a name and a list of tools")
        for number, each in enumerate(inner):
            place = f"{where}.tools[{number}]"
            if not isinstance(each, Mapping):
                raise BadRequest(place, f"must be an object, got {each!r}")
            yield place, namespace, each


def _function(tool: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Returns a tool as a function in the form of chat completions."""
    description = tool.get("description")
    parameters = tool.get("parameters")
    if tool["type"] == "custom":
        description, parameters = _described(tool, where), FREE_TEXT
    function = {"name": name, "description": description or "", "parameters": parameters or NO_ARGUMENTS}
    return {"type": "function", "function": function}


def _described(tool: Mapping[str, Any], where: str) -> str:
    """Returns the description of a free-text tool, with its grammar if it has one."""
    description, form = tool.get("description") or "", tool.get("format") or {}
    if not isinstance(description, str) or not isinstance(form, Mapping):
        raise BadRequest(where, "its description must be text and its format an object")
    if form.get("type", "text") == "text":
        return description
    return f"{description}\n\nThe input must follow this grammar ({form.get('syntax')}):\n{form.get('definition')}"


def _only_text(call: Mapping[str, Any]) -> str | None:
    """Returns the text of a call of a free-text tool; None if its arguments are anything else."""
    if is_malformed(call):
        return None
    arguments = decoded_arguments(call["function"]["arguments"])
    text = arguments.get("input")
    return text if isinstance(text, str) and len(arguments) == 1 else None
