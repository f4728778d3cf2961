"""Loads a stage, a reward or a policy from a file of the user's, and says in one line where that file fails."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from engine.recipe import module_of


class Failed(Exception):
    """A part of the user's raised something. The message is one line that names what, file and line."""


def attribute_of(name: str, what: str) -> tuple[Any, Path]:
    """Returns what FILE.py:NAME names, and the file; what: its kind, for messages. Raises ValueError, in one line with
    the fix, where there is none or the file itself fails.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not (path.is_file() and path.suffix == ".py"):
        raise ValueError(f"{name!r} is no {what}. Fix: FILE.py:NAME, a file that is there and a name in it")
    try:
        module = module_of(path, f"{what}_{path.stem}")
    except SyntaxError as error:
        at = f"{error.filename}:{error.lineno}"
        raise ValueError(f"{at} is no Python: {error.msg}. Fix: correct this line of the file") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be loaded: {told(error, path)}. Fix: correct this line of the file") from error
    part = getattr(module, attribute, None)
    if not callable(part):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        there = [each for each in own if callable(getattr(module, each))]
        raise ValueError(f"{file} has no {what} {attribute!r}. Fix: one of {', '.join(there) or 'none'}")
    return part, path


def told(error: BaseException, path: Path) -> str:
    """Returns type and message of an exception, and the innermost line of the file that it came through.

    >>> told(ValueError("boom"), Path("mine.py"))
    'ValueError: boom'
    """
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{text} ({path.name}:{own[-1].lineno})" if own else text
