"""Converts the values of options to text and back.

Types: int, float, bool, str, Path, Literal, `X | None` ("none"), and tuples of these ("1,2,3").
"""

from __future__ import annotations

import math
import os
import types
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec

_UNIONS = (typing.Union, types.UnionType)


def has_form(kind: Any) -> bool:
    """Returns whether a type has a form on the command line."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return True
    if origin in _UNIONS:
        return all(part is type(None) or has_form(part) for part in arguments)
    if origin is tuple:
        return all(part is Ellipsis or has_form(part) for part in arguments)
    return kind in (int, float, bool, str, Path)


def convert(text: str, kind: Any) -> Any:
    """Returns text as a value of a type. Raises ValueError if it is none, OverflowError for an int above 64 bits."""
    arguments = typing.get_args(kind)
    if type(None) in arguments:
        if text.lower() == "none":
            return None
        return convert(text, typing.Union[tuple(part for part in arguments if part is not type(None))])  # noqa: UP007
    if typing.get_origin(kind) is tuple:
        parts = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
        kinds = [arguments[0]] * len(parts) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(convert(part, kind) for part, kind in zip(parts, kinds, strict=True))
    value = msgspec.convert(text, kind, strict=False, dec_hook=_path)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(text)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # msgspec could not write it into a message
        raise OverflowError(text)
    return value


def _path(kind: type[Path], text: str) -> Path:
    return kind(os.path.expanduser(text))  # some shells, such as make's, expand no "~" within a word


def type_name(kind: Any) -> str:
    """Returns the name of a type, as a user would write it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        return "none"
    if kind is Ellipsis:
        return "..."
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in _UNIONS:
        return "|".join(map(type_name, arguments))
    if origin is tuple:
        return f"tuple[{', '.join(map(type_name, arguments))}]"
    return str(getattr(kind, "__name__", kind))


def show(value: Any) -> str:
    """Returns a value as it would be written on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
