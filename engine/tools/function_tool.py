"""Makes a plain function a tool: the model is shown its name, docstring and signature.

async def weather(city: str, days: int = 1) -> str:
    '''Tells the weather of a city.

    Args:
        city: its name in English
    '''
    ...

rollouts = job.rollouts([weather])
"""

from __future__ import annotations

import inspect
import json
import logging
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import docstring_parser
import msgspec
from docstring_parser import Docstring

from engine.ports import StatefulTool, Tool, ToolReply
from engine.user_parts import WrongPart, place_of

log = logging.getLogger(__name__)


class FunctionTool:
    """A tool made of a typed function, `def` or `async def`.

    The model is shown the first paragraph of the docstring and a schema of the parameters. What the docstring says of
    a parameter (in the style of Google, NumPy or Sphinx), or `Annotated[str, "what it is"]`, describes it. The model
    reads as errors which arguments do not fit, and what the function raises. The function returns a ToolReply, text, or
    a value that JSON can express. Raises WrongPart for a parameter without a type.

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Adds two numbers.'''
    ...     return a + b
    >>> FunctionTool(add).parameters["properties"]
    {'a': {'type': 'integer'}, 'b': {'type': 'integer', 'default': 0}}
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not function.__name__.isidentifier():
            raise WrongPart(f"the tool {place_of(function)} has no name. Fix: def, by whose name the model calls it")
        self.name = function.__name__
        self.__wrapped__ = function
        doc = _parsed(function)
        self.description = _one_line((doc.description or "").partition("\n\n")[0])
        self._function = function
        self._arguments = _arguments_of(function, {each.arg_name: _one_line(each.description) for each in doc.params})
        try:
            _, types = msgspec.json.schema_components([self._arguments], ref_template="#/$defs/{name}")
        except TypeError as error:
            raise WrongPart(f"the tool {place_of(function)} cannot be described to the model: {error}") from error
        shown = {key: value for key, value in types.pop(self._arguments.__name__).items() if key != "title"}
        shown.setdefault("required", [])
        self.parameters: Mapping[str, Any] = {**shown, "$defs": types} if types else shown
        self._has_failed = False

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        try:
            given = msgspec.convert(dict(arguments), self._arguments)
        except msgspec.ValidationError as error:
            return ToolReply(outcome="error", text=f"TypeError: {error}", executed=False)
        try:
            answer = self._function(**msgspec.structs.asdict(given))
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            self._note(error)
            return ToolReply(outcome="error", text=f"{type(error).__name__}: {error}")
        return answer if isinstance(answer, ToolReply) else ToolReply(outcome="ok", text=self._text(answer))

    def _text(self, answer: Any) -> str:
        """Returns the answer as text. Raises WrongPart for one that is neither text nor JSON."""
        if isinstance(answer, str):
            return answer
        try:
            if answer is not None:
                return json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError):
            pass
        raise WrongPart(
            f"the tool {place_of(self._function)} answered {answer!r:.100}. Fix: return text, what JSON can say, or a "
            "ToolReply"
        )

    def _note(self, error: Exception) -> None:
        """Logs the first failure: it may be a bug, which only the model would see otherwise."""
        if not self._has_failed:
            self._has_failed = True
            log.warning(
                "the tool %s raised %s: %s; the model reads it as an error, and later ones are not named",
                place_of(self._function),
                type(error).__name__,
                error,
            )


def as_tools(given: Sequence[Tool | StatefulTool | Callable[..., Any]]) -> list[Tool | StatefulTool]:
    """Returns the tools, with a FunctionTool for each plain function."""
    tools: list[Tool | StatefulTool] = []
    for tool in given:
        made: Any = FunctionTool(tool) if inspect.isroutine(tool) else tool
        tools.append(made)
    return tools


def _parsed(function: Callable[..., Any]) -> Docstring:
    text = inspect.getdoc(function) or ""
    try:
        return docstring_parser.parse(text)
    except Exception:  # a docstring in no known style raises nothing narrower than IndexError
        doc = Docstring()
        doc.short_description = text
        return doc


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _arguments_of(function: Callable[..., Any], docs: Mapping[str, str]) -> type[msgspec.Struct]:
    """Returns a struct with a field for each parameter. docs: their descriptions by name. Raises WrongPart."""
    whose = f"the tool {place_of(function)}"
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise WrongPart(f"{whose}: {error}. Fix: import the type where the function is defined") from error
    fields: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise WrongPart(f"{whose} has a parameter {parameter}. Fix: give each parameter a name and a type")
        if name not in hints:
            raise WrongPart(
                f"{whose} has no type for {name!r}, by which the model is told what to write. Fix: give one"
            )
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, _described(hints[name], docs.get(name, "")), *default))
    try:
        return msgspec.defstruct(function.__name__, fields, kw_only=True, forbid_unknown_fields=True)
    except (TypeError, ValueError) as error:
        raise WrongPart(f"{whose} cannot be described to the model: {error}") from error


def _described(hint: Any, doc: str) -> Any:
    """Returns the type with a description: the text of `Annotated[str, "what it is"]`, or `doc` without one."""
    notes = [note for note in typing.get_args(hint)[1:] if isinstance(note, str)]
    text = " ".join(notes) if typing.get_origin(hint) is typing.Annotated and notes else doc
    return typing.Annotated[hint, msgspec.Meta(description=text)] if text else hint
