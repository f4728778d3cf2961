"""A SQLite database that the model asks or changes: a world with the tools query and execute.

Invariants
- SQL of the model runs in a jail of its own for each call, never in this process. A database is bytes here.
- `query` can change nothing. `execute` changes the trajectory's own copy, and only if the statement succeeds; others
  begin from the same bytes and never see it.
- What a statement answers is bounded in rows, characters, time and memory. SQLite's errors are the model's.
- A database that is too large to travel with each call is a file in the jail (`SandboxConfig.data`). It can be asked,
  and nothing in the jail can change it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engine.ports import ToolReply, ToolSpec
from engine.tools.python_tool import clip
from engine.types import Prompt
from recipes.tools.guest import Guest, answer_of
from recipes.tools.workspace import seed_of, spec
from sandbox import Limits, Sandbox
from sandbox.require import at_least, positive, require, require_fields

NAME = "database"
SQL = Guest("sql.py")
MOST_GRADED_ROWS = 10_000
Row = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlLimits:
    """Limits of one statement."""

    wall_s: float = 2.0
    memory_bytes: int = 256 << 20
    database_bytes: int = 4 << 20
    """The most that a database may have which travels with each call, also after a statement. A larger one is read from
    a file, and cannot be changed."""
    rows: int = 20
    """Rows that the model reads."""
    output_chars: int = 2000
    """Characters that the model reads."""

    def __post_init__(self) -> None:
        require_fields(self, positive, "wall_s", "memory_bytes", "database_bytes", "rows")
        require("output_chars", self.output_chars, at_least(20))

    @property
    def jail(self) -> Limits:
        """Limits of the jail. Its output has room for a database, and for the rows that are graded."""
        room = 2 * self.database_bytes + (16 << 20)
        return Limits(
            wall_s=self.wall_s,
            cpu_s=self.wall_s,
            memory_bytes=self.memory_bytes + 4 * self.database_bytes,
            output_bytes=room,
            disk_bytes=room,
        )


@dataclass(frozen=True, slots=True)
class DatabaseFile:
    """A database that is read where it lies. path: in the jail, where a folder of this machine is mounted read-only."""

    path: str


Database = bytes | DatabaseFile
Find = Callable[[str], Database]
"""Returns a database by its name. Raises KeyError for an unknown one."""


class Databases:
    """The World of questions about a database: `Prompt.metadata["database"]` names it, and `find` has its bytes.

    A prompt whose answer needs no change is offered `query` only: `Prompt(tools=("query",), ...)`. It has to be, where
    the database is a file.
    """

    name = NAME
    tools: Sequence[ToolSpec] = (
        spec("query", "Runs one SELECT on the SQLite database and shows its first rows.", sql="the statement"),
        spec("execute", "Runs one SQLite statement that changes the database.", sql="the statement"),
    )

    def __init__(self, sandbox: Sandbox, find: Find, limits: SqlLimits | None = None) -> None:
        self.sandbox, self.find, self.limits = sandbox, find, limits or SqlLimits()

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[OpenDatabase]:
        database = database_of(prompt, self.find)
        if isinstance(database, DatabaseFile) and (prompt.tools is None or "execute" in prompt.tools):
            raise cannot_change(prompt, database)
        yield OpenDatabase(self, prompt.id, database)


def cannot_change(prompt: Prompt, database: DatabaseFile) -> ValueError:
    """Returns the error for a prompt that asks for changes of a database that cannot be copied."""
    return ValueError(
        f"prompt {prompt.id}: {database.path} is too large to be copied for each trajectory, so nothing can change it. "
        "Fix: give the prompt tools=('query',), or raise database_bytes"
    )


def database_of(prompt: Prompt, find: Find) -> Database:
    """Returns the database of a prompt. Raises ValueError, which names the prompt, if there is none."""
    name = prompt.metadata.get("database")
    try:
        return find(str(name))
    except KeyError:
        raise ValueError(f"prompt {prompt.id}: metadata['database'] names {name!r}, which is unknown") from None


class OpenDatabase:
    """The database of one trajectory."""

    def __init__(self, owner: Databases, prompt_id: str, content: Database) -> None:
        self._owner, self._prompt_id, self._beginning, self._content = owner, prompt_id, content, content
        self._turn = asyncio.Lock()
        self._calls = 0

    def state(self) -> bytes:
        """Returns the database, or nothing while it is as it began."""
        return b"" if self._content is self._beginning or isinstance(self._content, DatabaseFile) else self._content

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolReply:
        sql = arguments.get("sql")
        if not isinstance(sql, str) or set(arguments) != {"sql"}:
            return ToolReply(outcome="error", text="TypeError: give 'sql', a string, and nothing else", executed=False)
        async with self._turn:
            self._calls += 1
            seed, limits = seed_of(self._prompt_id, self._calls), self._owner.limits
            request = request_for(sql, limits.rows, limits, self._content)
            result = await SQL.run(self._owner.sandbox, tool, request, limits.jail, seed)
            if result.outcome != "ok":
                text = STOPPED.get(result.outcome, "Error: the statement was stopped").format(limits.wall_s)
                return ToolReply(outcome=result.outcome, text=text, jailed=result.jailed, queue_s=result.queue_s)
            said, files = answer_of(result.stdout)
            if "missing" in said:
                return ToolReply(outcome="lost", text=f"Error: the database is not there: {said['missing']}")
            self._content = files.get("database", self._content)
            outcome = "error" if "error" in said else "ok"
            text = said["error"] if "error" in said else table(said, limits.rows)
            text = clip(text, limits.output_chars)
            return ToolReply(outcome=outcome, text=text, jailed=result.jailed, queue_s=result.queue_s)


STOPPED = {
    "timeout": "TimeoutError: the statement was stopped after {:g} s",
    "memory": "MemoryError: the statement needs too much memory",
    "output": "Error: the statement answers too much",
}


def request_for(sql: str, rows: int, limits: SqlLimits, database: Database) -> str:
    sql = sql.encode("utf-8", "replace").decode()
    head = {"sql": sql, "most_rows": rows, "most_bytes": limits.database_bytes}
    if isinstance(database, DatabaseFile):
        return json.dumps({**head, "file": database.path}) + "\n"
    return json.dumps(head) + "\n" + database.decode("latin-1")


def table(said: Mapping[str, Any], most: int) -> str:
    """Returns rows as lines with bars between the cells.

    >>> table({"columns": ["name", "age"], "rows": [["Lea", 7], ["Tom", None]], "changed": -1}, 1)
    'name | age\\nLea | 7\\n(more rows)'
    """
    if not said["columns"]:
        return f"{max(0, said['changed'])} rows changed"
    lines = [" | ".join(said["columns"]), *(" | ".join(map(_cell, row)) for row in said["rows"][:most])]
    if len(said["rows"]) > most:
        lines.append("(more rows)")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "NULL"
        case {"blob": digits}:
            return f"x'{clip(digits, 60)}'"
        case {"text": both_ends}:
            return clip(both_ends, 200)
        case str():
            return clip(value, 200)
    return str(value)
