"""Runs sandboxed calls for a node on another machine: `rocstar sandbox-host connect=tcp://node:5555 keys=FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.console.options import parse
from sandbox.host.host import HostConfig, run


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if it cannot serve."""
    ended = run(parse(HostConfig, argv, program="rocstar sandbox-host", description=__doc__))
    if isinstance(ended, str):
        print(ended, file=sys.stderr)
        return 1
    return ended or 0
