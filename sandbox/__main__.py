"""`python -m sandbox FILE`: run a Python program in the jail, and end as it did.

The program's output comes when it has ended. On a terminal, what one would obey (control characters) is shown as
escapes; in a file or a pipe the output is as it was. The exit status is the program's own; 124 after a time limit, 137
when another limit or a signal ended it, 125 when it could not be run. A line on stderr says so in these cases.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import msgspec

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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, with `limits` made of them. SystemExit for wrong ones."""
    default = Limits()
    parser = argparse.ArgumentParser(
        prog="python -m sandbox",
        description="Run a Python program in the jail, and end as it did.",
        epilog="Exit status: the program's own; 124 after a time limit, 137 when another limit or a signal ended it, "
        "125 when it could not be run.",
    )
    parser.add_argument("file", help="the program, which gets this command's stdin; -: stdin is the program")
    parser.add_argument("--wall-s", type=float, default=default.wall_s, help="limit of time (default: %(default)s)")
    parser.add_argument(
        "--memory-mb", type=int, default=default.memory_bytes >> 20, help="limit of memory (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON instead, and exit with 0")
    options = parser.parse_args(arguments)
    try:
        options.limits = Limits(
            wall_s=options.wall_s, cpu_s=options.wall_s, memory_bytes=options.memory_mb << 20, output_bytes=1 << 20
        )
    except ValueError as error:
        parser.error(str(error))
    return options


def read(file: str) -> tuple[str, str]:
    """The program and its stdin. OSError, SyntaxError or UnicodeDecodeError when it cannot be read as Python."""
    on_terminal = sys.stdin is None or (file != "-" and sys.stdin.isatty())
    given = b"" if on_terminal else sys.stdin.buffer.read()
    if file == "-":
        return importlib.util.decode_source(given), ""
    return importlib.util.decode_source(Path(file).read_bytes()), given.decode(errors="replace")


async def run(code: str, stdin: str, limits: Limits) -> ToolResult:
    async with Sandbox(SandboxConfig(slots=1, limits=limits)) as box:
        return await box.run(code, stdin)


def show(result: ToolResult) -> int:
    """Print what the program printed, on a terminal with escapes for what one would obey; its exit status."""
    for text, stream in ((result.stdout, sys.stdout), (result.stderr, sys.stderr)):
        stream.write(printable(text) if stream.isatty() else text)
        stream.flush()
    if result.truncated:
        print("sandbox: stdout or stderr was cut at 1 MiB", file=sys.stderr)
    if result.outcome in STATUS:
        print(f"sandbox: ended by {result.outcome!r}", file=sys.stderr)
        return STATUS[result.outcome]
    return result.exit_code or 0


def main() -> int:
    options = parse()
    try:
        code, stdin = read(options.file)
        result = asyncio.run(run(code, stdin, options.limits))
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


if __name__ == "__main__":
    sys.exit(main())
