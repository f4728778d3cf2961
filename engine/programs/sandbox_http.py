"""Serves the sandbox over HTTP, by the APIs of Code Judge and SandboxFusion: `rocstar sandbox-http port=8088`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.console.options import parse
from sandbox.http.server import ServerConfig, run
from sandbox.printable import print_logs, printable


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 when it was ended, 1 for what kept it from serving."""
    print_logs()
    failed = run(parse(ServerConfig, argv, program="rocstar sandbox-http", description=__doc__))
    if failed is not None:
        print(printable(f"rocstar sandbox-http: {failed}"), file=sys.stderr)
        return 1
    return 0
