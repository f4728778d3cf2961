"""`field=value`: typed, helpful when wrong, documented by --help."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from engine.console.options import Positional, Rest, flat, overrides, parse, parse_all, usage
from engine.programs.invocation import Invocation, Machines


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    steps: Annotated[int, "optimizer steps"] = 40
    lr: Annotated[float, "learning rate"] = 3e-4
    fast: bool = False
    name: str = "run"
    output: Path = Path("runs")
    algorithm: Annotated[Literal["roc", "grpo"], "which rollouts are kept"] = "roc"
    limit: int | None = None
    clip: tuple[float, float] = (0.2, 0.28)
    seeds: tuple[int, ...] = ()

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("steps=10", "steps", 10),
        ("lr=1", "lr", 1.0),
        ("fast=true", "fast", True),
        ("fast=0", "fast", False),
        ("name=a=b", "name", "a=b"),
        ("name=", "name", ""),
        ("output=/tmp/x", "output", Path("/tmp/x")),
        ("output=~/x", "output", Path.home() / "x"),  # of which not every shell makes the home folder
        ("algorithm=grpo", "algorithm", "grpo"),
        ("limit=3", "limit", 3),
        ("limit=none", "limit", None),
        ("clip=0.1,0.3", "clip", (0.1, 0.3)),
        ("seeds=1,2,3", "seeds", (1, 2, 3)),
        ("seeds=", "seeds", ()),
    ],
)
def test_values_have_the_declared_type(word, field, value):
    got = getattr(parse(Config, [word]), field)
    assert got == value
    assert type(got) is type(value)


def test_what_is_not_given_has_its_default():
    assert parse(Config, []) == Config()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["step=1"], ["'step'", "'steps'"]),
        (["learning_rate=1"], ["'learning_rate'"]),
        (["steps=9223372036854775808"], ["'steps'", "64 bits", "'9223372036854775808'"]),
        (["limit=-9223372036854775809"], ["'limit'", "64 bits", "'-9223372036854775809'"]),
        (["steps=1.5"], ["'steps'", "int", "'1.5'"]),
        (["lr=fast"], ["'lr'", "float", "'fast'"]),
        (["lr=nan"], ["'lr'", "'nan'"]),
        (["fast=maybe"], ["'fast'", "bool", "'maybe'"]),
        (["algorithm=ppo"], ["'algorithm'", "roc|grpo", "'ppo'"]),
        (["limit=x"], ["'limit'", "int|none", "'x'"]),
        (["clip=1"], ["'clip'", "tuple[float, float]", "'1'"]),
        (["steps"], ["'steps'", "steps=value"]),
        (["fast"], ["'fast'", "fast=true"]),
        (["--steps"], ["steps=value"]),
        (["--steps", "10"], ["steps=10", "--steps 10"]),
        (["--steps=10"], ["steps=10"]),
        (["--fast", "steps=3"], ["fast=true"]),
        (["runs/quickstart"], ["'runs/quickstart'"]),
        (["steps=0"], ["steps must be at least 1, not 0"]),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(Config, words)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for part in told:
        assert part in line


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_fields_types_defaults_and_docs(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(Config, [flag])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for part in ("steps: int, default 40", "optimizer steps", "algorithm: roc|grpo, default roc", "limit: int|none"):
        assert part in text


@dataclass(frozen=True, kw_only=True)
class Longer(Config):
    """Of which one field is inherited with another default."""

    data: Annotated[str, "what is read"] = ""
    steps: int = 100


def test_a_field_with_another_default_keeps_its_doc_and_a_class_lists_its_own_fields_first():
    text = usage(Longer)
    assert "steps: int, default 100\n      optimizer steps" in text
    assert text.index("  data: ") < text.index("  steps: ") < text.index("  lr: ")
    assert list(flat(Longer()))[:3] == ["data", "steps", "lr"]
    assert parse(Longer, ["lr=1"]) == Longer(lr=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    lr: float = 5e-4
    """peak of the learning rate"""
    threads: int = 2
    made_of: Mapping[str, int] = field(default_factory=dict)  # no type of the command line's

    def __post_init__(self) -> None:
        if self.lr * self.threads > 1:
            raise ValueError(f"lr x threads must be at most 1, got {self.lr * self.threads}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    threads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    learner: Learner = Learner()
    sampler: Sampler = Sampler()
    model: Path = Path("tiny")
    algorithm: str = "roc"
    prompts_per_step: int = 16
    group_size: int = 8
    slots: int = 8
    devices: tuple[int, ...] = ()
    steps: int = 40
    max_turns: int = 4
    fast: bool = False
    limit: int | None = 3


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("learning_rate", "learner.lr"),  # its doc says so
        ("groupsize", "group_size"),
        ("LIMIT", None),
        ("xyz", None),
    ],
)
def test_an_unknown_field_names_the_one_that_is_meant_or_none(word, meant, capsys):
    with pytest.raises(SystemExit):
        parse(Training, [f"{word}=1"])
    named = capsys.readouterr().err.split("'")[1::2]
    assert named == [word, *([meant] if meant else [])]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["learner.lr=1e-06", "sampler.threads=3", "devices=0,1", "fast=true", "limit=none", "model=a b"],
        ["devices=3"],
    ],
)
def test_the_words_that_make_a_configuration_can_be_had_from_it(words):
    config = parse(Training, words)
    assert sorted(overrides(Training, flat(config))) == sorted(words)
    assert sorted(overrides(Training, json.loads(json.dumps(flat(config), default=str)))) == sorted(words)


@pytest.mark.parametrize("word", ["learner.lr=0.1", "lr=0.1"])
def test_a_field_of_a_configuration_within_is_named_with_dots_or_by_its_last_name(word):
    assert parse(Training, [word]) == Training(learner=Learner(lr=0.1))


def test_fields_within_are_set_at_once():
    """One after the other would pass through a configuration that is refused."""
    got = parse(Training, ["lr=0.01", "learner.threads=100", "sampler.threads=5"])
    assert got == Training(learner=Learner(lr=0.01, threads=100), sampler=Sampler(threads=5))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["threads=3"], ["'threads'", "learner.threads", "sampler.threads"]),
        (["learner.lr=2"], ["learner", "lr x threads", "4.0"]),
        (["learner.made_of=3"], ["'learner.made_of'"]),
    ],
)
def test_a_wrong_field_within_is_named(words, told, capsys):
    with pytest.raises(SystemExit):
        parse(Training, words)
    message = capsys.readouterr().err
    for part in told:
        assert part in message


def test_help_shows_the_string_below_a_field(capsys):
    with pytest.raises(SystemExit):
        parse(Training, ["--help"])
    assert "peak of the learning rate" in capsys.readouterr().out


def test_help_shows_how_the_program_is_called(capsys):
    with pytest.raises(SystemExit):
        parse(Training, ["--help"])
    assert sys.argv[0] in capsys.readouterr().out.splitlines()[0]


def test_the_value_that_was_given_last_counts_and_is_said(capsys):
    assert parse(Training, ["lr=0.1", "learner.lr=0.2"]).learner.lr == 0.2
    assert "learner.lr=0.2 counts" in capsys.readouterr().err


def test_configurations_that_share_a_command_line_are_listed_in_their_order():
    shown = usage(Invocation, Training, Machines)
    places = [shown.index(f"  {name}:") for name in ("name", "learner.lr", "nodes", "dry_run")]
    assert places == sorted(places)
    assert parse_all([Invocation, Machines], ["dry_run=true", "name=a"]) == [
        Invocation(name="a"),
        Machines(dry_run=True),
    ]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What `rocstar` starts: one place, several others, and options."""

    lead: Annotated[str, "address of the lead"]
    run: Annotated[Path, Positional("folder of a run")]
    others: Annotated[tuple[Path, ...], Positional("further ones")] = ()
    port: Annotated[int, "where it listens"] = 80
    here: Annotated[tuple[str, ...], Rest("options of another program")] = ()


def test_values_without_a_name_go_by_their_place():
    assert parse(Program, ["a", "port=3", "b", "lead=x", "./port=4"]) == Program(
        run=Path("a"), others=(Path("b"), Path("./port=4")), port=3, lead="x"
    )
    assert parse(Program, ["lead=x", "run=-"]) == parse(Program, ["-", "lead=x"])
    assert parse(Program, ["lead=x", "runs/lr=3"]).run == Path("runs/lr=3")


def test_what_no_field_takes_is_kept_for_another_program():
    assert parse(Program, ["a", "lead=x", "lr=3", "port=4", "b.c=d"]).here == ("lr=3", "b.c=d")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], ["lead=value", "address of the lead"]),
        (["lead=x"], ["RUN", "folder of a run"]),
        (["lead=x", "port"], ["'port'", "port=value"]),
        (["lead=x", "a", "--replicas", "3"], ["replicas=3"]),
    ],
)
def test_what_is_missing_is_named(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(Program, arguments)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for part in told:
        assert part in line


def test_help_says_how_a_program_is_started_and_what_it_does():
    head, _, *shown = usage(Program, program="rocstar x", description="Serves it.\n\n    More.\n").splitlines()
    assert head.split() == ["usage:", "rocstar", "x", "RUN", "[OTHERS...]", "lead=value", "[field=value", "...]"]
    assert shown[0] == "Serves it."
    assert "  lead: str, required" in shown
    assert not any("More" in line for line in shown)
