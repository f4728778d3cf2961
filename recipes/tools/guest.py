"""Programs of ours that run in the jail (`inside/`), ready to be sent: compiled here, so that no call compiles them."""

from __future__ import annotations

import json
import marshal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox import TIERS, Limits, Sandbox, Tier, ToolResult

INSIDE = Path(__file__).with_name("inside")
# The warmed interpreter for these programs: without it each call of SQLite imports it anew, which costs 20 ms.
TOOLS = Tier(name="tools", preload=(*TIERS[0].preload, "sqlite3"))
# Standard input holds the bytecode, the source for a guest of another version of Python, and the request. Bytecode in
# the program's own text would have to be parsed, which costs more than all else.
START = """import marshal, os, sys
compiled, source = os.read(0, {code_bytes}), os.read(0, {source_bytes})
if sys.implementation.cache_tag == {version!r}:
    exec(marshal.loads(compiled.decode().encode("latin-1")), globals())
else:
    exec(compile(source, {name!r}, "exec"), globals())
{command}()
"""


class Guest:
    """Files of `inside/`, run in one namespace, whose commands take a request and print their answer.

    >>> Guest("workspace.py", "grading.py").name
    'workspace.py, grading.py'
    """

    def __init__(self, *files: str) -> None:
        self.name = ", ".join(files)
        self._source = "\n".join((INSIDE / name).read_text() for name in files)
        self._code = marshal.dumps(compile(self._source, self.name, "exec")).decode("latin-1")

    async def run(self, sandbox: Sandbox, command: str, request: str, limits: Limits, seed: int = 0) -> ToolResult:
        """Runs a command in a jail of its own. seed: decides what looks random, so that a rerun answers alike."""
        start = START.format(
            code_bytes=len(self._code.encode()),
            source_bytes=len(self._source.encode()),
            version=sys.implementation.cache_tag,
            name=self.name,
            command=command,
        )
        return await sandbox.run(start, self._code + self._source + request, limits, seed=seed)


def request_of(head: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> str:
    """Returns a request: a line of JSON, then the contents of files, each byte as a Latin-1 character."""
    files = files or {}
    sizes = [[path, len(content)] for path, content in files.items()]
    return json.dumps({**head, "files": sizes}) + "\n" + b"".join(files.values()).decode("latin-1")


def answer_of(printed: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns the line of JSON and the files of an answer, in the form of a request. Raises ValueError for none."""
    line, _, body = printed.partition("\n")
    try:
        head = json.loads(line)
        content, at, files = body.encode("latin-1"), 0, {}
        for path, size in head.get("files", ()):
            files[str(path)] = content[at : at + size]
            at += size
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"no answer of a guest: {error}") from error
    if at != len(content):
        raise ValueError(f"the files of an answer have {at} bytes, {len(content)} came")
    return head, files
