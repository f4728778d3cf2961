"""Tells a user of an exception that ended a run: its message, the lines of their own code, and where the rest is.

Invariant: the message comes first, then each line of the user's code that the exception passed, once. The whole
traceback is in a file.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from engine.errors import first_error
from engine.telemetry.failures import plain
from sandbox.printable import printable

LOG = "error.log"
OURS_SHOWN = 3  # lines of our code that are shown if there are none of the user's
MESSAGE_LINES = 20
FRAMES_SHOWN = 8  # at either end of a deep recursion
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_OURS = tuple(f"{Path(__file__).parents[2] / package}/" for package in ("algo", "engine", "sandbox"))
_TYPED = ("<string>", "<stdin>")  # `python -c`, and a program on standard input


def shown(error: BaseException) -> str:
    """Returns the message, the notes on it, and the user's lines, followed by message and lines of its causes."""
    leaf = _leaf(error)
    lines = [*_message(leaf), *_notes(error), *_frames(leaf)]
    cause, seen = leaf.__cause__ or _context(leaf), {id(leaf)}
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if not isinstance(cause, BaseExceptionGroup):  # a group says no more than its leaves
            first, *rest = _message(cause)
            lines += [f"caused by {first}", *rest, *_own_frames(cause)]
        cause = cause.__cause__ or _context(cause)
    return "\n".join(lines)


def write(folder: Path, error: BaseException) -> Path | None:
    """Writes the whole traceback to a file of the run's folder. Returns its path, None if it cannot be written."""
    path = folder / LOG
    try:
        path.write_text(_whole(error), encoding="utf-8")
    except OSError:
        return None
    return path


def tell(program: str, error: BaseException, log: Path | None) -> None:
    """Prints the failure on standard error."""
    if log is None:
        print(_whole(error), end="", file=sys.stderr)
        return
    print(printable(f"{program}: {shown(error)}\nthe whole traceback is in {log}"), file=sys.stderr)


def _whole(error: BaseException) -> str:
    return printable("".join(traceback.format_exception(error)))


def _leaf(error: BaseException) -> BaseException:
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


def _context(error: BaseException) -> BaseException | None:
    return None if error.__suppress_context__ else error.__context__


def _message(error: BaseException) -> list[str]:
    try:
        text = str(error)
    except Exception as fault:  # an exception class of the user's
        text = f"(its message cannot be read: {type(fault).__name__})"
    lines = (text or "(without a message)").splitlines()[:MESSAGE_LINES]
    first, *rest = [plain(line, limit=1000) for line in lines]
    return [f"{type(error).__name__}: {first}", *rest]


def _notes(error: BaseException) -> Iterator[str]:
    for noted in {id(each): each for each in (_leaf(error), error)}.values():
        for note in getattr(noted, "__notes__", ()):
            yield f"  {plain(str(note), limit=1000)}"


def _frames(error: BaseException) -> list[str]:
    """Returns where it happened: the user's lines, or else the innermost of ours."""
    if own := _own_frames(error):
        return own
    return _lines(traceback.extract_tb(error.__traceback__)[-OURS_SHOWN:])


def _own_frames(error: BaseException) -> list[str]:
    return _lines([frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)])


def _is_users(path: str) -> bool:
    if path in _TYPED:
        return True
    return not path.startswith((*_LIBRARY, *_OURS, "<")) and not path.endswith(".pyx")


def _lines(frames: list[traceback.FrameSummary]) -> list[str]:
    """Returns the frames' lines; a deep recursion is cut to its outermost and innermost frames."""
    left_out = len(frames) - 2 * FRAMES_SHOWN
    if left_out <= 0:
        return [line.rstrip() for frame in frames for line in traceback.format_list([frame])]
    between = f"  ... {left_out} calls between them ..."
    return [*_lines(frames[:FRAMES_SHOWN]), between, *_lines(frames[-FRAMES_SHOWN:])]
