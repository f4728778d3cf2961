"""Runs a recipe as a program: options, the run's folder, signals, one-line errors, exit code.

if __name__ == "__main__":
    exit_process(main(recipe))
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from engine.assembly.expected import EXPECTED
from engine.assembly.wiring import check_recipe
from engine.console import failure
from engine.console.notes import say
from engine.console.options import flat, overrides, parse_all
from engine.errors import BadInput
from engine.nodes.config import LeadConfig
from engine.nodes.door import ListenFailed
from engine.process import streams
from engine.programs.begin import begin
from engine.programs.invocation import Invocation, Machines
from engine.programs.machines import commands, lead_of
from engine.programs.roles import lead_training
from engine.recipe import Recipe, Run, name_of
from engine.run.identity import Identity, describe
from engine.run.run_folder import RunFolder, Unfinished, versions
from engine.telemetry.watchdog import end_on_signals
from sandbox.http.listener import CannotListen
from sandbox.printable import printable

# Options that may change when a run is resumed: its length, its record, its sinks, deadlines, where sandbox hosts join,
# and how far replicas and learner may disagree. A run that one of them has ended can be resumed with another value.
FREE = (
    *("steps", "record.", "step_deadline_s", "start_deadline_s", "update_deadline_s", "replica_step_deadline_s"),
    *("canary_tolerance", "learner.mismatch_tolerance", "wandb", "sandbox_listen", "sandbox_keys"),
    "teacher_deadline_s",
)
ONE_LINE_ERRORS = (BadInput, *EXPECTED, CannotListen, ListenFailed)


def main(recipe: Recipe, argv: Sequence[str] | None = None) -> int:
    """Runs a recipe from the command line.

    recipe: its configuration has a field `steps`, which is None if the recipe finds out how many there are. Returns the
    exit code: 2 if the user has to change something, 1 if a part failed, 130 if it was interrupted.
    """
    try:
        check_recipe(recipe)
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    begin()
    program = recipe.file.stem
    invocation, config, machines = parse_all(
        [Invocation, recipe.config, Machines],
        sys.argv[1:] if argv is None else argv,
        description=sys.modules[recipe.train.__module__].__doc__,
    )
    invocation = invocation.named(program)
    values = {**flat(invocation), **flat(machines), **flat(config)}
    lead = lead_of(machines, recipe, config)
    if machines.dry_run:
        print("\n".join(commands(_command({**values, "dry_run": False}, type(config)), lead)))
        return 0
    identity = None if invocation.fresh else identity_of(config)
    return run_in(
        partial(RunFolder.open, invocation.runs, invocation.name, identity, steps=config.steps),
        recipe,
        config,
        lead,
        values=values,
        again=_command(values, type(config)),
        metrics_port=invocation.metrics_port,
    )


def run_in(
    open_folder: Callable[[], RunFolder],
    recipe: Recipe,
    config: Any,
    lead: LeadConfig | None,
    *,
    values: Mapping[str, Any],
    again: str,
    metrics_port: int | None = None,
) -> int:
    """Runs a recipe in a folder of its own and returns the exit code, as `main` does.

    values: the options that config.json holds, `steps` among them. again: the command that resumes the run.
    metrics_port: as in `Run`.
    """
    program = recipe.file.stem
    folder, log = None, None
    try:
        with open_folder() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            streams.listen(folder.note)
            opens = None if lead is None else partial(lead_training, lead)
            run = Run(folder=folder, opens=opens, metrics_port=metrics_port)
            try:
                runner.run(_begin(config, values, run, recipe))
            except (Exception, SystemExit) as error:
                if not isinstance(error, ONE_LINE_ERRORS):
                    log = failure.write(folder.path, error)
                raise
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except ONE_LINE_ERRORS as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{program}: {_interrupted(folder, again)}", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:  # a bug, perhaps in one of the user's parts
        failure.tell(program, error, log)
        return 1
    return 0


def identity_of(config: Any) -> Identity:
    """Returns the options that a resumed run must keep: all of the recipe's but FREE."""
    return Identity(flat(config), free=FREE)


async def _begin(config: Any, values: Mapping[str, Any], run: Run, recipe: Recipe) -> None:
    task = asyncio.current_task()
    assert task is not None
    with end_on_signals(task):
        await _train(config, values, run, recipe)


async def _train(config: Any, values: Mapping[str, Any], run: Run, recipe: Recipe) -> None:
    console = Console()
    folder = run.folder
    if not folder.resumed:
        if folder.busy is not None:
            say(console, f"{folder.busy} is written by another process with the same options; this is a new run")
        if folder.unfinished:
            say(console, _another(folder.unfinished, folder.path, values, type(config)))
        steps = "" if values["steps"] is None else f" of {values['steps']} steps"
        say(console, f"a new run{steps} in {folder.path}")
        folder.json("config.json", {**values, **written(recipe, config)})
    await recipe.train(config, run)


def written(recipe: Recipe, config: Any) -> dict[str, Any]:
    """Returns what config.json holds beside the options: how the run was begun, and what a replay needs to load it."""
    options = overrides(recipe.config, flat(config))
    begun = {"argv": sys.argv, "directory": str(Path.cwd()), "options": options, "versions": versions()}
    return {**begun, "recipe": name_of(recipe.file)} if recipe.is_file else begun


def _another(unfinished: Unfinished, path: Path, values: Mapping[str, Any], config_class: type[Any]) -> str:
    """Says why a new run begins although one of its name did not end, and how to resume that one."""
    changed = describe(unfinished.differences)
    old = _command({**unfinished.config, "runs": values["runs"]}, config_class)
    return f"{unfinished.path} did not end and differs in {changed}; a new run begins in {path}. To go on there: {old}"


def _interrupted(folder: RunFolder | None, again: str) -> str:
    if folder is None or not folder.path.exists():
        return "interrupted before anything was measured; earlier runs are as they were"
    return f"interrupted; what was measured is in {folder.path}. To go on: {again}"


def _command(values: Mapping[str, Any], config_class: type[Any]) -> str:
    """Returns the command that begins or resumes a run with these options."""
    given = {name: value for name, value in values.items() if name != "fresh"}
    if given["name"] == Path(sys.argv[0]).stem:  # the default
        del given["name"]
    options = [option for owner in (Invocation, Machines, config_class) for option in overrides(owner, given)]
    return shlex.join([sys.executable, sys.argv[0], *options])
