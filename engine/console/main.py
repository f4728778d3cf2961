"""A recipe as a program: options, the run's folder, signals, one line for what is no bug, the exit code.

if __name__ == "__main__":
    exit_process(main(Config, train))
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from engine.console import failure
from engine.console.machines import commands, lead_of
from engine.console.options import Invocation, flat, overrides, parse_all
from engine.errors import BadInput
from engine.nodes.config import LeadConfig
from engine.nodes.door import ListenFailed
from engine.nodes.training import lead_training
from engine.process import streams
from engine.run.run_folder import RunFolder, Unfinished, versions
from engine.telemetry.watchdog import end_on_signals
from engine.training import EXPECTED, say
from engine.wiring import check_recipe
from sandbox.printable import print_logs, printable

TOLD = (BadInput, *EXPECTED, ListenFailed)  # what one line says

Train = Callable[[Any, RunFolder], Coroutine[Any, Any, Any]]


def main(
    config_class: type[Any],
    train: Train,
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a recipe from the command line: options, the run's folder, signals, one line for what is no bug.

    config_class: a frozen dataclass whose fields are the options, `steps` among them (`engine.console.options`), which
    is None where the recipe finds out how many there are. train: called with it and the run's folder. Returns the exit
    code: 2 for what the user has to change, 1 for a part that failed, 130 when it was interrupted.
    """
    try:
        check_recipe(config_class, train)
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    streams.outlive_readers()
    print_logs()
    program = _program(train)
    invocation, config = parse_all([Invocation, config_class], sys.argv[1:] if argv is None else argv)
    invocation = invocation.named(program)
    lead = lead_of(invocation, config_class, config)
    if invocation.dry_run:
        print("\n".join(_commands(invocation, config, lead)))
        return 0
    identity = identity_of(config)
    run, log = None, None
    try:
        with (
            RunFolder.open(
                invocation.runs, invocation.name, None if invocation.fresh else identity, steps=config.steps
            ) as run,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            streams.listen(run.note)
            if lead is not None:
                run.opener = partial(lead_training, lead)
            try:
                runner.run(_begin(config, invocation, run, train))
            except Exception as error:
                if not isinstance(error, TOLD):
                    log = failure.write(run.path, error)
                raise
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except TOLD as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{program}: {_interrupted(run, invocation, config)}", file=sys.stderr)
        return 130
    except Exception as error:  # a bug, perhaps in a part of the user's
        failure.tell(program, error, log)
        return 1
    return 0


def identity_of(config: Any) -> dict[str, Any]:
    """The options of which a run goes on only with the same values: not its steps, what is recorded of it, how long is
    waited, and how far replicas and learner may differ: a run that one of these has ended goes on with another.
    """
    free = ("steps", "record.", "step_deadline_s", "start_deadline_s", "canary_tolerance", "learner.mismatch_tolerance")
    return {name: value for name, value in flat(config).items() if not name.startswith(free)}


def _commands(invocation: Invocation, config: Any, lead: LeadConfig | None) -> list[str]:
    """What each machine of the run is to run."""
    return commands(_command({**flat(invocation), **flat(config), "dry_run": False}, type(config)), lead)


def _program(train: Train) -> str:
    """The recipe's name: that of its file."""
    module = train.__module__.rpartition(".")[2]
    return Path(sys.argv[0]).stem if module == "__main__" else module


async def _begin(
    config: Any,
    invocation: Invocation,
    run: RunFolder,
    train: Train,
) -> None:
    task = asyncio.current_task()
    assert task is not None
    with end_on_signals(task):
        await _train(config, invocation, run, train)


async def _train(config: Any, invocation: Invocation, run: RunFolder, train: Train) -> None:
    console = Console()
    values = {**flat(invocation), **flat(config)}
    if not run.resumed:
        if run.busy is not None:
            say(console, f"{run.busy} is written by another process with the same options; this is a run of its own")
        if run.unfinished:
            say(console, _another(run.unfinished, run.path, invocation, type(config)))
        steps = "" if config.steps is None else f" of {config.steps} steps"
        say(console, f"a new run{steps} in {run.path}")
        run.json("config.json", {**values, "argv": sys.argv, "versions": versions()})
    await train(config, run)


def _another(unfinished: Unfinished, path: Path, invocation: Invocation, config_class: type[Any]) -> str:
    """Why a new run begins although one of its name did not end, and how to go on with that one."""
    changed = ", ".join(f"{name} ({there} there, {now} now)" for name, (there, now) in unfinished.differences.items())
    old = _command({**unfinished.config, "runs": invocation.runs}, config_class)
    return f"{unfinished.path} did not end and differs in {changed}; a new run begins in {path}. To go on there: {old}"


def _interrupted(run: RunFolder | None, invocation: Invocation, config: Any) -> str:
    if run is None or not run.path.exists():
        return "interrupted before anything was measured; what runs before it have measured is as it was"
    again = _command({**flat(invocation), **flat(config)}, type(config))
    return f"interrupted; what was measured is in {run.path}. To go on: {again}"


def _command(values: Mapping[str, Any], config_class: type[Any]) -> str:
    """With which a run of these options is begun, or gone on with."""
    given = {name: value for name, value in values.items() if name != "fresh"}
    if given["name"] == Path(sys.argv[0]).stem:  # by itself
        del given["name"]
    words = [*overrides(Invocation, given), *overrides(config_class, given)]
    return shlex.join([sys.executable, sys.argv[0], *words])
