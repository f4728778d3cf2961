"""`field=value` on the command line for a recipe's frozen configuration.

Promises
- A value has the field's declared type, or the program ends with exit code 2 and one line naming field and value.
- An unknown name ends it likewise, naming the field that is meant where there is one.
- A path may begin with `~`.
- `--help` lists every field with its type, default and doc. `--field value` and `--field=value` mean `field=value`.

    @dataclass(frozen=True)
    class Config:
        steps: Annotated[int, "optimizer steps"] = 40

    config = parse(Config, ["steps=10"])

The text in `Annotated` is the doc; every field has a default.
Types: int, float, bool, str, Path, Literal, `X | None` ("none"), and tuples of these ("1,2,3").
"""

from __future__ import annotations

import difflib
import math
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

Config = TypeVar("Config")

# What others call it: the fields that may be meant. None is meant where it is empty, whatever looks like it.
_ALIASES: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "model": ("checkpoint",),
    "model_path": ("checkpoint",),
    "batch_size": ("prompts_per_step",),
    "train_batch_size": ("prompts_per_step",),
    "g": ("group_size",),
    "n": ("group_size",),
    "num_generations": ("group_size",),
    "epochs": ("steps",),
    "max_steps": ("steps",),
    "gpus": ("devices",),
    "num_gpus": ("devices",),
    "output_dir": ("runs", "output", "folder"),
    "max_length": ("max_tokens",),
    **dict.fromkeys(("dataset", "kl", "kl_coef", "loss", "temperature", "wandb"), ()),
}
_NEAR = 0.6  # of difflib: what is less alike is no typing error

_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(config_class: type[Config], argv: Sequence[str]) -> Config:
    """The configuration with the overrides of argv applied. Exits with code 0 after `--help` and 2 on a wrong option.

    A ValueError raised by the configuration's own `__post_init__` is such a wrong option too.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        print(usage(config_class))
        sys.exit(0)
    try:
        return config_class(**_overrides(config_class, argv))
    except ValueError as error:
        _refuse(str(error))


def usage(config_class: type[Any]) -> str:
    """What `--help` prints."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    lines = [f"usage: python {sys.argv[0]} [field=value ...]", ""]
    for item in fields(config_class):
        kind, doc = _documented(hints[item.name])
        lines.append(f"  {item.name}: {type_name(kind)}, default {_show(item.default)}")
        lines += [f"      {doc}"] if doc else []
    return "\n".join(lines)


def overrides(config_class: type[Any], values: Mapping[str, Any]) -> list[str]:
    """The words that make this configuration: `field=value` for each that differs from its default.

    The values may have come through JSON, which has no tuples and no paths.
    """
    given = [
        (item.name, _show(item.default), _show(values[item.name]))
        for item in fields(config_class)
        if item.name in values
    ]
    return [f"{name}={value}" for name, default, value in given if value != default]


def convert(text: str, kind: Any) -> Any:
    """Text as a value of a type. Raises ValueError when it is none, OverflowError for an int of more than 64 bits."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        by_text = {str(value): value for value in arguments}
        if text not in by_text:
            raise ValueError(text)
        return by_text[text]
    if origin in (typing.Union, types.UnionType):
        return _convert_union(text, arguments)
    if origin is tuple:
        parts = [part.strip() for part in text.strip("()[]").split(",") if part.strip()]
        kinds = [arguments[0]] * len(parts) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(convert(part, kind) for part, kind in zip(parts, kinds, strict=True))
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError(text)
        return _BOOLS[text.lower()]
    if kind is float and not math.isfinite(float(text)):
        raise ValueError(text)
    if kind is int and not -(1 << 63) <= int(text) < 1 << 63:  # later msgspec says so, of larger ones, without a name
        raise OverflowError(text)
    if kind is Path:  # not every shell knows "~" here, make's does not
        return Path(os.path.expanduser(text))
    if kind in (int, float, str):
        return kind(text)
    raise TypeError(f"no command-line form for {kind}")


def _convert_union(text: str, kinds: Sequence[Any]) -> Any:
    if type(None) in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        if kind is not type(None):
            try:
                return convert(text, kind)
            except ValueError:
                continue
    raise ValueError(text)


def type_name(kind: Any) -> str:
    """A type as a user would write it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        return "none"
    if kind is Ellipsis:
        return "..."
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(type_name, arguments))
    if origin is tuple:
        return f"tuple[{', '.join(map(type_name, arguments))}]"
    return str(getattr(kind, "__name__", kind))


def _overrides(config_class: type[Any], argv: Sequence[str]) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    known = [item.name for item in fields(config_class)]
    given: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_") if word.startswith("--") else name
        if name not in known:
            raise ValueError(f"unknown field {name!r}{_hint(name, known)} (--help lists all)")
        if not equals:
            value = next(words, None) if word.startswith("--") else None
            if value is None:
                raise ValueError(f"field {name!r} has no value; write {name}=value")
            text = value
        if name in given:
            raise ValueError(f"field {name!r} is given twice")
        try:
            given[name] = convert(text, hints[name])
        except ValueError:
            raise ValueError(f"field {name!r} takes {type_name(hints[name])}, not {text!r}") from None
        except OverflowError:
            raise ValueError(f"field {name!r} takes numbers of 64 bits, not {text!r}") from None
    return given


def _hint(name: str, known: Sequence[str]) -> str:
    """Which field is meant by a name that is none, if one can be."""
    aliases = _ALIASES.get(name.lower())
    if aliases is None:
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
        return f"; the nearest is {near[0]!r}" if near else ""
    meant = [field for field in aliases if field in known]
    return f"; here it is {meant[0]!r}" if meant else ""


def _documented(hint: Any) -> tuple[Any, str]:
    """The type and the doc of a field's annotation."""
    if typing.get_origin(hint) is Annotated:
        kind, *notes = typing.get_args(hint)
        return kind, next((note for note in notes if isinstance(note, str)), "")
    return hint, ""


def _show(value: Any) -> str:
    """A default as it would be written on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
