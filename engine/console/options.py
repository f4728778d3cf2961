"""`field=value` on the command line for a recipe's frozen configuration.

Promises
- A value has the field's declared type, or the program ends with exit code 2 and one line naming field and value.
- An unknown name ends it likewise, naming the field that is meant where there is one.
- A path may begin with `~`.
- `--help` lists every field with its type, default and doc. `--field value` and `--field=value` mean `field=value`.
- A field of a configuration within the configuration is named with dots, `learner.lora_rank=32`; its last name is
  enough where only one field has it, `lora_rank=32`.

    @dataclass(frozen=True)
    class Config:
        steps: Annotated[int, "optimizer steps"] = 40

    config = parse(Config, ["steps=10"])

The text in `Annotated`, or the string below a field, is the doc; every field has a default. A class that gives an
inherited field another default, `steps: int = 100`, inherits its doc; its own fields are listed first.
Types: int, float, bool, str, Path, Literal, `X | None` ("none"), tuples of these ("1,2,3"), and frozen dataclasses of
these. A field of another type cannot be set from the command line.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from sandbox.printable import printable

Config = TypeVar("Config")

# What others call it: the fields that may be meant. None is meant where it is empty, whatever looks like it.
_ALIASES: dict[str, tuple[str, ...]] = {
    "learning_rate": ("learner.lr",),
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
    "max_length": ("rollout.max_tokens", "max_tokens"),
    **dict.fromkeys(("dataset", "kl", "kl_coef", "loss", "temperature", "wandb"), ()),
}
_NEAR = 0.6  # of difflib: what is less alike is no typing error

_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(config_class: type[Config], argv: Sequence[str]) -> Config:
    """The configuration with the overrides of argv applied. Exits with code 0 after `--help` and 2 on a wrong option.

    A ValueError raised by the configuration's own `__post_init__` is such a wrong option too.
    """
    [config] = parse_all([config_class], argv)
    return typing.cast(Config, config)


def parse_all(config_classes: Sequence[type[Any]], argv: Sequence[str]) -> list[Any]:
    """As `parse`, for several configurations that share a command line: each takes the fields that it has."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(usage(*config_classes))
        sys.exit(0)
    try:
        known = {option.name: option for config in config_classes for option in _options(config)}
        given = _overrides(known, argv)
        return [_build(config, given) for config in config_classes]
    except ValueError as error:
        _refuse(str(error))


def usage(*config_classes: type[Any]) -> str:
    """What `--help` prints."""
    lines = [f"usage: python {sys.argv[0]} [field=value ...]", ""]
    shared = {item.name for item in fields(Machines)}  # that few runs need: last
    listed = [(config_class, option) for config_class in config_classes for option in _options(config_class)]
    for last in (False, True):
        for option in [option for owner, option in listed if (owner is Invocation and option.name in shared) is last]:
            lines.append(f"  {option.name}: {type_name(option.kind)}, default {_show(option.default)}")
            lines += [f"      {option.doc}"] if option.doc else []
    return "\n".join(lines)


def overrides(config_class: type[Any], values: Mapping[str, Any]) -> list[str]:
    """The words that make this configuration: `field=value` for each that differs from its default.

    values: as `flat` gives them, perhaps come through JSON, which has no tuples and no paths.
    """
    given = [option for option in _options(config_class) if option.name in values]
    shown = [(option.name, _show(values[option.name]), _show(option.default)) for option in given]
    return [f"{name}={value}" for name, value, default in shown if value != default]


def flat(config: Any) -> dict[str, Any]:
    """Every field that the command line can set, by the name that it has there, with its value."""
    return {option.name: option.default for option in _options(type(config), config)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Who takes part in a run beside this machine."""

    nodes: Annotated[str | None, "address where rollout nodes may join, tcp://0.0.0.0:5700; none: this machine"] = None
    nodes_keys: Annotated[Path | None, "folder of `python -m sandbox.keys`, for nodes on other machines"] = None
    nodes_only: Annotated[bool, "all groups are made on the nodes; the replicas here evaluate"] = False
    nodes_deltas: Annotated[bool, "nodes pull what has changed of the weights, for slow links"] = False
    learner_hosts: Annotated[int, "hosts of the learner's ranks, this one included; each has learner_ranks"] = 1
    learner_at: Annotated[str | None, "this machine's HOST:PORT where the learner's hosts meet, lead:29400"] = None
    dry_run: Annotated[bool, "print what each machine would run, and end"] = False

    def __post_init__(self) -> None:
        if self.nodes is None and (self.nodes_only or self.nodes_keys is not None):
            raise ValueError("nodes must be an address where nodes_only or nodes_keys is given, got none")
        if self.learner_hosts < 1:
            raise ValueError(f"learner_hosts must be at least 1, got {self.learner_hosts}")
        if self.learner_hosts > 1 and self.nodes is None:
            raise ValueError("nodes must be an address where learner_hosts is above 1: the other hosts come to it")
        if (self.learner_hosts > 1) != (self.learner_at is not None):
            raise ValueError(
                f"learner_at must be HOST:PORT with learner_hosts above 1, and only then, got {self.learner_at}"
            )
        if self.learner_at is not None and not re.fullmatch(r"[^:/]+:\d+", self.learner_at):
            raise ValueError(f"learner_at must be HOST:PORT, got {self.learner_at!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Invocation(Machines):
    """What every recipe takes beside its own configuration: where its run is written, and who takes part."""

    name: Annotated[str, "folder of the run under runs/; the recipe's own name by default"] = ""
    runs: Annotated[Path, "where runs are written"] = Path("runs")
    fresh: Annotated[bool, "a new run, also when the last one of that name did not end and could be resumed"] = False

    def __post_init__(self) -> None:
        Machines.__post_init__(self)  # super() does not know the class that slots=True makes
        if self.name == ".." or Path(self.name).name != self.name:
            raise ValueError(f"name must be that of a folder, got {self.name!r}")

    def named(self, program: str) -> Invocation:
        """With a name where none was given."""
        return self if self.name else dataclasses.replace(self, name=program)


@dataclass(frozen=True, slots=True)
class _Option:
    """A field that can be set. name: with dots where it is a field of a field."""

    name: str
    kind: Any
    default: Any
    doc: str


def _options(config_class: type[Any], default: Any = None, prefix: str = "") -> Iterator[_Option]:
    """Yields all that can be set. default: an instance of the class; None: its own defaults."""
    docs = _docs_of(config_class)
    for item in _most_derived_first(config_class):
        kind, _ = _documented(_hint_of(config_class, item.name))
        value = getattr(default, item.name) if default is not None else _default_of(item)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _options(type(value), value, f"{prefix}{item.name}.")
        elif _has_form(kind):
            yield _Option(f"{prefix}{item.name}", kind, value, docs.get(item.name, ""))


def _most_derived_first(config_class: type[Any]) -> list[dataclasses.Field[Any]]:
    """The fields, a class's own before those that it inherits: they are what the recipe is about."""
    order = list(dict.fromkeys(name for owner in config_class.__mro__ for name in _annotations(owner)))
    return sorted(fields(config_class), key=lambda item: order.index(item.name))


def _annotations(owner: type[Any]) -> dict[str, Any]:
    return vars(owner).get("__annotations__", {})


def _default_of(item: dataclasses.Field[Any]) -> Any:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else None


def _hint_of(config_class: type[Any], name: str) -> Any:
    """The type of a field; None where its module does not know it while it runs (an import for type checkers only)."""
    for owner in config_class.__mro__:
        if name in _annotations(owner):
            try:
                return eval_hint(_annotations(owner)[name], vars(sys.modules[owner.__module__]))
            except NameError:
                return None
    return None


def eval_hint(text: Any, namespace: Mapping[str, Any]) -> Any:
    """An annotation as a type."""
    if not isinstance(text, str):
        return text
    holder = types.new_class("holder")
    holder.__annotations__ = {"field": text}
    return typing.get_type_hints(holder, dict(namespace), include_extras=True)["field"]


def _docs_of(config_class: type[Any]) -> dict[str, str]:
    """The doc of each field: that of the most derived class that documents it."""
    docs: dict[str, str] = {}
    for owner in reversed(config_class.__mro__):
        if not is_dataclass(owner):
            continue
        docs |= _docs_below(owner)
        for name in _annotations(owner):
            if doc := _documented(_hint_of(owner, name))[1]:
                docs[name] = doc
    return docs


def _docs_below(config_class: type[Any]) -> dict[str, str]:
    """The strings that stand below the fields of a class."""
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    except (OSError, SyntaxError, ValueError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _has_form(kind: Any) -> bool:
    """Whether a type has a form on the command line."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return True
    if origin in (typing.Union, types.UnionType):
        return all(part is type(None) or _has_form(part) for part in arguments)
    if origin is tuple:
        return all(part is Ellipsis or _has_form(part) for part in arguments)
    return kind in (int, float, bool, str, Path)


def _build(config_class: type[Any], given: Mapping[str, Any]) -> Any:
    """The configuration with the given fields, in each configuration within it all at once."""
    values = {}
    for item in fields(config_class):
        default = _default_of(item)
        below = {name.partition(".")[2]: value for name, value in given.items() if name.startswith(f"{item.name}.")}
        if item.name in given:
            values[item.name] = given[item.name]
        elif below and is_dataclass(default):
            values[item.name] = _replace(default, below, item.name)
    return config_class(**values)


def _replace(config: Any, given: Mapping[str, Any], where: str) -> Any:
    values = {name: value for name, value in given.items() if "." not in name}
    for name in {name.partition(".")[0] for name in given if "." in name}:
        below = {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{name}.")}
        values[name] = _replace(getattr(config, name), below, f"{where}.{name}")
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


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


def _overrides(known: Mapping[str, _Option], argv: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        typed, equals, text = word.removeprefix("--").partition("=")
        typed = typed.replace("-", "_") if word.startswith("--") else typed
        name = _resolve(typed, known)
        if not equals:
            value = next(words, None) if word.startswith("--") else None
            if value is None:
                raise ValueError(f"field {name!r} has no value; write {name}=value")
            text = value
        if name in given:  # as where a command is repeated with another value at its end
            print(printable(f"{name} is given twice; {name}={text} counts"), file=sys.stderr)
        kind = known[name].kind
        try:
            given[name] = convert(text, kind)
        except ValueError:
            raise ValueError(f"field {name!r} takes {type_name(kind)}, not {text!r}") from None
        except OverflowError:
            raise ValueError(f"field {name!r} takes numbers of 64 bits, not {text!r}") from None
    return given


def _resolve(typed: str, known: Mapping[str, _Option]) -> str:
    """The whole name of a field. Raises ValueError where there is none, or more than one."""
    if typed in known:
        return typed
    same = [name for name in known if name.endswith(f".{typed}")]
    if len(same) > 1:
        raise ValueError(f"field {typed!r} may be any of {', '.join(same)}; write one of them")
    if same:
        return same[0]
    raise ValueError(f"unknown field {typed!r}{_hint(typed, list(known))} (--help lists all)")


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
    print(printable(f"error: {message}"), file=sys.stderr)
    sys.exit(2)
