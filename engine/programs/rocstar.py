"""The command `rocstar`: one name for what is started from a shell, `rocstar view runs/quickstart`.

A command's module is imported only when it is asked for: `rocstar --help` loads none of them, and bench/ lies above the
engine. Each module has `main(argv) -> int`, which returns the exit code, and answers `--help`.
"""

from __future__ import annotations

import difflib
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from engine.process import streams


@dataclass(frozen=True, slots=True)
class Command:
    """A command. arguments: as the overview shows them. does: what it does, in a line."""

    module: str
    arguments: str
    does: str


COMMANDS = {
    "run": Command("engine.commands.run", "RECIPE", "train by a recipe file, as `python RECIPE` does"),
    "view": Command("engine.commands.view", "[RUN...]", "show what runs do and did, and what limits them, as a page"),
    "compare": Command("engine.commands.compare", "A B", "say where one run takes longer than another"),
    "rollouts": Command("engine.commands.rollouts", "RUN", "show what the model wrote in a step"),
    "trace": Command("engine.commands.trace", "RUN", "write the timeline of some steps for ui.perfetto.dev"),
    "replay": Command("engine.commands.replay", "RUN", "replay a recorded trajectory from one of its turns"),
    "reverify": Command("bench.commands.reverify", "RUN", "say what another reward or selection would have chosen"),
    "gateway": Command("engine.commands.gateway", "CHECKPOINT", "serve a checkpoint by OpenAI's and Anthropic's APIs"),
    "node": Command("engine.commands.node", "lead=...", "help a run that is led on another machine"),
    "keys": Command("engine.commands.keys", "FOLDER", "make the keys by which machines know each other"),
    "doctor": Command("engine.commands.doctor", "", "say whether this machine can jail code, and if not, what to do"),
    "sandbox": Command("engine.commands.sandbox", "FILE", "run a Python program in the jail"),
    "sandbox-host": Command("engine.commands.sandbox_host", "connect=...", "run sandboxed calls for another machine"),
    "sandbox-http": Command("engine.commands.sandbox_http", "", "serve the sandbox over HTTP"),
    "bench": Command("bench.__main__", "NAME", "measure a part of rocstar, or compare two runs"),
}


def overview() -> str:
    """Returns what `rocstar --help` prints."""
    shown = {name: f"{name} {command.arguments}".strip() for name, command in COMMANDS.items()}
    width = max(map(len, shown.values()))
    lines = ["usage: rocstar COMMAND [arguments] [field=value ...]", ""]
    lines += [f"  {shown[name]:{width}}  {command.does}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "rocstar COMMAND --help lists the options of a command."])


def start(argv: Sequence[str]) -> int:
    """Runs a command. Returns its exit code, 2 where there is no such command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *arguments = argv
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; {near[0]!r} may be meant" if near else ""
        print(f"error: there is no command {name!r}{hint} (rocstar --help lists all)", file=sys.stderr)
        return 2
    code: int = import_module(COMMANDS[name].module).main(arguments)
    return code


def main() -> NoReturn:
    """Runs the command line; `pip install` and `make venv` put it beside python as `rocstar`."""
    streams.prepare_descriptors()  # before other imports open files
    from engine.telemetry.watchdog import exit_process

    try:
        code = start(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        code = 128 + signal.SIGPIPE
    exit_process(code)


def _nobody_reads() -> bool:
    """Returns whether standard output is a pipe that was closed at the other end, as by `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    main()
