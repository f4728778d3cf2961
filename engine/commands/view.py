"""Shows what runs do and did, and what limits them, as a page.

    rocstar view runs/quickstart              one run; several are shown beside each other
    rocstar view runs                         a list of all runs below a folder, also of those that begin later
    rocstar view                              the same for the folder runs

It only reads the runs' folders, live or finished. Where no run is there yet, it waits for one and says so. It serves
once it has printed its address. Ctrl-C ends it with status 130. If it cannot serve, it ends with status 2 and one line
that names the cause and what to do.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from engine.atomic_files import CannotWrite
from engine.console.options import Positional, parse
from engine.console.progress import Bar
from engine.programs import rocstar
from engine.view.export import export
from engine.view.page import NoPlots
from engine.view.questions import Questions
from engine.view.run_files import NotARun, RunFiles
from engine.view.run_list import is_run, runs_below
from engine.view.server import serve
from sandbox.http.listener import CannotListen
from sandbox.printable import print_logs, printable
from sandbox.require import require, within

LOOK_S = 1.0  # between two looks for a first run
EXPECTED = (CannotListen, CannotWrite, NoPlots, NotARun, ValueError)


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[
        tuple[Path, ...], Positional("folder of a run, such as runs/quickstart, or one with runs in it; or several")
    ] = (Path("runs"),)
    follow: Annotated[bool, "keep reading a run that is under way"] = False
    port: Annotated[int, "port of the page; 0: any free one, which is printed"] = 8010
    export: Annotated[Path | None, "write all of it into this file, RUN.html, and serve nothing"] = None

    def __post_init__(self) -> None:
        require("port", self.port, within("[0, 65535]"))


async def view(questions: Questions, port: int) -> None:
    """Serves until it is cancelled."""
    async with serve(questions, port, (sys.executable, "-m", rocstar.__name__)) as url:
        print(printable(f"{questions.title} at {url}/"), flush=True)
        address = urlsplit(url)
        tunnel = f"{address.port}:{address.hostname}:{address.port}"
        print(f"from another machine: ssh -L {tunnel} {_user()}@{socket.gethostname()}")
        print("and open the same address there. Ctrl-C ends it.", flush=True)
        await asyncio.Event().wait()


async def _show(options: Options) -> None:
    await view(await opened(options.run, follow=options.follow), options.port)


async def opened(paths: Sequence[Path], *, follow: bool) -> Questions:
    """Returns the questions about these runs, and about those below the folders among them. Waits until there is a run.

    Raises NotARun for a damaged run among `paths`; one below a folder is left out.
    """
    folders = [path for path in paths if _may_hold_runs(path)]
    runs = [RunFiles(path) for path in paths if path not in folders]
    if not runs:
        runs = [await _newest(folders)]
        folders = [path for path in folders if not is_run(path)]  # one that was waited for is the run itself
    return Questions(runs, follow=follow, below=folders)


def _may_hold_runs(path: Path) -> bool:
    """Returns whether this is not a run itself: a folder, or nothing yet."""
    return not path.exists() or (path.is_dir() and not is_run(path) and not (path / "config.json").exists())


async def _newest(folders: Sequence[Path]) -> RunFiles:
    """Returns the newest run in these folders that can be read, once there is one."""
    noted: set[str] = set()

    def say(line: str) -> None:
        if line not in noted:
            print(printable(line), flush=True)
        noted.add(line)

    while True:
        for path in runs_below(folders):
            try:
                return RunFiles(path)
            except (ValueError, OSError) as error:
                say(f"left out: {' '.join(str(error).split())}")
        say(f"{_nothing_in(folders)}: waiting for one. Ctrl-C ends it.")
        await asyncio.sleep(LOOK_S)


def _nothing_in(folders: Sequence[Path]) -> str:
    """Says that there is no run in these folders, and what is there instead."""
    whys = []
    for folder in folders:
        if folder.is_dir():
            whys.append(f"no run that can be read in {folder} (a folder with config.json and metrics.jsonl)")
        elif folder.absolute().parent.is_dir():
            whys.append(f"{folder} is not there yet")
        else:
            whys.append(f"{folder} is not there, nor is {folder.parent}")
    return "; ".join(whys)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no variable names the user and passwd has no entry, as in a container
        return str(os.getuid())


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 if the user has to change something, 130 if it was interrupted."""
    print_logs()
    options = parse(Options, argv, program="rocstar view", description=__doc__)
    try:
        if options.export is not None:
            questions = Questions([RunFiles(path) for path in options.run])
            with Bar() as bar:
                task = bar.add_task("exporting, parts")
                size = export(
                    questions, options.export, lambda done, parts: bar.update(task, completed=done, total=parts)
                )
            print(f"{options.export}: {size / 1e6:.1f} MB, opens in any browser without a server")
        else:
            asyncio.run(_show(options))
    except KeyboardInterrupt:
        return 130
    except EXPECTED as error:
        print(printable(f"rocstar view: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2
    return 0
