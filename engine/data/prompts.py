"""Prompts from data files: JSON lines, parquet, folders saved by Hugging Face `datasets`, and data sets of the hub.

Invariants
- The stream is a function of rows and arguments: the same seed gives the same prompts in the same order everywhere.
- No two prompts of a stream share an id, whatever the epoch: `gsm8k-17#2` is row 17 (from 0) in the second epoch.
- Skipping reads no rows, so a resumed run begins at once.
- A row that is no prompt ends the stream with a ValueError naming file, row, field and value. The first rows and the
  last one are checked before the stream begins.

    train = read_prompts("gsm8k.train.jsonl", answer=after_hashes, start=500, seed=0, epochs=None)
    held_out = list(read_prompts("openai/gsm8k/main:test", answer=after_hashes, limit=500))
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from engine.data.tables import Order, Table, WrittenFloat, name_of, open_table, shown, shuffled
from engine.types import Prompt, PromptLimits
from sandbox.require import at_least, none_or, require

Field = str | Callable[[Mapping[str, Any]], Any]
"""The source of a value: a column, a field of a column ("reward_model.ground_truth"), or a function of the row."""

# The columns of questions and answers by the conventions of data sets; the first one that a file has is used.
# rStar2-Agent's release and verl: prompt, reward_model.ground_truth. GSM8K: question, answer. MATH-500 and AIME:
# problem, answer. MAWPS: input, target.
QUESTIONS = ("question", "problem", "messages", "prompt", "input")
ANSWERS = ("reward_model.ground_truth", "answer", "target")
# Further columns of that release, which other files lack.
REWARD, SOURCE, METADATA = "reward_model.style", "data_source", ("ability", "extra_info")

DEEPEST = 100  # levels of lists and objects in the metadata of a prompt
_CHECKED = 8  # rows that are checked before the stream begins, besides the last one


def read_prompts(
    path: str | Path,
    *,
    question: Field | None = None,
    answer: Field | None = None,
    tools: Field | None = None,
    reward: Field | None = None,
    source: Field | None = None,
    metadata: Sequence[str] | None = None,
    limits: Field | None = None,
    system: str | None = None,
    name: str | None = None,
    start: int = 0,
    limit: int | None = None,
    seed: int | None = None,
    epochs: int | None = 1,
) -> Prompts:
    """Returns a stream of the prompts in a file, in all files of a folder, in a folder saved by `datasets`, or in a
    data set of the Hugging Face hub (ID/CONFIG:SPLIT, see `engine.data.tables.HubSet`).

    question: text, or a list of chat messages. answer: text or a number. tools, reward, source: as in `Prompt`. If one
    of these is None, it comes from the column in which data sets usually have it (QUESTIONS, ANSWERS, REWARD, SOURCE,
    METADATA); without such a column, source is `name`. metadata: columns that the prompt keeps, for a reward of yours.
    limits: an object with fields of `PromptLimits`. system: a system message for conversations without one. name: the
    beginning of ids, by default the name of the file. start, limit: the first row, and how many; two streams that do
    not overlap hold rows out. seed: shuffles each epoch differently; None keeps the order of the file. epochs: None
    repeats for ever.

    Raises ValueError as above.
    """
    for option, value, least in (("start", start, 0), ("limit", limit, 1), ("epochs", epochs, 1)):
        require(option, value, none_or(at_least(least)))
    table = open_table(path)
    rows = range(len(table))[start:][:limit]
    if not rows:
        raise ValueError(f"{path}: start must be below its {len(table)} rows, got {start}")
    columns = table.columns
    fields = Fields(
        question=question or _conventional("question", QUESTIONS, columns, path),
        answer=answer or _conventional("answer", ANSWERS, columns, path),
        tools=tools,
        reward=reward or _if_there(REWARD, columns),
        source=source or _if_there(SOURCE, columns),
        metadata=[column for column in METADATA if column in columns] if metadata is None else list(metadata),
        limits=limits,
    )
    _select(table, fields, path)
    prompts = Prompts(table, fields, name=name or name_of(path), system=system, rows=rows, seed=seed, epochs=epochs)
    for row in dict.fromkeys([*rows[:_CHECKED], rows[-1]]):
        prompts.of_row(row, epoch=1)
    return prompts


def after_hashes(row: Mapping[str, Any]) -> str:
    """Returns the answer of a GSM8K row: the text after `####`, without thousands separators.

    >>> after_hashes({"question": "...", "answer": "6 * 200 = <<6*200=1200>>1200\\n#### 1,200"})
    '1200'
    """
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"no '####' in {shown(row['answer'])}")
    return answer.strip().replace(",", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """The sources of the parts of a prompt."""

    question: Field
    answer: Field
    tools: Field | None
    reward: Field | None
    source: Field | None
    metadata: Sequence[str]
    limits: Field | None = None


def _conventional(option: str, known: Sequence[str], columns: Sequence[str], path: str | Path) -> str:
    """Returns the first known field that a file has. Raises ValueError if it has none."""
    for field in known:
        if _column(field, columns) is not None:
            return field
    raise ValueError(
        f"{path}: no column is known to hold the {option}; it has {', '.join(columns)}. "
        f"Fix: give {option}=, a column's name or a function of the row"
    )


def _if_there(field: str, columns: Sequence[str]) -> str | None:
    return None if _column(field, columns) is None else field


def _select(table: Table, fields: Fields, path: str | Path) -> None:
    """Restricts reading to the columns that are used, unless a function may look at any of them.

    Raises ValueError for a column that is missing.
    """
    given = [fields.question, fields.answer, fields.tools, fields.reward, fields.source, fields.limits]
    given += fields.metadata
    columns: dict[str, None] = {}
    for field in given:
        if isinstance(field, str):
            column = _column(field, table.columns)
            if column is None:
                raise ValueError(f"{path}: no column {field!r}; it has {', '.join(table.columns)}")
            columns[column] = None
    if not any(callable(field) for field in given):
        table.select(list(columns))


def _column(field: str, columns: Sequence[str]) -> str | None:
    """Returns the column that holds a field, if there is one: "reward_model" for "reward_model.ground_truth"."""
    return next((column for column in (field, field.partition(".")[0]) if column in columns), None)


class Prompts(Iterator[Prompt]):
    """The stream that `read_prompts` returns. rows: their numbers in the table. position: how many were drawn."""

    def __init__(
        self,
        table: Table,
        fields: Fields,
        *,
        name: str,
        system: str | None,
        rows: range,
        seed: int | None,
        epochs: int | None,
    ) -> None:
        self.name = name
        self.rows = rows
        self.epochs = epochs
        self.position = 0
        self._table = table
        self._fields = fields
        self._system = system
        self._seed = seed
        self._order = lru_cache(1)(self._shuffled)

    @property
    def remaining(self) -> int | None:
        """How many prompts are to come; None for an endless stream."""
        return None if self.epochs is None else self.epochs * len(self.rows) - self.position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prompt:
        if self.remaining == 0:
            raise StopIteration
        epoch, at = divmod(self.position, len(self.rows))
        row = self.rows[at] if self._seed is None else int(self._order(epoch)[at])
        prompt = self.of_row(row, epoch + 1)
        self.position += 1
        return prompt

    def skip(self, count: int) -> int:
        """Skips this many prompts, or all that remain, without reading them. Returns how many were skipped."""
        skipped = count if self.remaining is None else min(count, self.remaining)
        self.position += skipped
        return skipped

    def of_row(self, row: int, epoch: int) -> Prompt:
        """Returns the prompt of a row. Raises ValueError naming file, row and field."""
        read = _RowReader(self._table.row(row), lambda: self._table.where(row))
        fields = self._fields
        prompt_id = f"{self.name}-{row}" if epoch == 1 else f"{self.name}-{row}#{epoch}"
        return read.prompt(
            id=prompt_id,
            messages=read.messages(fields.question, self._system),
            answer=read.text("answer", fields.answer),
            tools=read.names("tools", fields.tools),
            reward=read.text_if_there("reward", fields.reward, REWARD) or "",
            source=read.text_if_there("source", fields.source, SOURCE) or self.name,
            metadata={column: read.plain(column) for column in fields.metadata},
            limits=read.limits(fields.limits),
        )

    def _shuffled(self, epoch: int) -> Order:
        assert self._seed is not None
        order = shuffled(len(self._table), self._seed, epoch)
        return order[(order >= self.rows.start) & (order < self.rows.stop)]


@dataclass(frozen=True, slots=True)
class _RowReader:
    """Reads the parts of a prompt from a row. Raises ValueError naming the row's place, the field and its value."""

    row: Mapping[str, Any]
    where: Callable[[], str]

    def prompt(self, **parts: Any) -> Prompt:
        try:
            return Prompt(**parts)
        except ValueError as error:
            raise ValueError(f"{self.where()}: {error}") from error

    def messages(self, field: Field, system: str | None) -> tuple[Mapping[str, str], ...]:
        value = self._value("question", field)
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, Sequence) or not value or not all(isinstance(each, Mapping) for each in value):
            raise self._wrong("question", field, "must be text or a list of messages", value)
        # Parquet and Arrow give every message all fields; those that do not apply are None.
        messages = [{name: part for name, part in message.items() if part is not None} for message in value]
        if not all({"role", "content"} <= message.keys() for message in messages):
            raise self._wrong("question", field, "each message needs role and content", value)
        if not str(messages[-1]["content"]).strip():
            raise self._wrong("question", field, "must not be empty", value)
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return tuple(messages)

    def text(self, option: str, field: Field) -> str:
        value = self._value(option, field)
        text = _text(value)
        if text is None:
            raise self._wrong(option, field, "must be text or a number", value)
        if not text.strip() and not callable(field):
            raise self._wrong(option, field, "must not be empty", text)
        return text

    def text_if_there(self, option: str, field: Field | None, conventional: str) -> str | None:
        """Returns None if no field is given, or if the row lacks a conventional one, which only some rows may have."""
        if field is None or (field == conventional and self._conventional(conventional) is None):
            return None
        return self.text(option, field)

    def _conventional(self, field: str) -> Any:
        value: Any = self.row
        if field in self.row:
            return self.row[field]
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def names(self, option: str, field: Field | None) -> tuple[str, ...] | None:
        value = None if field is None else self._value(option, field)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self._wrong(option, field, "must be a list of names", value)
        return tuple(value)

    def limits(self, field: Field | None) -> PromptLimits | None:
        value = None if field is None else self._value("limits", field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong("limits", field, "must be an object", value)
        try:
            return PromptLimits(**{name: limit for name, limit in value.items() if limit is not None})
        except (TypeError, ValueError) as error:
            raise self._wrong("limits", field, str(error), value) from error

    def plain(self, column: str) -> Any:
        value = self._value(column, column)
        try:
            return _plain(value)
        except TypeError as error:
            raise self._wrong("metadata", column, str(error), value) from error

    def _value(self, option: str, field: Field) -> Any:
        if callable(field):
            try:
                return field(self.row)
            except Exception as error:
                raise ValueError(f"{self.where()}: {option}: {type(error).__name__}: {error}") from error
        value: Any = self.row
        if field in self.row:
            return self.row[field]
        for part in field.split("."):
            if not isinstance(value, Mapping) or part not in value:
                there = f"it has {', '.join(value)}" if isinstance(value, Mapping) else f"it is {shown(value)}"
                raise ValueError(f"{self.where()}: no {part!r} for {option} ({field}): {there}")
            value = value[part]
        return value

    def _wrong(self, option: str, field: Field | None, cause: str, value: Any) -> ValueError:
        column = "" if field is None or callable(field) or field == option else f" ({field})"
        return ValueError(f"{self.where()}: {option}{column}: {cause}, got {shown(value)}")


def _text(value: Any) -> str | None:
    """Returns text or a number as text, with all digits of a JSON file; None for anything else. 43.0 becomes "43"."""
    match value:
        case str():
            return value
        case bool():
            return None
        case int():
            return str(value)
        case WrittenFloat() if not value.is_integer() or abs(value) >= 2**53:
            return value.written.removesuffix(".0")
        case float() if value.is_integer():
            return str(int(value))
        case float() if math.isfinite(value):
            return str(value)
        case decimal.Decimal() if value.is_finite():
            text = format(value, "f")
            return text.rstrip("0").rstrip(".") if "." in text else text
    return None


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns a value as JSON types: dates, decimals and integers of more than 64 bits become text.

    Raises TypeError for a value that the journal cannot hold, or that is nested too deeply to be walked.
    """
    if depth > DEEPEST:
        raise TypeError(f"is nested more than {DEEPEST} deep")
    match value:
        case None | bool() | str():
            return value
        case float():
            return float(value)
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return str(value)
        case Mapping():
            return {str(name): _plain(part, depth + 1) for name, part in value.items()}
        case list() | tuple():
            return [_plain(part, depth + 1) for part in value]
    raise TypeError(f"cannot be kept with the prompt: it is of type {type(value).__name__}")
