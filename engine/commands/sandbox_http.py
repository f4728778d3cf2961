"""Serves the sandbox over HTTP, by the APIs of Code Judge and SandboxFusion: `rocstar sandbox-http port=8088`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.console.options import parse
from sandbox.http.server import ServerConfig, run
from sandbox.printable import print_logs, printable


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 if it was ended, 1 if it could not serve."""
    print_logs()
    error = run(parse(ServerConfig, argv, program="rocstar sandbox-http", description=__doc__))
    if error is not None:
        print(printable(f"rocstar sandbox-http: {error}"), file=sys.stderr)
        return 1
    return 0
