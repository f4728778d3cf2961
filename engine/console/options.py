"""The options of a program: a frozen dataclass, whose fields are set on the command line by `field=value`.

Promises
- A value has the field's declared type, or the program ends with exit code 2 and one line naming field and value.
- An unknown name ends it likewise, and the line names the field that may be meant.
- There is one spelling: `--field value` ends the program with a line that shows `field=value`.
- A path may begin with `~`.
- `--help` lists every field with its type, default and doc.
- A field of a configuration within the configuration is named with dots, `learner.lora_rank=32`; its last name is
  enough where only one field has it, `lora_rank=32`.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        run: Annotated[Path, Positional("folder of the run")]
        steps: Annotated[int, "optimizer steps"] = 40

    options = parse(Options, ["runs/quickstart", "steps=10"], program="rocstar example", description=__doc__)

The text in `Annotated`, or the string below a field, is its doc. A class that gives an inherited field another default,
`steps: int = 100`, inherits its doc; its own fields are listed first. A field without a default is required.
`Positional` fields take the values that have no name, in the order of the fields; the last one may be a tuple, which
takes all that are left. A `Rest` field takes what is meant for another program: every `field=value` of no other field.
Types: those of `engine.console.values`, and frozen dataclasses of them. A field of another type cannot be set from the
command line.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, NoReturn, TypeVar, cast

from engine.console.values import convert, has_form, show, type_name
from sandbox.printable import printable

Config = TypeVar("Config")

_NEAR = 0.7  # similarity by difflib; less is no typing error
_MOST = 2  # fields that a hint names
_NAME = re.compile(r"[A-Za-z_][\w.-]*")  # an option's name stands before "="; a path with "=" in it has a "/" too
_WIDTH = 100  # columns of what `--help` prints


@dataclass(frozen=True, slots=True)
class Positional:
    """Marks a field that is given by its place, without its name."""

    doc: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Marks a `tuple[str, ...]` that takes each `field=value` whose name no other field has, as it was given."""

    doc: str


def parse(
    config_class: type[Config], argv: Sequence[str], *, program: str = "", description: str | None = ""
) -> Config:
    """Returns the configuration with the options of argv. Exits with code 0 after `--help` and 2 on a wrong option.

    A ValueError raised by the configuration's own `__post_init__` is such a wrong option too.
    program, description: for `usage`.
    """
    [config] = parse_all([config_class], argv, program=program, description=description)
    return typing.cast(Config, config)


def parse_all(
    config_classes: Sequence[type[Any]], argv: Sequence[str], *, program: str = "", description: str | None = ""
) -> list[Any]:
    """Does what `parse` does for several configurations that share a command line: each takes its own fields."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(usage(*config_classes, program=program, description=description))
        sys.exit(0)
    try:
        given = _given([option for config in config_classes for option in _options(config)], argv)
        return [_build(config, given) for config in config_classes]
    except ValueError as error:
        _refuse(str(error))


def usage(*config_classes: type[Any], program: str = "", description: str | None = "") -> str:
    """Returns what `--help` prints.

    program: how it is started, `rocstar view`; by default `python` and the script's name. description: its docstring,
    of which the first paragraph is shown.
    """
    options = [option for config_class in config_classes for option in _options(config_class)]
    positionals = [option for option in options if isinstance(option.note, Positional)]
    required = [option for option in options if option.is_required and option not in positionals]
    line = ["usage:", program or f"python {sys.argv[0]}", *map(_form, [*positionals, *required])]
    line += ["[field=value ...]"] if len(options) > len(positionals) + len(required) else []
    lines = [" ".join(line), ""]
    if about := inspect.cleandoc(description or "").partition("\n\n")[0]:
        lines += [about, ""]
    for option in positionals:
        lines += _described(option.name.upper(), option)
    for option in options:
        lines += _described(option.name, option) if option not in positionals else []
    return "\n".join(lines)


def _described(name: str, option: _Option) -> list[str]:
    doc = textwrap.wrap(option.doc, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if isinstance(option.note, Rest):
        return ["  field=value ...", *doc]
    default = "required" if option.is_required else f"default {show(option.default) or repr('')}"
    return [f"  {name}: {type_name(option.kind)}, {default}", *doc]


def overrides(config_class: type[Any], values: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that make this configuration: `field=value` for each that differs from its default.

    values: as `flat` gives them, perhaps come through JSON, which has no tuples and no paths.
    """
    given = [option for option in _options(config_class) if option.name in values]
    shown = [(option.name, show(values[option.name]), show(option.default)) for option in given]
    return [f"{name}={value}" for name, value, default in shown if value != default]


def names(config_class: type[Any]) -> set[str]:
    """Returns the names of every field that the command line can set."""
    return {option.name for option in _options(config_class)}


def flat(config: Any) -> dict[str, Any]:
    """Returns every field that the command line can set, by the name that it has there, with its value."""
    return {option.name: option.default for option in _options(type(config), config)}


@dataclass(frozen=True, slots=True)
class _Option:
    """A field that can be set. name: with dots for a field of a field. default: MISSING if it has none."""

    name: str
    kind: Any
    default: Any
    doc: str
    note: Positional | Rest | None = None

    @property
    def is_required(self) -> bool:
        return self.default is MISSING


def _options(config_class: type[Any], default: Any = None, prefix: str = "") -> Iterator[_Option]:
    """Yields all that can be set. default: an instance of the class; None: its own defaults."""
    notes = _notes_of(config_class)
    for item in _most_derived_first(config_class):
        kind, _ = _noted(_hint_of(config_class, item.name))
        value = getattr(default, item.name) if default is not None else _default_of(item)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _options(type(value), value, f"{prefix}{item.name}.")
        elif has_form(kind):
            name, note = f"{prefix}{item.name}", notes.get(item.name, "")
            if isinstance(note, str):
                yield _Option(name, kind, value, note)
            else:
                yield _Option(name, kind, value, note.doc, note)


def _most_derived_first(config_class: type[Any]) -> list[dataclasses.Field[Any]]:
    """Returns the fields, a class's own before those that it inherits, as the program is about its own."""
    order = list(dict.fromkeys(name for owner in config_class.__mro__ for name in _annotations(owner)))
    return sorted(fields(config_class), key=lambda item: order.index(item.name))


def _annotations(owner: type[Any]) -> dict[str, Any]:
    return vars(owner).get("__annotations__", {})


def _default_of(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _hint_of(config_class: type[Any], name: str) -> Any:
    """Returns the type of a field; None where its module imports the type for type checkers only."""
    owner = next(owner for owner in config_class.__mro__ if name in _annotations(owner))
    text = _annotations(owner)[name]
    if not isinstance(text, str):
        return text
    holder = types.new_class("holder")
    holder.__annotations__ = {"field": text}
    try:
        return typing.get_type_hints(holder, vars(sys.modules[owner.__module__]), include_extras=True)["field"]
    except NameError:
        return None


def _noted(hint: Any) -> tuple[Any, str | Positional | Rest]:
    """Returns the type of a field's annotation and the first note in it that is ours, "" without one."""
    if typing.get_origin(hint) is Annotated:
        kind, *notes = typing.get_args(hint)
        return kind, next((note for note in notes if isinstance(note, str | Positional | Rest)), "")
    return hint, ""


def _notes_of(config_class: type[Any]) -> dict[str, str | Positional | Rest]:
    """Returns each field's note, of the most derived class that has one."""
    notes: dict[str, str | Positional | Rest] = {}
    for owner in filter(is_dataclass, reversed(config_class.__mro__)):
        notes |= _docs_below(owner)
        for name in _annotations(owner):
            if note := _noted(_hint_of(owner, name))[1]:
                notes[name] = note
    return notes


@cache
def _docs_below(config_class: Hashable) -> dict[str, str]:
    """Returns the strings that stand below the fields of a class."""
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cast(type[Any], config_class)))).body
    except (OSError, SyntaxError, ValueError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def _build(config_class: type[Any], given: Mapping[str, Any]) -> Any:
    defaults = {item.name: _default_of(item) for item in fields(config_class)}
    own = {name: value for name, value in given.items() if name.partition(".")[0] in defaults}
    return config_class(**_changes(defaults.__getitem__, own, ""))


def _changes(default_of: Any, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns what a configuration is made with; all changes to one within it are made at once, as some need others."""
    values = {}
    for name, value in given.items():
        head, dot, _ = name.partition(".")
        if not dot:
            values[name] = value
        elif head not in values:
            below = {key.removeprefix(f"{head}."): each for key, each in given.items() if key.startswith(f"{head}.")}
            values[head] = _replace(default_of(head), below, f"{where}{head}")
    return values


def _replace(config: Any, given: Mapping[str, Any], where: str) -> Any:
    values = _changes(partial(getattr, config), given, f"{where}.")
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _given(options: Sequence[_Option], argv: Sequence[str]) -> dict[str, Any]:
    """Returns the values of argv by the whole names of their fields. Raises ValueError."""
    known = {option.name: option for option in options}
    positionals = [option for option in options if isinstance(option.note, Positional)]
    rest = next((option for option in options if isinstance(option.note, Rest)), None)
    given: dict[str, Any] = {}
    for number, argument in enumerate(argv):
        typed, equals, text = argument.partition("=")
        if argument.startswith("-") and argument != "-":
            raise ValueError(_without_dashes(argument, argv[number + 1 :], known))
        if not (equals and _NAME.fullmatch(typed)):
            _take(argument, positionals, known, given)
        elif rest is not None and not _candidates(typed, known):
            given[rest.name] = (*given.get(rest.name, ()), argument)
        else:
            name = _resolve(typed, known)
            if name in given:  # as when a command is repeated with another value at its end
                print(printable(f"{name} is given twice; {name}={text} counts"), file=sys.stderr)
            given[name] = _value(known[name], text, known[name].kind)
    for option in options:
        if option.is_required and option.name not in given:
            raise ValueError(f"{_form(option)} is missing: {option.doc or type_name(option.kind)} (--help lists all)")
    return given


def _take(text: str, positionals: list[_Option], known: Mapping[str, _Option], given: dict[str, Any]) -> None:
    """Gives a value without a name to the next field that takes one."""
    if text in known and not isinstance(known[text].note, Positional):
        raise ValueError(f"field {text!r} has no value; write {text}={_example(known[text])}")
    if not positionals:
        raise ValueError(f"{text!r} is no option; options are written field=value (--help lists all)")
    if _is_many(option := positionals[0]):
        given[option.name] = (*given.get(option.name, ()), _value(option, text, typing.get_args(option.kind)[0]))
    else:
        given[positionals.pop(0).name] = _value(option, text, option.kind)


def _value(option: _Option, text: str, kind: Any) -> Any:
    try:
        return convert(text, kind)
    except OverflowError:
        raise ValueError(f"field {option.name!r} takes numbers of 64 bits, not {text!r}") from None
    except ValueError:
        raise ValueError(f"field {option.name!r} takes {type_name(kind)}, not {text!r}") from None


def _without_dashes(argument: str, after: Sequence[str], known: Mapping[str, _Option]) -> str:
    """Returns an error with the right spelling of `--field value`."""
    typed, equals, text = argument.lstrip("-").partition("=")
    name = typed.replace("-", "_")
    option = known.get((_candidates(name, known) or [""])[0])
    if not equals:
        text = _example(option) if option else "value"
        if after and text == "value" and not after[0].startswith("-"):
            text, argument = after[0], f"{argument} {after[0]}"
    return f"options have no dashes; write {name}={text} in place of {argument} (--help lists all)"


def _example(option: _Option) -> str:
    return "true" if option.kind is bool else "value"


def _candidates(typed: str, known: Mapping[str, _Option]) -> list[str]:
    """Returns the whole names that a typed one may stand for."""
    return [typed] if typed in known else [name for name in known if name.endswith(f".{typed}")]


def _resolve(typed: str, known: Mapping[str, _Option]) -> str:
    """Returns the whole name of a field. Raises ValueError where there is none, or more than one."""
    match _candidates(typed, known):
        case [name]:
            return name
        case []:
            raise ValueError(f"unknown field {typed!r}{_hint(typed, known)} (--help lists all)")
        case several:
            raise ValueError(f"field {typed!r} may be any of {', '.join(several)}; write one of them")


def _hint(typed: str, known: Mapping[str, _Option]) -> str:
    """Says which field may be meant: the one with the nearest name, else those whose docs contain the name."""
    phrase = re.compile(rf"\b{re.escape(typed).replace('_', '[ _]')}\b", re.IGNORECASE)
    names = difflib.get_close_matches(typed, known, n=1, cutoff=_NEAR)
    names = names or [name for name, option in known.items() if phrase.search(option.doc)]
    return f"; {' or '.join(map(repr, names[:_MOST]))} may be meant" if names else ""


def _is_many(option: _Option) -> bool:
    return typing.get_origin(option.kind) is tuple


def _form(option: _Option) -> str:
    """Returns how a field stands in the usage line: RUN, RUN..., [RUN], or field=value."""
    if not isinstance(option.note, Positional):
        return f"{option.name}=value"
    shown = option.name.upper() + ("..." if _is_many(option) else "")
    return shown if option.is_required else f"[{shown}]"


def _refuse(message: str) -> NoReturn:
    print(printable(f"error: {message}"), file=sys.stderr)
    sys.exit(2)
