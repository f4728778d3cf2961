"""Makes a call of Python that fails, and the reply that a rollout gives to it.

The call is one that would have worked, with one of the mistakes that the tiny agent learns (recipes/tiny/task.py):

    print(b         SyntaxError: '(' was never closed
    print(total)    NameError: name 'total' is not defined
    ...}            FormatError: the JSON of the call lacks its last brace

Promises
- Nothing is executed. The errors are written as CPython 3.11 and later print them; a test compares them with the jail.
- The protocol decides the words of the reply, as in a rollout.
"""

from __future__ import annotations

import json
import random

from engine.rollout.tool_call_parser import CLOSE, OPEN, MalformedCall, ToolCallParser
from engine.tools.python_feedback import joined
from recipes.rstar2.parts.preparation.rows import Message
from recipes.rstar2.parts.sampling.protocol import Protocol
from sandbox.wire import ToolResult

KINDS = {"syntax": 0.4, "name": 0.4, "json": 0.2}  # the tiny agent's malformed calls are as rare
UNDEFINED = ("total", "result", "answer")  # names so unlike Python's own that it suggests none
PROGRAM = "/tmp/main.py"  # where the sandbox runs a program


def calling(reason: str, code: str, protocol: Protocol) -> Message:
    """Returns the assistant's turn that runs this code after a sentence of reasoning."""
    name = protocol.schema(stateful=False)["function"]["name"]
    call = {"type": "function", "function": {"name": name, "arguments": _arguments(code)}}
    return {"role": "assistant", "content": _reasoned(reason), "tool_calls": [call]}


def replying(code: str, result: ToolResult, protocol: Protocol) -> Message:
    """Returns the message with what the protocol tells of a call."""
    told = protocol.feedback(code, result)
    return {"role": "tool", "content": joined(protocol.cut(told.output, protocol.reply_chars), told.note)}


def failing(reason: str, code: str, protocol: Protocol, rng: random.Random) -> tuple[Message, Message]:
    """Returns a turn whose call fails, and its reply. code: a program whose last line is `print(...)` of a name."""
    (kind,) = rng.choices(tuple(KINDS), tuple(KINDS.values()))
    if kind == "json":
        return _malformed(reason, code, protocol)
    lines = code.split("\n")
    if kind == "syntax":
        lines[-1] = lines[-1].removesuffix(")")
        error = f"{_frame(lines, '')}\n         ^\nSyntaxError: '(' was never closed"
    else:
        name = rng.choice(UNDEFINED)
        lines[-1] = f"print({name})"
        carets = " " * 10 + "^" * len(name)
        error = (
            f"Traceback (most recent call last):\n{_frame(lines, ', in <module>')}\n{carets}\n"
            f"NameError: name '{name}' is not defined"
        )
    broken = "\n".join(lines)
    result = ToolResult(outcome="error", stderr=error + "\n", exit_code=1)
    return calling(reason, broken, protocol), replying(broken, result, protocol)


def _frame(lines: list[str], within: str) -> str:
    """Returns the last line as a traceback shows it."""
    return f'  File "{PROGRAM}", line {len(lines)}{within}\n    {lines[-1]}'


def _malformed(reason: str, code: str, protocol: Protocol) -> tuple[Message, Message]:
    """Returns a turn whose call lacks a brace. It is written as text, since `tool_calls` are well formed."""
    name = json.dumps(protocol.schema(stateful=False)["function"]["name"])
    text = f'{OPEN}\n{{"name": {name}, "arguments": {_arguments(code)}\n{CLOSE}'
    [read] = ToolCallParser().feed(text)
    assert isinstance(read, MalformedCall)
    turn = {"role": "assistant", "content": f"{_reasoned(reason)}\n{text}"}
    return turn, {"role": "tool", "content": f"FormatError: {read.reason}"}


def _arguments(code: str) -> str:
    return json.dumps({"code": code, "input": ""}, ensure_ascii=False)


def _reasoned(reason: str) -> str:
    return f"<reason> {reason} </reason>"
