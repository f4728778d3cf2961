"""Loads a reward or a tool of the user's that an option names as FILE.py:NAME, so that it needs no recipe of its own.

    reward = load_reward("my.py:score")
    tools = [load_tool(place) for place in ("my.py:lookup", "my.py:convert")]

Each function raises BadInput in one line that names the option and says what the file has.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.assembly.wiring import check_reward, check_tools
from engine.errors import BadInput
from engine.ports import GroupReward, Reward, StatefulTool, Tool, World
from engine.recipe import module_of
from engine.tools.function_tool import as_tools


def load_reward(place: str, option: str = "reward") -> Reward | GroupReward:
    """Loads a function of a trajectory, `def` or `async def`, or an object that is called with one."""
    return _load(place, option, "def score(trajectory) -> float", _as_reward)


def load_tool(place: str, option: str = "tools") -> Tool | StatefulTool | World:
    """Loads a typed function with a docstring, or an object: a tool or a world."""
    return _load(place, option, "def lookup(word: str) -> str", _as_tool)


def _as_reward(part: Any) -> Any:
    check_reward(part)
    return part


def _as_tool(part: Any) -> Any:
    check_tools([part])
    [tool] = as_tools([part])
    return tool


def _load(place: str, option: str, example: str, convert: Callable[[Any], Any]) -> Any:
    path, _, name = place.rpartition(":") if not place.endswith(".py") else (place, "", "")
    if not path.endswith(".py") or not Path(path).is_file():
        raise BadInput(f"{option}={place}: there is no Python file {path or place!r}. Fix: {option}=FILE.py:NAME")
    try:
        module = _module(Path(path).resolve())
    except (Exception, SystemExit) as error:
        raise BadInput(f"{option}={place}: {path}{_line(path, error)}: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        names = _functions(module)
        fault = f"{path} has no {name!r}" if name else "no function is named"
        contents = f"{path} has {', '.join(names)}" if names else f"{path} has no function"
        fix = f"{option}={path}:{names[0]}" if names else f"{example} in {path}"
        raise BadInput(f"{option}={place}: {fault}; {contents}. Fix: {fix}")
    try:
        return convert(getattr(module, name))
    except ValueError as error:
        raise BadInput(f"{option}={place}: {error}") from error


@cache
def _module(path: Path) -> ModuleType:
    """Runs a file once, however many of its functions are named."""
    return module_of(path, f"user_{path.stem}")


def _line(path: str, error: BaseException) -> str:
    """Returns where in the user's file an error was raised."""
    file = str(Path(path).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""


def _functions(module: ModuleType) -> list[str]:
    """Returns the names of the functions that the file itself defines, in their order."""
    return [
        name
        for name, part in vars(module).items()
        if inspect.isroutine(part) and part.__module__ == module.__name__ and not name.startswith("_")
    ]
