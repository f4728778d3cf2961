"""Demonstrations for a tiny model of how small workspaces are edited.

Promises
- A demonstration is a list of chat messages on a training exercise. None of them runs a program.
- The tools' replies are those of a real workspace.
- They are flawed on purpose. Many guess what a file says, where one look would tell it.

One exercise and how an agent solves it:

    user       total in sums.py gives a wrong result. Correct it.
    assistant  <reason>I look at the file.</reason>
               <tool_call>{"name": "read_file", "arguments": {"path": "sums.py"}}</tool_call>
    tool       def total(x, y):
                   return x * y
    assistant  <reason>I see x * y.</reason>
               <tool_call>{"name": "replace_text", "arguments": {"path": "sums.py", "old": "x * y", ...}}</tool_call>
    tool       sums.py: 34 bytes
    assistant  <answer>Done.</answer>
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.types import Prompt
from recipes.tiny.task import Message, Mix, hermes_call
from recipes.tools.exercises import COLUMNS, LAST, OPERANDS, OPERATORS, exercises, sum_program
from recipes.tools.snapshot import BadEdit, Bounds, Snapshot
from recipes.tools.workspace import edited, snapshot_of

Call = tuple[str, dict[str, str]]  # tool, arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """How an exercise can be gone about. seen: what a look at the files tells."""

    looks: Sequence[Call]
    seen: str
    edits: Sequence[Call]
    guess: Sequence[Call]
    failure: Call


def demonstrations(mix: Mix, seed: int) -> Iterator[list[Message]]:
    """Yields demonstrations on training exercises without end.

    mix: the shares that guess and do not look (head), that look first (clean), and that look after a call that failed
    (err).
    """
    rng = random.Random(f"demonstrations-{seed}")
    for prompt in exercises("train", seed):
        kind = mix.draw(rng)
        yield [dict(prompt.messages[0]), *_solve(prompt, kind, rng)]


def _solve(prompt: Prompt, kind: str, rng: random.Random) -> Iterator[Message]:
    """Yields the messages after the prompt. kind: head, clean or err."""
    ways = _ways(prompt, rng)
    turns = [("I look at the file.", ways.looks), (f"I see {ways.seen}.", ways.edits)]
    if kind == "head":
        turns = [("I guess what is there.", ways.guess)]
    elif kind == "err":
        turns[0] = ("There is an error, I look at the file.", ways.looks)
        turns.insert(0, ("I guess what is there.", [ways.failure]))
    workspace = snapshot_of(prompt, Bounds())
    for reason, calls in turns:
        text = "\n".join(hermes_call(name, arguments) for name, arguments in calls)
        yield {"role": "assistant", "content": f"<reason>{reason}</reason>\n{text}"}
        for name, arguments in calls:
            workspace, reply = _reply(workspace, name, arguments)
            yield {"role": "tool", "content": reply}
    yield {"role": "assistant", "content": "<answer>Done.</answer>"}


def _reply(workspace: Snapshot, tool: str, arguments: Mapping[str, str]) -> tuple[Snapshot, str]:
    try:
        return edited(workspace, tool, arguments)
    except BadEdit as error:
        return workspace, str(error)


def _ways(prompt: Prompt, rng: random.Random) -> Ways:
    files: dict[str, str] = prompt.metadata["files"]
    if "sums.py" in files:
        name, x, before, y = re.findall(r"def (\w+).*\n    return (\w+) (.) (\w+)", files["sums.py"])[0]
        right = OPERATORS[name]
        others = [operator for operator in OPERATORS.values() if operator != right]
        return _replacement(
            rng,
            "sums.py",
            (f"{x} {before} {y}", f"{x} {right} {y}"),
            [(f"{a} {wrong} {b}", f"{a} {right} {b}") for a, b in OPERANDS for wrong in others],
        )
    if "counting.py" in files:
        [last] = re.findall(r"\((\w+)\)", files["counting.py"])
        return _replacement(
            rng, "counting.py", (f"{last},", f"{last} + 1,"), [(f"{each},", f"{each} + 1,") for each in LAST]
        )
    if "example.csv" in files:
        column = files["example.csv"].partition("\n")[0].removeprefix("name,")
        return Ways(
            looks=[_read("example.csv")],
            seen=column,
            edits=[_write("main.py", sum_program(column))],
            guess=[_write("main.py", sum_program(rng.choice(COLUMNS)))],
            failure=_read("main.py"),
        )
    [old] = re.findall(r"\d+", files["settings.py"])
    [new] = re.findall(r"\d+", prompt.metadata["solution"]["settings.py"])
    return Ways(
        looks=[_read("settings.py"), _read("client.py")],
        seen=old,
        edits=[_replace("settings.py", old, new), _replace("client.py", old, "{PORT}")],
        guess=[_write("settings.py", f"PORT = {new}\n")],
        failure=_replace("settings.py", str(rng.randint(7000, 7999)), new),
    )


def _replacement(rng: random.Random, path: str, right: tuple[str, str], possible: Sequence[tuple[str, str]]) -> Ways:
    """Returns the ways of an exercise in which one text of a file has to become another: (old, new)."""
    return Ways(
        looks=[_read(path)],
        seen=right[0].rstrip(","),
        edits=[_replace(path, *right)],
        guess=[_replace(path, *rng.choice(possible))],
        failure=_replace(path, *rng.choice([each for each in possible if each != right])),
    )


def _read(path: str) -> Call:
    return "read_file", {"path": path}


def _write(path: str, text: str) -> Call:
    return "write_file", {"path": path, "text": text}


def _replace(path: str, old: str, new: str) -> Call:
    return "replace_text", {"path": path, "old": old, "new": new}
