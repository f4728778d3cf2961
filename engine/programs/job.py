"""Runs a job that is not a training run as a program: options, signals, one-line errors, exit code.

if __name__ == "__main__":
    exit_process(run_job(Config, work))

Invariant: an interrupted job prints the command that resumes it, or begins it again; the job itself keeps what it has
done, or says that it keeps nothing.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from engine.assembly.expected import EXPECTED
from engine.console.options import parse
from engine.errors import BadInput
from engine.programs.begin import begin
from engine.telemetry.watchdog import end_on_signals
from sandbox.printable import printable

Config = TypeVar("Config")


def run_job(
    config_class: type[Config],
    work: Callable[[Config], Coroutine[Any, Any, Any]],
    argv: Sequence[str] | None = None,
    *,
    expected: tuple[type[Exception], ...] = (),
    resumes: bool = True,
) -> int:
    """Runs a job from the command line. config_class: a frozen dataclass whose fields are the options. expected: errors
    that are not bugs, beside `engine.assembly.expected.EXPECTED`. resumes: whether the same command continues it.

    Returns the exit code: 2 if the user has to change something, 1 if a part failed, 130 if it was interrupted.
    """
    begin()
    about = sys.modules[config_class.__module__].__doc__
    config = parse(config_class, sys.argv[1:] if argv is None else argv, description=about)
    return run(Path(sys.argv[0]).stem, work(config), expected=expected, resumes=resumes)


def run(
    program: str,
    work: Coroutine[Any, Any, Any],
    *,
    expected: tuple[type[Exception], ...] = (),
    resumes: bool = True,
) -> int:
    """Does what `run_job` does, for a job that has its options."""
    known: tuple[type[Exception], ...] = (*EXPECTED, *expected)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_begin(work))
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except known as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        again = shlex.join([sys.executable, *sys.argv])
        kept = "what was done is kept. To go on" if resumes else "nothing is kept. To begin again"
        print(f"{program}: interrupted; {kept}: {again}", file=sys.stderr)
        return 130
    return 0


async def _begin(work: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.current_task()
    assert task is not None
    with end_on_signals(task):
        await work
