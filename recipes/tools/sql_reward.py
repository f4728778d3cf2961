"""Rewards of questions about a database: by the rows of the model's SQL, or by the database that it has left.

Invariants
- The reference runs in jails of its own and is never where the model's SQL runs. Rows are compared here.
- The kernel says whether a statement ended by itself. What we lost is no verdict.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engine.ports import GraderUnavailable
from engine.types import Prompt, Trajectory
from recipes.tools.database import (
    MOST_GRADED_ROWS,
    NAME,
    SQL,
    Database,
    DatabaseFile,
    Find,
    SqlLimits,
    cannot_change,
    database_of,
    request_for,
)
from recipes.tools.guest import answer_of
from sandbox import Sandbox, SandboxUnavailable
from sandbox.require import one_of, require

Order = Literal["reference", "always", "never"]
KEPT = 4096  # reference answers that are kept
ANSWERS = (
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"```sql\s(.*?)```", re.DOTALL | re.IGNORECASE),
)
FENCED = re.compile(r"```\w*\s(.*?)```", re.DOTALL)  # a block within <answer>
DIGITS = 6  # digits of a fraction that are compared, the zeros behind the point of 0.00012 not counted


class WrongReference(ValueError):
    """The reference of a prompt does not run."""


class SqlReward:
    """Is 1 for a right answer, else 0.

    A prompt with `metadata["sql"]` asks for a statement, in <answer> or in a block ```sql of the last turn. It is right
    if its rows are those of the reference, on `metadata["database"]` and on each one that `metadata["also"]` names and
    the model never sees, so that a guessed number does not pass. A prompt with `metadata["changes"]`, a list of
    statements, asks for another state: all tables must hold what the reference leaves in them.

    A reference without rows, or that changes nothing, has no grade: a model that does nothing would be right. Calls
    raise GraderUnavailable then, WrongReference for a reference that does not run.

    order: whether rows must come in the order of the reference: where it has ORDER BY, always, or never.
    """

    def __init__(
        self, sandbox: Sandbox, find: Find, limits: SqlLimits | None = None, *, order: Order = "reference"
    ) -> None:
        require("order", order, one_of("reference", "always", "never"))
        self._sandbox, self._find, self._limits, self._order = sandbox, find, limits or SqlLimits(), order
        self._wanted: OrderedDict[tuple[str, str], Any] = OrderedDict()

    async def __call__(self, trajectory: Trajectory) -> float:
        metadata = trajectory.prompt.metadata
        if "changes" in metadata:
            return float(await self._leaves_the_same(trajectory))
        if not isinstance(metadata.get("sql"), str):
            raise ValueError(f"prompt {trajectory.prompt.id}: metadata needs 'sql' or 'changes', got {[*metadata]}")
        sql = answered_sql(trajectory.turn_texts[-1])
        if sql is None:
            return 0.0
        names = [metadata["database"], *metadata.get("also", ())]
        any_rows = False
        for name in names:
            wanted = await self._wanted_rows(trajectory.prompt, name)
            if not await self._answers_the_same(trajectory, name, sql, wanted):
                return 0.0
            any_rows = any_rows or bool(wanted["rows"])
        if not any_rows:
            raise GraderUnavailable(f"prompt {trajectory.prompt.id}: the reference has no rows in {', '.join(names)}")
        return 1.0

    async def ungraded(self, prompt: Prompt) -> str:
        """Returns why a prompt has no grade, "" if it has one. Raises WrongReference if its reference does not run."""
        metadata = prompt.metadata
        if "changes" in metadata:
            return "" if (await self._wanted_state(prompt))["changed"] else "the reference changes nothing"
        names = [metadata["database"], *metadata.get("also", ())]
        rows = [len((await self._wanted_rows(prompt, name))["rows"]) for name in names]
        return "" if any(rows) else f"the reference has no rows in {', '.join(names)}"

    async def _wanted_rows(self, prompt: Prompt, name: str) -> dict[str, Any]:
        reference = prompt.metadata["sql"]
        key = (name, reference)
        if key not in self._wanted:
            said = await self._run("query", reference, self._find(name))
            self._keep(key, _checked(said, prompt, reference))
        wanted: dict[str, Any] = self._wanted[key]
        return wanted

    async def _answers_the_same(self, trajectory: Trajectory, name: str, sql: str, wanted: Mapping[str, Any]) -> bool:
        said = await self._run("query", sql, self._find(name), most_rows=len(wanted["rows"]))
        if said is None or "error" in said or len(said["columns"]) != len(wanted["columns"]):
            return False
        reference = trajectory.prompt.metadata["sql"]
        ordered = self._order == "always" or (self._order == "reference" and is_ordered(reference))
        return same_rows(wanted["rows"], said["rows"], ordered=ordered)

    async def _leaves_the_same(self, trajectory: Trajectory) -> bool:
        wanted = await self._wanted_state(trajectory.prompt)
        left = trajectory.states.get(NAME)
        if left is None:
            raise ValueError(f"the trajectory has no database. Fix: job.rollouts([Databases(...)]), named {NAME!r}")
        said = await self._run("contents", "", left or database_of(trajectory.prompt, self._find))
        if said is None or "error" in said:
            return False
        if not _same_tables(wanted["tables"], said["tables"]):
            return False
        if not wanted["changed"]:
            raise GraderUnavailable(f"prompt {trajectory.prompt.id}: the reference changes nothing")
        return True

    async def _wanted_state(self, prompt: Prompt) -> dict[str, Any]:
        """Returns the tables that the reference leaves, and whether they are others than before."""
        key = (prompt.metadata["database"], "\n".join(prompt.metadata["changes"]))
        if key not in self._wanted:
            before = database = database_of(prompt, self._find)
            if isinstance(before, DatabaseFile):
                raise cannot_change(prompt, before)
            for statement in prompt.metadata["changes"]:
                database = await self._changed(prompt, statement, database)
            beginning, end = [
                _checked(await self._run("contents", "", each), prompt, "contents") for each in (before, database)
            ]
            end["changed"] = not _same_tables(beginning["tables"], end["tables"])
            self._keep(key, end)
        wanted: dict[str, Any] = self._wanted[key]
        return wanted

    async def _changed(self, prompt: Prompt, statement: str, database: Database) -> bytes:
        said, files = await self._ask("execute", statement, database)
        _checked(said, prompt, statement)
        return files["database"]

    async def _run(
        self, command: str, sql: str, database: Database, most_rows: int = MOST_GRADED_ROWS
    ) -> dict[str, Any] | None:
        return (await self._ask(command, sql, database, most_rows))[0]

    async def _ask(
        self, command: str, sql: str, database: Database, most_rows: int = MOST_GRADED_ROWS
    ) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
        """Returns what a statement answers, None if a limit ended it, and the files that it returns.

        most_rows: it answers one more where there are more, so a model's answer is no longer than its reference.
        """
        request = request_for(sql, most_rows, self._limits, database)
        try:
            result = await SQL.run(self._sandbox, command, request, self._limits.jail)
        except SandboxUnavailable as error:
            raise GraderUnavailable(str(error)) from error
        if result.outcome == "lost":
            raise GraderUnavailable("the sandbox lost a statement")
        said, files = answer_of(result.stdout) if result.outcome == "ok" else (None, {})
        if said is not None and "missing" in said:
            raise GraderUnavailable(f"a database is not there: {said['missing']}")
        return said, files

    def _keep(self, key: tuple[str, str], wanted: Any) -> None:
        self._wanted[key] = wanted
        if len(self._wanted) > KEPT:
            self._wanted.popitem(last=False)


def _checked(said: dict[str, Any] | None, prompt: Prompt, reference: str) -> dict[str, Any]:
    """Returns what a reference answers. Raises WrongReference for one that no answer could equal."""
    problem = "it was stopped by a limit" if said is None else said.get("error")
    if said is not None and any(len(each.get("rows", ())) > MOST_GRADED_ROWS for each in (said, *_tables(said))):
        problem = f"it has more than {MOST_GRADED_ROWS} rows"
    if said is None or problem:
        raise WrongReference(
            f"prompt {prompt.id}: the reference {reference!r:.200} does not run: {problem}. "
            "Fix: leave the prompt out, or correct it"
        )
    return said


def _tables(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*said.get("tables", {}).values()]


def answered_sql(text: str) -> str | None:
    """Returns the last statement that a turn answers with.

    >>> answered_sql("So: <answer>SELECT 1;</answer>")
    'SELECT 1'
    """
    for form in ANSWERS:
        if answers := form.findall(text):
            answer = answers[-1].strip()
            fenced = FENCED.fullmatch(answer)
            return str(fenced[1] if fenced else answer).strip().rstrip(";").strip()
    return None


def is_ordered(sql: str) -> bool:
    """Returns whether the outermost SELECT has an ORDER BY.

    >>> is_ordered("SELECT a FROM (SELECT a FROM t ORDER BY b)"), is_ordered("SELECT a FROM t ORDER BY (b)")
    (False, True)
    """
    text, depth, outer = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"", "''", sql), 0, ""
    for character in text:
        depth += (character == "(") - (character == ")")
        outer += character if depth == 0 else " "
    return re.search(r"\border\s+by\b", outer, re.IGNORECASE) is not None


def same_rows(wanted: Sequence[Sequence[Any]], rows: Sequence[Sequence[Any]], *, ordered: bool) -> bool:
    """Returns whether both have the same rows; columns count by their order, not by their names.

    >>> same_rows([[1, "a"], [2, "b"]], [[2.0, "b"], [1, "a"]], ordered=False)
    True
    """
    one, two = ([tuple(map(_key, row)) for row in each] for each in (wanted, rows))
    return one == two if ordered else Counter(one) == Counter(two)


def _key(cell: Any) -> Any:
    match cell:
        case bool() | int() | float():
            if 1e-12 < abs(cell) < 1:
                return ("number", float(f"{cell:.{DIGITS}g}"))
            return ("number", cell if abs(cell) > 2**53 else round(float(cell), DIGITS))
        case dict():
            return tuple(sorted(cell.items()))
    return cell


def _same_tables(wanted: Mapping[str, Any], tables: Mapping[str, Any]) -> bool:
    if wanted.keys() != tables.keys() or any("error" in table for table in tables.values()):
        return False
    return all(
        wanted[name]["columns"] == tables[name]["columns"]
        and same_rows(wanted[name]["rows"], tables[name]["rows"], ordered=False)
        for name in wanted
    )
