"""Calls a user's parts (rewards, tools), and names them in errors."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class WrongPart(ValueError):
    """A part of the user's does not do what it must. The message names part, file and line, and says what to do."""


async def call(what: str, part: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a part, which may be `async def` or `def`. what: its kind, for messages.

    Raises WrongPart for a part that does not take so many arguments, or that would end the process.
    """
    with no_exit(what, part):
        answer = _called(what, part, arguments)
        return await answer if inspect.isawaitable(answer) else answer


@contextmanager
def no_exit(what: str, part: Any) -> Iterator[None]:
    """Turns an exception that would end the process (`sys.exit()`, KeyboardInterrupt) into a WrongPart.

    Otherwise the run would end with the exit code of the part and without a message.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raised = f"{type(error).__name__}({', '.join(map(repr, error.args))})"
        raise WrongPart(
            f"the {what} {place_of(part)} raised {raised}, which would end the process. Fix: raise another "
            "exception, or return"
        ) from error


def _called(what: str, part: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return part(*arguments)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # a bug within the part, not in how it is called
        count = len(arguments)
        raise WrongPart(
            f"the {what} {place_of(part)} cannot be called with {count} argument{'s' * (count > 1)}: {error}. "
            "Fix: let it take them"
        ) from None


def place_of(part: Any) -> str:
    """Returns name, file and line of a function, or of the class of an object: "clean (mine.py:73)".

    >>> place_of(len)
    'len'
    """
    while isinstance(part, functools.partial):
        part = part.func
    part = getattr(part, "__wrapped__", part)  # a tool that was made from a function
    function = inspect.unwrap(part) if inspect.isroutine(part) else vars(type(part)).get("__call__")
    name = getattr(part, "__qualname__", type(part).__qualname__).rpartition("<locals>.")[2]
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def number(value: Any) -> float:
    """Returns a number of any kind (int, bool, numpy's, torch's) as a float.

    Raises ValueError for anything else, text included, and for a number that is not finite.

    >>> number(True)
    1.0
    """
    if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise ValueError(f"{value!r:.100} is no number")
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # such as an array of several
        raise ValueError(f"{value!r:.100} is no number: {error}") from error
    if not math.isfinite(converted):
        raise ValueError(f"{value!r:.100} is not finite")
    return converted
