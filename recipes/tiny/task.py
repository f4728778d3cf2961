"""Makes the tiny word-problem task: seeded problems, and demonstrations for its cold start.

Promises
- `problems(split, seed)` is endless and depends on its arguments only.
- No arithmetic occurs in both splits: the split is a hash of numbers and operators, whatever name, item or phrasing.
- A demonstration is a list of chat messages; the same chat template renders it and the rollouts.
- The tool replies in demonstrations read as those of a real run: printed text, or the message of the error.

One problem and how an agent solves it:

    user       Lea has 63 books. Lea gets 43 from a friend. Lea makes 8 equal piles and keeps one pile.
               How many books now?
    assistant  <reason>I use python.</reason>
               <tool_call>{"name": "python", "arguments": {"code": "x=63+43\\nx=x//8\\nprint(x)"}}</tool_call>
    tool       13
    assistant  <reason>The result is 13.</reason>
               <answer>\\boxed{13}</answer>
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.ports import ToolRunner
from engine.tools.python_feedback import message_feedback
from engine.tools.python_tool import PythonTool
from engine.types import Prompt
from sandbox import Limits

Split = Literal["train", "test"]
Message = dict[str, str]

METHODS = {  # names for people
    "grpo": "GRPO",
    "roc": "GRPO-RoC",
    "random": "GRPO, random subset",
    "distill": "on-policy distillation",
}
SHIPPED = Path(__file__).resolve().parent / "agent"  # the agent that reinforcement learning starts from

TOOL_NAME = "python"
MAX_TOOL_CALLS = 3
MAX_TOKENS = 230  # bounds a whole trajectory, prompt included
LIMITS = Limits(wall_s=2.0, cpu_s=2.0, memory_bytes=512 << 20)  # limits of a tool call

_NAMES = ("Lea", "Tom", "Mia", "Ben", "Eva", "Max", "Zoe", "Sam")
_ITEMS = ("books", "coins", "pens", "apples", "cards", "shells", "stamps", "eggs")
_PHRASES = {
    "+": ("{who} gets {n} from a friend.", "{who} finds {n} more.", "{who} buys another {n}."),
    "-": ("{who} gives away {n}.", "{who} loses {n}.", "{who} sells {n} of them."),
    "*": ("Now the number grows {n} times.", "{who} gets {n} times as many."),
    "//": ("{who} makes {n} equal piles and keeps one pile.", "{who} shares them among {n} boxes and keeps one box."),
}
_LARGEST_ANSWER = 99_999


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Start with `first`, then apply each (operator, number) in order; whole numbers all the way.

    >>> Problem(first=63, steps=(("+", 43), ("//", 8)), question="...").answer
    13
    """

    first: int
    steps: tuple[tuple[str, int], ...]
    question: str

    @property
    def answer(self) -> int:
        return _apply(self.first, self.steps)[-1]

    @property
    def split(self) -> Split:
        """The split: about one arithmetic in ten is for testing."""
        digest = hashlib.md5(repr((self.first, self.steps)).encode(), usedforsecurity=False).digest()
        return "test" if digest[0] < 26 else "train"

    def prompt(self, prompt_id: str) -> Prompt:
        return Prompt(id=prompt_id, messages=({"role": "user", "content": self.question},), answer=str(self.answer))


def problems(split: Split, seed: int) -> Iterator[Problem]:
    """Yields problems of one split without end."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        problem = _draw(rng)
        values = _apply(problem.first, problem.steps)
        if problem.split == split and min(values) >= 1 and values[-1] <= _LARGEST_ANSWER:
            yield problem


def prompts(split: Split, seed: int) -> Iterator[Prompt]:
    """Yields the same problems as prompts for the engine; ids count within (split, seed)."""
    for index, problem in enumerate(problems(split, seed)):
        yield problem.prompt(f"{split}-{seed}-{index}")


def _draw(rng: random.Random) -> Problem:
    who, items, first = rng.choice(_NAMES), rng.choice(_ITEMS), rng.randint(10, 99)
    steps, sentences = [], [f"{who} has {first} {items}."]
    for _ in range(rng.choice((2, 3))):
        operator = rng.choice(tuple(_PHRASES))
        number = rng.randint(10, 99) if operator in "+-" else rng.randint(2, 9)
        steps.append((operator, number))
        sentences.append(rng.choice(_PHRASES[operator]).format(who=who, n=number))
    return Problem(first=first, steps=tuple(steps), question=" ".join([*sentences, f"How many {items} now?"]))


def _apply(first: int, steps: tuple[tuple[str, int], ...]) -> list[int]:
    """Returns every intermediate value, the last one being the answer."""
    values = [first]
    for operator, n in steps:
        x = values[-1]
        values.append({"+": x + n, "-": x - n, "*": x * n, "//": x // n}[operator])
    return values


# Demonstrations. They are flawed on purpose: RL must find out that guessing fails, that "/" gives a fraction where a
# whole number is asked, and that a failed call need not happen.


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Shares of the three kinds; they add up to 1.

    head: answers at once without the tool (the text is right, but the tiny model cannot do it: 1-2 % right).
    clean: one good call. err: a broken call, then a good one.
    """

    head: float
    clean: float
    err: float

    def __post_init__(self) -> None:
        if min(self.head, self.clean, self.err) < 0 or abs(self.head + self.clean + self.err - 1) > 1e-9:
            raise ValueError(f"Mix: shares must be >= 0 and add up to 1, not {self.head}/{self.clean}/{self.err}")

    def draw(self, rng: random.Random) -> str:
        """Returns the kind of the next demonstration."""
        (kind,) = rng.choices(("head", "clean", "err"), (self.head, self.clean, self.err))
        return kind


_SLOPPY_DIVISIONS = 0.5
_MALFORMED_SHARE = 0.15


def demonstrations(mix: Mix, seed: int) -> Iterator[list[Message]]:
    """Yields demonstrations on training problems without end."""
    rng = random.Random(f"demonstrations-{seed}")
    for problem in problems("train", seed):
        kind = mix.draw(rng)
        yield [{"role": "user", "content": problem.question}, *_solve(problem, kind, rng)]


def _solve(problem: Problem, kind: str, rng: random.Random) -> Iterator[Message]:
    if kind == "head":
        yield _answer("I do this in my head.", str(problem.answer))
        return
    opening = "I use python."
    if kind == "err":
        call = tool_call(_broken_code(problem, rng))
        if rng.random() < _MALFORMED_SHARE:
            call = tool_call(_code(problem, rng)).replace('"}}', '"}')
        yield {"role": "assistant", "content": f"<reason>{opening}</reason>\n{call}"}
        yield {"role": "tool", "content": _trusted_reply(call)}
        opening = "There is an error, I try again."
    call = tool_call(_code(problem, rng))
    result = _trusted_reply(call)
    yield {"role": "assistant", "content": f"<reason>{opening}</reason>\n{call}"}
    yield {"role": "tool", "content": result}
    yield _answer(f"The result is {result}.", result)


def _answer(reason: str, result: str) -> Message:
    return {"role": "assistant", "content": f"<reason>{reason}</reason>\n<answer>\\boxed{{{result}}}</answer>"}


def python_tool(sandbox: ToolRunner) -> PythonTool:
    """Returns the agent's tool.

    It reports an error without its traceback, which would fill the trajectory's few tokens.
    """
    return PythonTool(sandbox, TOOL_NAME, feedback=message_feedback)


def tool_call(code: str) -> str:
    """Returns a hermes call of the Python tool."""
    return hermes_call(TOOL_NAME, {"code": code})


def hermes_call(tool: str, arguments: Mapping[str, str]) -> str:
    """Returns the text of a call in hermes' format."""
    return "<tool_call>" + json.dumps({"name": tool, "arguments": arguments}) + "</tool_call>"


def _code(problem: Problem, rng: random.Random) -> str:
    lines, read = [], str(problem.first)
    for operator, n in problem.steps:
        written = "/" if operator == "//" and rng.random() < _SLOPPY_DIVISIONS else operator
        lines.append(f"x={read}{written}{n}")
        read = "x"
    return "\n".join([*lines, "print(x)"])


def _broken_code(problem: Problem, rng: random.Random) -> str:
    """Returns code that certainly raises: an open bracket, or `y` where `x` is meant."""
    code, kind = _code(problem, rng), rng.random()
    if kind < 0.35:
        return code.removesuffix(")")
    if kind < 0.70:
        return code.replace("print(x)", "print(y)")
    first, *rest = code.split("\n")
    if rng.random() < 0.5:
        return "\n".join([first.replace("x=", "y="), *rest])
    return "\n".join([first, rest[0].replace("=x", "=y"), *rest[1:]])


def _trusted_reply(call: str) -> str:
    """Returns the tool's reply to a call written above. It runs in this process: never pass what a model wrote."""
    try:
        code = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]["code"]
    except json.JSONDecodeError as error:
        return f"FormatError: {error.msg}"
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {})
    except Exception as error:
        return traceback.format_exception_only(error)[-1].strip()
    return printed.getvalue().strip()
