"""Demonstrates tool calls by rule: a solution of GSM8K becomes a program, its output, and the answer.

A solution of GSM8K marks each calculation: "Natalia sold 48/2 = <<48/2=24>>24 clips in May". The marks become the lines
of a program, in which a number that an earlier line computed is named rather than written again:

    a = 48/2
    b = 48+a
    print(b)

With `broken_calls` a share of the demonstrations makes a mistake first: the program does not run, or its call is not
JSON, the model reads why, and the second call is the right one. That leaves reinforcement learning something to find.

Promises
- The program's output is what Python prints: it is computed here with Python's own numbers and operators. Nothing is
  executed; what is no arithmetic is no demonstration.
- The output equals the answer of the row, so that a demonstration never teaches a wrong one.
- A turn has the form of parts/sampling/chat.jinja: the assistant begins with <reason>, then calls or answers.
- A reply has the words with which a rollout answers the same call, errors of CPython 3.11 and later included.
- Which demonstrations make which mistake depends on the seed and the row's id alone.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from engine.data.prompts import after_hashes
from recipes.rstar2.parts.preparation.mistakes import calling, failing, replying
from recipes.rstar2.parts.preparation.rows import Conversation, Dropped, Fields, Message, Place
from recipes.rstar2.parts.sampling.protocol import PROTOCOLS
from sandbox.wire import ToolResult

MAX_STEPS = 5  # 93 of 100 solutions have no more; longer programs teach a small model little that is new
_MARK = re.compile(r"<<([^<>=]+)=([^<>]*)>>")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST = 1e15  # beyond it floats no longer hold every integer


class NoArithmetic(ValueError):
    """An expression holds something else than numbers, names that have a value, + - * / // and brackets."""


def gsm8k_demonstration(row: Mapping[str, Any], place: Place) -> Conversation | Dropped:
    """Turns a row of GSM8K into a conversation of four messages, or of six where its first call fails."""
    fields = Fields(row)
    question, solution = fields.text("question"), fields.text("answer")
    made = program(solution, question)
    if isinstance(made, Dropped):
        return made
    code, output = made
    answer = after_hashes(row)
    if not re.fullmatch(r"-?\d+", answer):
        return Dropped(reason="not_integer", detail=answer)
    if abs(float(output) - int(answer)) > 1e-6:
        return Dropped(reason="program_differs", detail=f"it prints {output}, the answer is {answer}")
    protocol = PROTOCOLS[place.protocol]
    reason = "I write the steps as a program and run it."
    first: tuple[Message, ...] = ()
    rng = random.Random(f"{place.seed}/{place.id}")
    if rng.random() < place.broken_calls:
        first, reason = failing(reason, code, protocol, rng), "The call failed. I correct it and run it again."
    return Conversation(
        id=place.id,
        index=place.index,
        source="gsm8k_demonstrations",
        messages=(
            {"role": "user", "content": question},
            *first,
            calling(reason, code, protocol),
            replying(code, ToolResult(outcome="ok", stdout=f"{output}\n", exit_code=0), protocol),
            {"role": "assistant", "content": final_turn(output, answer)},
        ),
        tools=json.dumps([protocol.schema(stateful=False)], ensure_ascii=False),
    )


def final_turn(output: str, answer: str) -> str:
    r"""Returns the assistant's answer after it has read the tool's output.

    >>> print(final_turn("72.0", "72"))
    <reason> The program prints 72.0, so the answer is 72. </reason>
    <answer>\boxed{72}</answer>
    """
    reason = f"The program prints {output}, so the answer is {answer}."
    return f"<reason> {reason} </reason>\n<answer>\\boxed{{{answer}}}</answer>"


def program(solution: str, question: str) -> tuple[str, str] | Dropped:
    """Returns the program of a solution's marks, and what it prints.

    >>> program("48/2 = <<48/2=24>>24 in May, 48+24 = <<48+24=72>>72 in all", "48 in April, half of it in May")
    ('a = 48/2\\nb = 48+a\\nprint(b)', '72.0')
    """
    marks = _MARK.findall(solution)
    if not marks:
        return Dropped(reason="no_calculation")
    if len(marks) > MAX_STEPS:
        return Dropped(reason="many_steps", detail=f"{len(marks)} steps")
    stated = {float(number) for number in _NUMBER.findall(question.replace(",", ""))}
    values: dict[str, int | float] = {}
    results: dict[float, str] = {}  # number as the solution writes it -> the variable of the step that gave it
    lines = []
    for name, (expression, result) in zip(string.ascii_lowercase, marks, strict=False):
        written = _with_names(_plain(expression), results, stated)
        try:
            values[name] = evaluate(written, values)
            results[float(_plain(result))] = name
        except ValueError as error:
            return Dropped(reason="no_arithmetic", detail=f"{expression}={result}: {error}")
        lines.append(f"{name} = {written}")
    return "\n".join([*lines, f"print({name})"]), str(values[name])


def _plain(text: str) -> str:
    """Returns a mark's text without what is no arithmetic: thousands separators, units of money, white space at its
    ends.
    """
    return re.sub(r"(?<=\d),(?=\d{3})", "", text).replace("$", "").strip()


def _with_names(expression: str, results: Mapping[float, str], stated: set[float]) -> str:
    """Returns the expression with the variables of earlier results in place of numbers that the question does not
    state.
    """

    def named(number: re.Match[str]) -> str:
        value = float(number[0])
        return results[value] if value in results and value not in stated else number[0]

    return _NUMBER.sub(named, expression)


def evaluate(expression: str, values: Mapping[str, int | float]) -> int | float:
    """Computes an arithmetic expression as Python does. Raises NoArithmetic.

    >>> evaluate("2*(a+1)/4", {"a": 5})
    3.0
    """
    try:
        return _value(ast.parse(expression, mode="eval").body, values)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise NoArithmetic(str(error)) from error


def _value(node: ast.expr, values: Mapping[str, int | float]) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.Name(id=name) if name in values:
            value = values[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = -_value(inner, values)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            value = _value(inner, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left, values), _value(right, values))
        case _:
            raise NoArithmetic(f"{ast.unparse(node)!r} is no arithmetic")
    if abs(value) > _LARGEST:
        raise NoArithmetic("a number is too large")
    return value
