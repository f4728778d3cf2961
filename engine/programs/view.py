"""`python -m engine.programs.view RUN [RUN2 ...]`: a page that shows what a run does and did, and what limits it.

It only reads the run's folder, live or finished. It serves when its address has appeared. Ctrl-C ends it with status
130; what keeps it from serving ends it with status 2 and one line: the cause, and what to do about it.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import socket
import sys
from pathlib import Path

from engine.atomic_files import CannotWrite
from engine.view.export import export
from engine.view.page import NoPlots
from engine.view.questions import Questions
from engine.view.run_files import NotARun, RunFiles
from engine.view.server import HOST, CannotListen, serve
from sandbox.printable import print_logs, printable

PORT = 8010
EXPECTED = (CannotListen, CannotWrite, NoPlots, NotARun, ValueError)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options. SystemExit for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.programs.view", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "run",
        type=Path,
        nargs="+",
        help="folder of a run, such as runs/quickstart; several are shown beside each other",
    )
    parser.add_argument("--follow", action="store_true", help="the page goes on with a run that is under way")
    parser.add_argument("--port", type=int, default=PORT, help="0: any free one, which is printed (%(default)s)")
    parser.add_argument("--export", type=Path, metavar="FILE.html", help="write all of it into one file instead")
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 1 << 16:
        parser.error(f"--port must be between 0 and 65535, got {options.port}")
    return options


async def view(questions: Questions, port: int) -> None:
    """Serves until it is cancelled."""
    async with serve(questions, port) as taken:
        address = f"http://{HOST}:{taken}/"
        print(printable(f"{', '.join(run.name for run in questions.runs)} at {address}"), flush=True)
        print(f"from another machine: ssh -L {taken}:{HOST}:{taken} {_user()}@{socket.gethostname()}")
        print("and open the same address there. Ctrl-C ends it.", flush=True)
        await asyncio.Event().wait()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no variable says it, and the number has no entry in passwd (a container)
        return str(os.getuid())


def main(arguments: list[str] | None = None) -> int:
    print_logs()
    options = parse(arguments)
    try:
        questions = Questions([RunFiles(path) for path in options.run], follow=options.follow)
        if options.export is not None:
            size = export(questions, options.export)
            print(f"{options.export}: {size / 1e6:.1f} MB, opens in any browser without a server")
        else:
            asyncio.run(view(questions, options.port))
    except KeyboardInterrupt:
        return 130
    except EXPECTED as error:
        print(printable(f"engine.view: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
