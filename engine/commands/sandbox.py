"""Runs a Python program in the jail: `rocstar sandbox FILE`. The exit status is the program's own; it is 124 after a
time limit, 137 when another limit or a signal ended the program, 125 when it could not be run.

The program's output comes when it has ended. On a terminal its control characters are shown as escapes; in a file or a
pipe the output is unchanged. A line on stderr says why a program was ended or not run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from engine.console.options import Positional, parse
from sandbox.client.sandbox import Sandbox
from sandbox.config import SandboxConfig, SandboxUnavailable
from sandbox.printable import printable
from sandbox.wire import Limits, Outcome, ToolResult

TIMEOUT, NOT_RUN, KILLED = 124, 125, 137
STATUS: dict[Outcome, int] = {
    "timeout": TIMEOUT,
    "memory": KILLED,
    "output": KILLED,
    "killed": KILLED,
    "lost": NOT_RUN,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    file: Annotated[str, Positional("the program, which gets this command's stdin; -: stdin is the program")]
    wall_s: Annotated[float, "limit of time"] = Limits().wall_s
    memory_mb: Annotated[int, "limit of memory"] = Limits().memory_bytes >> 20
    json: Annotated[bool, "print the whole result as JSON instead, and end with status 0"] = False

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> Limits:
        """Raises ValueError."""
        return Limits(wall_s=self.wall_s, cpu_s=self.wall_s, memory_bytes=self.memory_mb << 20, output_bytes=1 << 20)


def read(file: str) -> tuple[str, str]:
    """Returns the program and its stdin. Raises OSError, SyntaxError or UnicodeDecodeError for what is no Python."""
    has_none = sys.stdin is None or (file != "-" and sys.stdin.isatty())
    given = b"" if has_none else sys.stdin.buffer.read()
    if file == "-":
        return importlib.util.decode_source(given), ""
    return importlib.util.decode_source(Path(file).read_bytes()), given.decode(errors="replace")


async def run(code: str, stdin: str, limits: Limits) -> ToolResult:
    async with Sandbox(SandboxConfig(slots=1, limits=limits)) as box:
        return await box.run(code, stdin)


def show(result: ToolResult) -> int:
    """Prints the program's output, with escapes for control characters on a terminal. Returns its exit status."""
    for text, stream in ((result.stdout, sys.stdout), (result.stderr, sys.stderr)):
        stream.write(printable(text) if stream.isatty() else text)
        stream.flush()
    if result.truncated:
        print("sandbox: stdout or stderr was cut at 1 MiB", file=sys.stderr)
    if result.outcome in STATUS:
        print(f"sandbox: ended by {result.outcome!r}", file=sys.stderr)
        return STATUS[result.outcome]
    return result.exit_code or 0


def main(argv: Sequence[str]) -> int:
    """Returns the exit status, as the module describes it."""
    options = parse(Options, argv, program="rocstar sandbox", description=__doc__)
    try:
        code, stdin = read(options.file)
        result = asyncio.run(run(code, stdin, options.limits()))
    except OSError as error:
        print(printable(f"sandbox: cannot read {options.file}: {error.strerror}"), file=sys.stderr)
        return NOT_RUN
    except (SandboxUnavailable, SyntaxError, ValueError) as error:
        print(printable(f"sandbox: {error}"), file=sys.stderr)
        return NOT_RUN
    if options.json:
        print(json.dumps(msgspec.to_builtins(result)))
        return 0
    return show(result)
