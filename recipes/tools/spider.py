"""Reads text-to-SQL sets in the shape of Spider and BIRD as prompts: rows with db_id, question and query (or SQL, sql),
and a folder with DB_ID/DB_ID.sqlite or DB_ID.sqlite.

Further .sqlite files in the folder of a database, as the test suites of Zhong et al. (2020) have them, are databases
with the same tables and other rows: an answer must be right on each of them, and the model sees the first one only.

A database above a bound does not travel with each call: SQLite reads it from the folder, which is mounted in the jail.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.types import Prompt
from recipes.tools.database import Database, DatabaseFile
from recipes.tools.generated_databases import ANSWER
from sandbox.wire import DATA

REFERENCE = ("query", "SQL", "sql")
WAL = b"\x02\x02"  # bytes 18 and 19 of a file whose changes go to a second one; SQLite opens none in memory


class DatabaseFolder:
    """Finds databases by name in a folder, which is the sandbox's (`SandboxConfig.data`).

    most_bytes: the largest that travels with each call (`SqlLimits.database_bytes`); larger ones are files in the jail.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = Path(folder), most_bytes
        self.find = lru_cache(maxsize=64)(self._find)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The databases by their paths in the folder. A name is looked up here and never made a path."""
        paths = [*self.folder.glob("*.sqlite"), *self.folder.glob("*/*.sqlite")]
        return {path.relative_to(self.folder).as_posix(): path for path in paths}

    def _find(self, name: str) -> Database:
        """Returns DB_ID or DB_ID/FILE. Raises KeyError if there is none, BadInput for one that the jail cannot read."""
        path = self._path(name)
        if path.stat().st_size <= self.most_bytes:
            return path.read_bytes()
        top, inside = self.folder.resolve(), path.resolve()
        if not inside.is_relative_to(top):
            raise BadInput(f"{path} is a link to {inside}, which the jail lacks. Fix: put the file into {self.folder}")
        folders = [each for each in inside.parents if each.is_relative_to(top)]
        if not inside.stat().st_mode & 0o4 or not all(each.stat().st_mode & 0o1 for each in folders):
            raise BadInput(f"{path} cannot be read in the jail, by another user. Fix: chmod -R a+rX {self.folder}")
        return DatabaseFile(f"{DATA}/{inside.relative_to(top).as_posix()}")

    def _path(self, name: str) -> Path:
        database, _, file = name.partition("/")
        wanted = [f"{database}/{file}.sqlite"] if file else [f"{database}/{database}.sqlite", f"{database}.sqlite"]
        for each in wanted:
            if each in self._files:
                return self._files[each]
        raise KeyError(name)

    def others(self, name: str) -> list[str]:
        """Returns the names of the further databases of one."""
        files = [each.removesuffix(".sqlite") for each in self._files if each.startswith(f"{name}/")]
        return sorted(file for file in files if file != f"{name}/{name}")

    def schema(self, name: str) -> str:
        """Returns the CREATE statements of a database. Raises BadInput for a file that is none."""
        content, path = self.find(name), self._path(name)
        with path.open("rb") as file:
            head = file.read(100)
        if not head:
            raise BadInput(f"{path} is empty. Fix: give it tables, or leave its questions out")
        if head[18:20] == WAL:
            raise BadInput(f"{path} is in WAL mode. Fix: sqlite3 FILE 'PRAGMA journal_mode = DELETE'")
        is_file = isinstance(content, DatabaseFile)
        database = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro&immutable=1" if is_file else ":memory:", uri=True
        )
        database.text_factory = lambda text: text.decode("utf-8", "backslashreplace")
        try:
            if isinstance(content, bytes):
                database.deserialize(content)
            rows = database.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL").fetchall()
        except sqlite3.Error as error:
            raise BadInput(f"{path} is no SQLite database: {error}") from error
        finally:
            database.close()
        return ";\n".join(str(sql) for (sql,) in rows) + ";"


def read_questions(path: Path, databases: DatabaseFolder) -> Iterator[Prompt]:
    """Yields a prompt for each row of a JSON or JSONL file. Raises BadInput, which names file, row and field."""
    for number, row in enumerate(_rows(path)):
        where = f"{path}, row {number}"
        if not isinstance(row, Mapping):
            raise BadInput(f"{where} must be an object, got {row!r:.60}")
        name, question = (_field(row, (field,), where) for field in ("db_id", "question"))
        try:
            schema = databases.schema(name)
        except KeyError:
            raise BadInput(f"{where}: db_id {name!r} has no {name}/{name}.sqlite in {databases.folder}") from None
        evidence = f" {row['evidence']}" if row.get("evidence") else ""
        metadata = {"database": name, "sql": _field(row, REFERENCE, where), "also": databases.others(name)}
        content = f"{schema}\n\n{question}{evidence} {ANSWER}"
        messages = ({"role": "user", "content": content},)
        tools = ("query",)
        yield Prompt(
            id=f"{path.stem}-{number}", messages=messages, answer="", tools=tools, source=name, metadata=metadata
        )


def _rows(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line]
        )
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path} is neither a JSON list nor JSON lines: {error}") from error
    if not rows:
        raise BadInput(f"{path} has no rows")
    return list(rows)


def _field(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            return str(row[name])
    raise BadInput(f"{where} has no text under {' or '.join(names)}; it has {', '.join(map(str, row))}")
