"""Shows what a run does and did, and what limits it, as a page: `rocstar view RUN [RUN2 ...]`.

It only reads the run's folder, live or finished. It serves once it has printed its address. Ctrl-C ends it with status
130. If it cannot serve, it ends with status 2 and one line that names the cause and what to do.
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
from engine.view.server import serve
from sandbox.http.listener import CannotListen
from sandbox.printable import print_logs, printable
from sandbox.require import require, within

EXPECTED = (CannotListen, CannotWrite, NoPlots, NotARun, ValueError)


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[
        tuple[Path, ...], Positional("folder of a run, such as runs/quickstart; several are shown beside each other")
    ]
    follow: Annotated[bool, "keep reading a run that is under way"] = False
    port: Annotated[int, "port of the page; 0: any free one, which is printed"] = 8010
    export: Annotated[Path | None, "write all of it into this file, RUN.html, and serve nothing"] = None

    def __post_init__(self) -> None:
        require("port", self.port, within("[0, 65535]"))


async def view(questions: Questions, port: int) -> None:
    """Serves until it is cancelled."""
    async with serve(questions, port, (sys.executable, "-m", rocstar.__name__)) as url:
        print(printable(f"{', '.join(run.name for run in questions.runs)} at {url}/"), flush=True)
        address = urlsplit(url)
        tunnel = f"{address.port}:{address.hostname}:{address.port}"
        print(f"from another machine: ssh -L {tunnel} {_user()}@{socket.gethostname()}")
        print("and open the same address there. Ctrl-C ends it.", flush=True)
        await asyncio.Event().wait()


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
        questions = Questions([RunFiles(path) for path in options.run], follow=options.follow)
        if options.export is not None:
            with Bar() as bar:
                task = bar.add_task("exporting, parts")
                size = export(
                    questions, options.export, lambda done, parts: bar.update(task, completed=done, total=parts)
                )
            print(f"{options.export}: {size / 1e6:.1f} MB, opens in any browser without a server")
        else:
            asyncio.run(view(questions, options.port))
    except KeyboardInterrupt:
        return 130
    except EXPECTED as error:
        print(printable(f"rocstar view: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2
    return 0
