"""`rocstar sandbox`: a program from a file or from stdin, its output, and how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import pty
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROCSTAR, ROOT
from tests.support.sandbox_level import news

DEADLINE_S = 40.0


class Ended(NamedTuple):
    status: int | None
    stdout: str
    stderr: list[str]


async def sandboxed(*arguments: str, stdin: bytes = b"") -> Ended:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *ROCSTAR, "sandbox", *arguments, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            stdout, stderr = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
    return Ended(process.returncode, stdout.decode(), news(stderr.decode()))


async def test_a_file_is_run_and_gets_stdin(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_bytes(
        "# coding: latin-1\nimport sys\nprint('é', input())\nprint('no', file=sys.stderr)\nexit(3)".encode("latin-1")
    )
    assert await sandboxed(str(program), stdin="typed ∑\n".encode()) == (3, "é typed ∑\n", ["no"])


@pytest.mark.parametrize(
    ("code", "arguments", "status", "words"),
    [
        ("print(1)", (), 0, ()),
        ("print(1)\n1 / 0", (), 1, ("ZeroDivisionError",)),
        ("print(1)\nwhile True: pass", ("wall_s=0.3",), 124, ("timeout",)),
        ("print(1)\nx = bytearray(1 << 30)", ("memory_mb=100",), 137, ("MemoryError", "memory")),
    ],
)
async def test_stdin_is_run_and_its_end_is_the_exit_status(
    code: str, arguments: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    ended = await sandboxed("-", *arguments, stdin=code.encode())
    assert (ended.status, ended.stdout) == (status, "1\n")
    assert all(word in "\n".join(ended.stderr) for word in words)
    assert bool(ended.stderr) == bool(words)


async def test_the_whole_result_can_be_had_as_json() -> None:
    ended = await sandboxed("-", "json=true", stdin=b"print(1)\nexit(5)")
    result = json.loads(ended.stdout)
    assert (ended.status, result["outcome"], result["exit_code"], result["stdout"]) == (0, "error", 5, "1\n")
    assert result["jailed"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("nowhere.py",), 125, ("nowhere.py",)),
        (("-", "wall_s=0"), 2, ("wall_s", "0")),
        ((), 2, ("FILE",)),
    ],
)
async def test_what_cannot_be_run_is_said_in_one_line(
    arguments: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    ended = await sandboxed(*arguments)
    assert (ended.status, ended.stdout) == (status, "")
    assert all(word in ended.stderr[-1] for word in words)


async def test_help_names_the_exit_codes() -> None:
    ended = await sandboxed("--help")
    assert ended.status == 0
    assert [word for word in ("124", "125", "137", "wall_s", "memory_mb", "json") if word not in ended.stdout] == []


async def test_a_terminal_gets_no_orders_and_a_pipe_gets_what_was_written() -> None:
    code = "import sys\nprint('\\x1b[2J\\x9b\\u202e')\nprint('\\x1b]0;t\\x07', file=sys.stderr)"
    ended = await sandboxed("-", stdin=code.encode())
    assert ended.stdout == "\x1b[2J\x9b\u202e\n"
    ours, terminal = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *ROCSTAR,
            "sandbox",
            "-",
            stdin=asyncio.subprocess.PIPE,
            stdout=terminal,
            stderr=terminal,
            cwd=ROOT,
        )
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate(code.encode())
        shown = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(terminal)
    assert "\\x1b[2J\\x9b\\u202e" in shown
    assert "\\x1b]0;t\\x07" in shown
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(shown)
