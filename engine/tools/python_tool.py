"""Tools that the model can call: Python in the sandbox, and what the model reads of its result."""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import BadInput
from engine.ports import Session, SessionRunner, StatefulTool, Tool, ToolReply, ToolRunner, ToolSpec
from engine.tools.python_feedback import Feedback, joined, traceback_feedback
from sandbox.require import at_least, require
from sandbox.wire import Limits, ToolResult, encode_code

# "restored" has two meanings, and the note is true of both: the call's own effects were undone, or it ran on variables
# that had been lost and rebuilt before it.
NOTES = {"restored": "Note: variables were rebuilt from earlier calls.", "lost": "Note: all variables are gone."}


PYTHON_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "The code to run."},
        "input": {"type": "string", "description": "Text that the code can read from standard input."},
    },
    "required": ["code"],
}


def schema(tool: Tool | StatefulTool | ToolSpec) -> dict[str, Any]:
    """Returns what a chat template shows the model of a tool: a JSON schema in the form of OpenAI's function calls.

    It has the tool's `description` and `parameters` (a JSON schema). Without them the first paragraph of a docstring,
    of the class or of `__call__`, describes it, and a TypedDict as the type of `arguments` says what they are. Raises
    BadInput for a world, whose tools have schemas of their own.

    >>> class Clock:
    ...     '''Tells the time.'''
    ...     name = "clock"
    >>> schema(Clock())["function"]
    {'name': 'clock', 'description': 'Tells the time.', 'parameters': {'type': 'object', 'properties': {}}}
    """
    if not callable(tool) and getattr(tool, "tools", None) is not None:
        raise BadInput(f"{tool.name} is a world, and only rollouts open one. Fix: job.rollouts([...]), or give a tool")
    description, parameters = getattr(tool, "description", None), getattr(tool, "parameters", None)
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": _described(tool) if description is None else description,
            "parameters": _signature(tool) if parameters is None else parameters,
        },
    }


def _described(tool: Any) -> str:
    kind = type(tool)
    for docstring in (kind.__dict__.get("__doc__"), getattr(kind.__dict__.get("__call__"), "__doc__", None)):
        if docstring and not docstring.startswith(f"{kind.__name__}("):  # as a dataclass writes its own
            return " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    return ""


def _signature(tool: Any) -> dict[str, Any]:
    """Returns the parameters that the type of `arguments` names; none if it is not a TypedDict."""
    hint: Any = None
    with suppress(AttributeError, NameError):  # a stateful tool; a type that is imported for a type checker only
        hint = typing.get_type_hints(type(tool).__call__).get("arguments")
    if not typing.is_typeddict(hint):
        return {"type": "object", "properties": {}}
    _, types = msgspec.json.schema_components([hint], ref_template="#/$defs/{name}")
    shown = {key: value for key, value in types.pop(hint.__name__).items() if key != "title"}
    return {**shown, "$defs": types} if types else shown


def clip(text: str, limit: int) -> str:
    """Returns at most `limit` characters of a text, the middle replaced by a mark.

    >>> clip("a" * 30 + "b" * 30, 20)
    'aaaaaaa [...] bbbbbb'
    """
    if len(text) <= limit:
        return text
    mark = " [...] "
    head = (limit - len(mark) + 1) // 2
    tail = limit - len(mark) - head
    return text[:head] + mark + text[len(text) - tail :]


def clip_outside(text: str, limit: int, mark: str = "...(truncated)...") -> str:
    """Returns the first and the last `limit` / 2 characters with a mark between them, as verl cuts.

    The mark is not counted.

    >>> clip_outside("a" * 30 + "b" * 30, 20)
    'aaaaaaaaaa...(truncated)...bbbbbbbbbb'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return text[:half] + mark + text[-half:]


Cut = Callable[[str, int], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """How the model reads a result."""

    feedback: Feedback
    output_chars: int
    cut: Cut

    def __post_init__(self) -> None:
        require("output_chars", self.output_chars, at_least(20))

    def reply(self, code: str, result: ToolResult) -> ToolReply:
        told = self.feedback(code, result)
        text = joined(self.cut(told.output, self.output_chars), told.note, NOTES.get(result.session_state or ""))
        return ToolReply(outcome=result.outcome, text=text, jailed=result.jailed, queue_s=result.queue_s)


class PythonTool:
    """Runs `arguments["code"]` (with `arguments["input"]` on stdin, if given) and answers with what it printed, and
    with what ended it where that was an error or a limit.

    name is what the model calls it; output_chars bounds what the model reads. cut: how a longer text is cut, called
    with it and output_chars. display: also answers with what a notebook would display, the value of a last expression.
    feedback: what the model is told of a call (`engine.tools.python_feedback`); default: the traceback of an error.
    """

    description = "Runs Python code in a sandbox and answers with what it prints, or with its error."
    parameters = PYTHON_PARAMETERS

    def __init__(
        self,
        runner: ToolRunner,
        name: str = "python",
        limits: Limits | None = None,
        output_chars: int = 1000,
        *,
        display: bool = False,
        cut: Cut = clip,
        feedback: Feedback = traceback_feedback,
    ) -> None:
        self.name = name
        self._runner = runner
        self._display = display
        self._limits = limits
        self._reader = _Reader(feedback=feedback, output_chars=output_chars, cut=cut)

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        given = _code_and_input(arguments)
        if isinstance(given, ToolReply):
            return given
        code, stdin = given
        result = await self._runner.run(code, stdin, self._limits, display=self._display)
        return self._reader.reply(code, result)


class PythonSessions:
    """A StatefulTool: as PythonTool with display, but the calls of one trajectory share their variables, as the cells
    of a notebook do. Calls of one turn run one after the other.

    When a limit or a lost machine has cost the session its variables, the model reads one of NOTES.
    """

    description = (
        "Runs Python code as a cell of a notebook, and answers with what it prints and the value of its last "
        "expression, or with its error. Variables are kept from call to call."
    )
    parameters = PYTHON_PARAMETERS

    def __init__(
        self,
        runner: SessionRunner,
        name: str = "python",
        limits: Limits | None = None,
        output_chars: int = 1000,
        *,
        cut: Cut = clip,
        feedback: Feedback = traceback_feedback,
    ) -> None:
        self.name = name
        self._runner = runner
        self._limits = limits
        self._reader = _Reader(feedback=feedback, output_chars=output_chars, cut=cut)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Tool]:
        async with self._runner.session() as session:
            yield _SessionTool(self.name, session, self._limits, self._reader)


@dataclass(slots=True)
class _SessionTool:
    """The tool of one trajectory."""

    name: str
    session: Session
    limits: Limits | None
    reader: _Reader

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        given = _code_and_input(arguments)
        if isinstance(given, ToolReply):
            return given
        code, stdin = given
        result = await self.session.run(code, stdin, self.limits)
        return self.reader.reply(code, result)


def _code_and_input(arguments: Mapping[str, Any]) -> tuple[str, str] | ToolReply:
    """Returns the code and its standard input, or the reply to arguments that no sandbox takes."""
    code = arguments.get("code")
    stdin = arguments.get("input", "")
    if not isinstance(code, str) or not isinstance(stdin, str):
        return ToolReply(outcome="error", text="TypeError: 'code' and 'input' must be strings", executed=False)
    try:
        encode_code(code)
    except ValueError as error:
        return ToolReply(outcome="error", text=f"ValueError: {error}", executed=False)
    return code, stdin
