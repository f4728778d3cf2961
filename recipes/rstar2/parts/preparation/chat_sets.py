"""Converts the rows of conversational data sets to OpenAI's form: messages, calls with their arguments as JSON, tool
schemas.

Promises
- A call in a conversation is of a tool that is shown, its arguments are an object, and replies follow calls.
- A conversation ends with an assistant's turn; a user's last words that nobody answers are cut off.
- What is no such conversation is dropped with a reason. Nothing is repaired by guessing.

The Glaive form was run on 300 real conversations. ToolACE, APIGen-MT, Magicoder, Tulu 3 and Llama-Nemotron were not
there to be run when this was written: their columns are those of their public cards.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.rstar2.parts.preparation.rows import Conversation, Dropped, Fields, Place, WrongField
from recipes.rstar2.parts.sampling.protocol import PROTOCOLS

# Roles by ShareGPT's names and by OpenAI's.
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "call",
    "observation": "tool",
    "tool": "tool",
}
_TYPES = {"dict": "object", "float": "number", "int": "integer", "str": "string", "list": "array", "bool": "boolean"}


class Unusable(ValueError):
    """Says why a row is no conversation to learn from: (reason, detail)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def sharegpt(source: str, row: Mapping[str, Any], place: Place) -> Conversation | Dropped:
    """Converts rows of Glaive v2 and APIGen-MT, in ShareGPT's form: `conversations` of `from` and `value`, calls and
    tools as JSON.

    >>> turns = [("human", "Time?"), ("function_call", '{"name": "clock", "arguments": {}}'),
    ...          ("observation", "12"), ("gpt", "Noon.")]
    >>> row = {"conversations": [{"from": role, "value": text} for role, text in turns],
    ...        "tools": '[{"name": "clock", "description": "", "parameters": {}}]'}
    >>> [message["role"] for message in sharegpt("glaive", row, Place(id="g-0", index=0)).messages]
    ['user', 'assistant', 'tool', 'assistant']
    """
    fields = Fields(row)
    turns = _turns(fields)
    if system := fields.optional_text("system").strip():
        turns = [("system", system), *turns]
    try:
        tools = _schemas(_json_list(fields.optional_text("tools")))
        return _conversation(source, _messages(turns, _json_calls), tools, place)
    except Unusable as error:
        return Dropped(reason=error.reason, detail=error.detail)


def toolace(row: Mapping[str, Any], place: Place) -> Conversation | Dropped:
    """Converts rows of ToolACE: tools are a JSON list in `system`, calls [name(argument=value, ...)] in a turn's text.

    The system text says how to call in that form, so it is left out.
    """
    fields = Fields(row)
    turns = [("call" if role == "assistant" and text.startswith("[") else role, text) for role, text in _turns(fields)]
    system = fields.text("system")
    start = system.find("[{")
    try:
        tools = _schemas(json.JSONDecoder().raw_decode(system, start)[0] if start >= 0 else [])
        return _conversation("toolace", _messages(turns, python_calls), tools, place)
    except json.JSONDecodeError as error:
        return Dropped(reason="bad_tools", detail=str(error))
    except Unusable as error:
        return Dropped(reason=error.reason, detail=error.detail)


def magicoder(row: Mapping[str, Any], place: Place) -> Conversation | Dropped:
    """Turns a problem whose solution is one block of Python into a call of the protocol's Python tool."""
    fields = Fields(row)
    if fields.optional_text("lang") not in ("", "python"):
        return Dropped(reason="not_python", detail=fields.text("lang"))
    blocks = re.findall(r"```(\w*)[^\n]*\n(.*?)```", fields.text("solution", "response"), re.DOTALL)
    python = [code.rstrip() for language, code in blocks if language in ("", "python", "py", "python3")]
    if len(python) != 1 or len(blocks) != 1:
        return Dropped(reason="not_one_program", detail=f"{len(blocks)} blocks of code")
    try:
        ast.parse(python[0])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Dropped(reason="not_python", detail=str(error))
    schema = PROTOCOLS[place.protocol].schema(stateful=False)
    call = _call(schema["function"]["name"], {"code": python[0], "input": ""})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": fields.text("problem", "instruction").strip()},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return Conversation(id=place.id, index=place.index, source="magicoder", messages=messages, tools=_dump([schema]))


def tulu_if(row: Mapping[str, Any], place: Place) -> Conversation | Dropped:
    """Converts Tulu 3's instructions with constraints: `messages` in OpenAI's form."""
    return _chat("tulu3_if", Fields(row).objects("messages"), place)


def nemotron_chat(row: Mapping[str, Any], place: Place) -> Conversation | Dropped:
    """Converts Llama-Nemotron's chat: `input` (messages, or text), `output`. Answers with thinking are left out."""
    fields = Fields(row)
    if fields.optional_text("category") not in ("", "chat"):
        return Dropped(reason="not_chat", detail=fields.text("category"))
    output = fields.text("output")
    if fields.optional_text("reasoning") == "on" or "<think>" in output:
        return Dropped(reason="reasoning")
    given = fields.value("input")
    before = [{"role": "user", "content": given}] if isinstance(given, str) else fields.objects("input")
    system = fields.optional_text("system_prompt").strip()
    if system and not any(message.get("role") == "system" for message in before):
        before = [{"role": "system", "content": system}, *before]
    return _chat("nemotron_chat", [*before, {"role": "assistant", "content": output}], place)


def _chat(source: str, messages: Sequence[Mapping[str, Any]], place: Place) -> Conversation | Dropped:
    """Returns a conversation without tools. An empty system message is left out."""
    turns = [(_role(message.get("role")), _text(message.get("content"), "messages")) for message in messages]
    try:
        return _conversation(source, _messages(turns, _json_calls), [], place)
    except Unusable as error:
        return Dropped(reason=error.reason, detail=error.detail)


def _turns(fields: Fields) -> list[tuple[str, str]]:
    """Yields (role, text) of each turn of `conversations`."""
    return [
        (_role(turn.get("from", turn.get("role"))), _text(turn.get("value", turn.get("content")), "conversations"))
        for turn in fields.objects("conversations")
    ]


def _role(name: Any) -> str:
    if name not in _ROLES:
        raise WrongField(f"a turn's role must be one of {', '.join(_ROLES)}, got {name!r}")
    return _ROLES[name]


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise WrongField(f"{column}: the text of a turn must be a string, got {value!r}")
    return value.strip()


def _messages(turns: Sequence[tuple[str, str]], read_calls: Any) -> list[dict[str, Any]]:
    """Turns as messages; calls become part of the assistant's turn that they follow, if they follow one.

    Raises Unusable where turns do not follow each other as they must.
    """
    while turns and turns[-1][0] in ("user", "system"):
        turns = turns[:-1]
    if not turns or turns[-1][0] not in ("assistant", "call"):
        raise Unusable("no_last_answer")
    messages: list[dict[str, Any]] = []
    for at, (role, text) in enumerate(turns):
        before = messages[-1]["role"] if messages else None
        if role == "system":
            if at:
                raise Unusable("bad_order", "a system message after others")
            if text:
                messages.append({"role": "system", "content": text})
        elif role == "call":
            if before != "assistant" or messages[-1].get("tool_calls"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1]["tool_calls"] = read_calls(text)
        elif role == "tool" and not (before == "tool" or (before == "assistant" and messages[-1].get("tool_calls"))):
            raise Unusable("bad_order", "a tool's reply without a call")
        elif not text and role != "tool":
            raise Unusable("empty_turn")
        else:
            messages.append({"role": role, "content": text})
    _check_order(messages)
    return messages


def _check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises Unusable unless users and assistants take turns, and each call but the last has a reply."""
    turns = [message for message in messages if message["role"] != "system"]
    if not turns or turns[0]["role"] != "user":
        raise Unusable("bad_order", "the user does not begin")
    for message, following in itertools.pairwise(turns):
        role, then = message["role"], following["role"]
        called = bool(message.get("tool_calls"))
        allowed = {
            "user": ("assistant",),
            "tool": ("tool", "assistant"),
            "assistant": ("tool",) if called else ("user",),
        }
        if then not in allowed[role]:
            raise Unusable("bad_order", f"{then} after {role}{' with calls' if called else ''}")


def _conversation(
    source: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], place: Place
) -> Conversation:
    """Returns the conversation. Raises Unusable where a tool is called that is not shown."""
    names = {tool["function"]["name"] for tool in tools}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in names:
                raise Unusable("unknown_tool", call["function"]["name"])
    text = _dump(tools) if tools else ""
    return Conversation(id=place.id, index=place.index, source=source, messages=messages, tools=text)


def _schemas(tools: Any) -> list[dict[str, Any]]:
    """Returns tools in OpenAI's form, as a chat template shows them. Raises Unusable."""
    if not isinstance(tools, list):
        raise Unusable("bad_tools", "no list")
    schemas = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unusable("bad_tools", f"no name in {tool!r}"[:200])
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        schema = {"name": function["name"], "description": function.get("description") or ""}
        schemas.append({"type": "function", "function": {**schema, "parameters": _with_types(parameters)}})
    return schemas


def _with_types(value: Any) -> Any:
    """Returns a JSON schema with JSON's names of types in place of Python's."""
    if isinstance(value, list):
        return [_with_types(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    named = {name: _with_types(part) for name, part in value.items()}
    return {**named, "type": _TYPES[kind]} if isinstance(kind, str) and kind in _TYPES else named


def _json_list(text: str) -> Any:
    if not text.strip():
        return []
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable("bad_tools", str(error)) from error


def _json_calls(text: str) -> list[dict[str, Any]]:
    """Reads calls that are written as a JSON object or a list of objects. Raises Unusable."""
    try:
        calls = json.loads(text)
        calls = calls if isinstance(calls, list) else [calls]
        pairs = [(call["name"], call["arguments"]) for call in calls]
        pairs = [(name, json.loads(given) if isinstance(given, str) else given) for name, given in pairs]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unusable("bad_call", f"{error!r} in {text}"[:200]) from error
    if not pairs:
        raise Unusable("bad_call", text[:200])
    return [_call(name, arguments) for name, arguments in pairs]


def python_calls(text: str) -> list[dict[str, Any]]:
    """Reads calls that are written as [name(argument=value, ...), ...]; a name may hold spaces. Raises Unusable.

    >>> [call["function"] for call in python_calls('[Get Time(zone="UTC", at=[1, 2]), stop()]')]
    [{'name': 'Get Time', 'arguments': '{"zone": "UTC", "at": [1, 2]}'}, {'name': 'stop', 'arguments': '{}'}]
    """
    body = text.strip()
    if not (body.startswith("[") and body.endswith("]")):
        raise Unusable("bad_call", text[:200])
    calls, rest = [], body[1:-1].strip()
    while rest:
        name, bracket, after = rest.partition("(")
        if not bracket or not name.strip():
            raise Unusable("bad_call", text[:200])
        arguments, rest = _arguments(after, text)
        calls.append(_call(name.strip(), arguments))
        rest = rest.lstrip()
        if rest and not rest.startswith(","):
            raise Unusable("bad_call", text[:200])
        rest = rest[1:].lstrip()
    if not calls:
        raise Unusable("bad_call", text[:200])
    return calls


def _arguments(after: str, text: str) -> tuple[dict[str, Any], str]:
    """Reads the arguments before the first bracket that closes the call, and returns what follows it too."""
    for bracket in re.finditer(r"\)", after):
        try:
            call = ast.parse(f"f({after[: bracket.start()]})", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # this bracket stands in a string or closes an inner one
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            break
        try:
            return {word.arg: _literal(word.value) for word in call.keywords if word.arg}, after[bracket.end() :]
        except ValueError as error:
            raise Unusable("bad_call", f"{error}: {text}"[:200]) from error
    raise Unusable("bad_call", text[:200])


def _literal(node: ast.expr) -> Any:
    """Reads a literal of Python or of JSON. Raises ValueError."""
    names = {"true": True, "false": False, "null": None}

    class Names(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant(names[name.id]) if name.id in names else name

    return ast.literal_eval(Names().visit(node))


def _call(name: Any, arguments: Any) -> dict[str, Any]:
    """Raises Unusable."""
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise Unusable("bad_call", f"{name!r} with {arguments!r}"[:200])
    try:
        text = _dump(arguments)
    except (TypeError, ValueError) as error:
        raise Unusable("bad_call", f"{error}: {arguments!r}"[:200]) from error
    return {"type": "function", "function": {"name": name, "arguments": text}}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
