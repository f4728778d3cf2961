"""Tells a model how its Python code ran. The text is then cut to the length that the model may read.

Invariants
- Pure and total: any code and any result give a text, in time linear in their length.
- What the program printed before an error, a limit or a signal is told, and then what ended it.
- The outcome is the sandbox's word. What a traceback says is the program's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from sandbox.wire import ToolResult

HEADER, FRAME = "Traceback (most recent call last):\n", '  File "'
LINE_NUMBER = re.compile(r'^  File "[^"\n]*", line (\d{1,9})', re.MULTILINE)
EXCEPTION = re.compile(r"(?:\w+\.)*(\w+)(?:: (.*))?", re.DOTALL)
UNINDENTED = re.compile(r"^(?![ \n])", re.MULTILINE)
SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
# Matches the beginning of a statement that has no value: a keyword, a decorator, an assignment.
NO_EXPRESSION = re.compile(
    r"(?:assert|async|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|pass|raise|return|"
    r"""try|while|with)\b|@|[\w.\[\]"', ]+(?::[^=\n]*)?(?:\*\*|//|<<|>>|[-+*/%&|^@])?=(?!=)"""
)
JUDGED_CHARS = 1000  # Code Judge returns so much of stdout, and of stderr
JUDGED_REASONS = {"timeout": "worker_timeout", "lost": "queue_timeout"}


class Told(NamedTuple):
    """What the model is told. output: is cut to what it may read. note: a line below it, which is never cut."""

    output: str
    note: str = ""


Feedback = Callable[[str, ToolResult], Told]
"""A function of the code and its result."""


def traceback_feedback(code: str, result: ToolResult) -> Told:
    """Tells what was printed and displayed, or what was printed and the traceback or the limit that ended the call.

    >>> traceback_feedback("print(1); x", ToolResult(outcome="error", stdout="1\\n", stderr="NameError: ...\\n")).output
    '1\\nNameError: ...'
    """
    return _told(result, error=_trimmed(result.stderr))


def message_feedback(code: str, result: ToolResult) -> Told:
    """Tells the same as traceback_feedback without the frames, for models that may read little."""
    return _told(result, error=_message(_trimmed(result.stderr)))


def judge_feedback(code: str, result: ToolResult) -> Told:
    """Tells what the published code of rStar2-Agent does (microsoft/rStar, rstar2_agent/tools/code_judge_utils.py).

    There Code Judge runs an executor, which prints the value of a last expression, and the error with its line in place
    of a traceback. If a last expression below the first line fails, it does not name the line.
    """
    ok = result.outcome == "ok"
    stdout = result.stdout + (f"{result.display}\n" if ok and result.display is not None else "")
    stderr = result.stderr if ok else _placed(code, result.stderr)
    lines = ["Tool call success"] if ok else ["Tool call failure", f"reason: {JUDGED_REASONS.get(result.outcome, '')}"]
    for name, text in (("stdout", stdout), ("stderr", stderr)):
        if text:
            lines.append(f"{name}: {text[:JUDGED_CHARS]}")
    return Told("\n".join([*lines, f"execution time: {result.wall_s:.2f}s"]))


FeedbackName = Literal["traceback", "message", "judge"]
FEEDBACKS: dict[FeedbackName, Feedback] = {
    "traceback": traceback_feedback,
    "message": message_feedback,
    "judge": judge_feedback,
}


def joined(*texts: str | None) -> str:
    """Returns the texts that are not empty, one below the other."""
    return "\n".join(filter(None, texts))


def _told(result: ToolResult, *, error: str) -> Told:
    note = "Note: there was too much output; only its beginning was kept." if result.truncated else ""
    return Told(joined(result.stdout.strip(), _ending(result, error)), note)


def _ending(result: ToolResult, error: str) -> str | None:
    match result.outcome:
        case "ok":
            return result.display
        case "timeout":
            return f"TimeoutError: stopped after {result.wall_s:.1f} s"
        case "memory":
            return "MemoryError: out of memory"
        case "output":
            return "OutputError: too much output"
        case "killed":
            code = result.exit_code
            return joined(error, "Error: killed by a signal" if code is None else f"Error: exit code {code}")
    return error or f"Error: exit code {result.exit_code}"


def _trimmed(stderr: str) -> str:
    """Returns the text without empty lines around it; its first line may begin with a space."""
    return stderr.rstrip().lstrip("\n")


def _message(stderr: str) -> str:
    """Returns the exception with its whole message and without the frames above it; the text itself without frames."""
    at = stderr.rfind(f"\n{FRAME}") + 1
    if at == 0 and not stderr.startswith(FRAME):
        return stderr
    end = UNINDENTED.search(stderr, at)
    return stderr if end is None or end.start() == len(stderr) else stderr[end.start() :]


def _placed(code: str, stderr: str) -> str:
    """Returns stderr with the error's line and that of the code in place of a traceback, or as it is without one."""
    traceback = stderr[max(0, stderr.rfind(HEADER)) :].rstrip()
    numbers = [int(number) for number in LINE_NUMBER.findall(traceback)]
    exception = EXCEPTION.fullmatch(_message(traceback))
    if not numbers or exception is None:
        return stderr
    kind, text = exception[1], exception[2] or ""
    lines, number = code.splitlines(), numbers[-1]
    if kind in SYNTAX_ERRORS:
        text += f" (<unknown>, line {number})"
    elif (start := _last_expression(lines)) is not None:
        within = numbers[0] >= start
        number += start - 1 if within and number < start else 0
        lines = lines[start - 1 :] if within else lines[: start - 1]
    where, line = (f" at line {number}", f"\n  {lines[number - 1]}") if 0 < number <= len(lines) else ("", "")
    begins = min(at for mark in (HEADER, FRAME) if (at := stderr.find(mark)) >= 0)
    return f"{stderr[:begins]}{kind}{where}: {text}{line}\n"


def _last_expression(lines: list[str]) -> int | None:
    """Returns the line, from 1, in which the last statement begins, if it is an expression.

    It uses no parser, which a model's code can bring down.
    """
    for number in range(len(lines), 0, -1):
        line = lines[number - 1]
        if line and line[0] not in " \t\f#)]}" and line.strip() not in ('"""', "'''"):
            return None if NO_EXPRESSION.match(line) else number
    return None
