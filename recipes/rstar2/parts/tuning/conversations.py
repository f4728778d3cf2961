"""Reads the conversations of supervised fine-tuning, and says what is learnt of them, in which order.

A row has `messages` (OpenAI's form: assistant messages may have `tool_calls`), and perhaps `tools` (JSON text: a list
of OpenAI's tool schemas, which are shown), `source` and `id`.

Promises
- A row that is no conversation is refused with file, row and field.
- Only assistant turns are learnt. A conversation is rendered whole or not at all.
- Which conversations a step trains depends on files, seed and step alone, so a run can begin at any step.
- Memory is bounded: of each row its length is kept, 4 bytes.
"""

from __future__ import annotations

import io
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algo.sft import Example
from engine.atomic_files import write_whole
from engine.data.tables import Order, open_table, shown, shuffled
from engine.errors import BadInput
from engine.rollout.chat_template import ChatConfig, ChatTemplate, TemplateError
from engine.rollout.tool_call_messages import normalize, without_nulls
from engine.rollout.tool_call_parser import OPEN

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A conversation to learn from. where: its file and row, for messages. tools: the schemas that are shown."""

    where: _Where
    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Mapping[str, Any], ...]
    source: str
    id: str

    @property
    def first_answer(self) -> int:
        """The number of the first message of the assistant, or of all messages where there is none."""
        roles = [message["role"] for message in self.messages]
        return roles.index("assistant") if "assistant" in roles else len(roles)

    @property
    def begins_with_call(self) -> bool:
        """True where the first turn of the assistant calls a tool."""
        first = self.messages[self.first_answer : self.first_answer + 1]
        return any(message.get("tool_calls") or OPEN in message["content"] for message in first)


class Conversations:
    """Reads the rows of several files, numbered one after the other. Raises BadInput for a file that has none."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        try:
            self._tables = [open_table(path) for path in paths]
        except ValueError as error:
            raise BadInput(str(error)) from error
        for path, table in zip(paths, self._tables, strict=True):
            if "messages" not in table.columns:
                raise BadInput(
                    f"{path}: no column 'messages'; it has {', '.join(table.columns)}. Fix: give a file in the SFT "
                    "format, as recipes/rstar2/data.py writes it"
                )
            table.select([column for column in ("messages", "tools", "source", "id") if column in table.columns])
        self._ends = list(itertools.accumulate(map(len, self._tables)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Conversation:
        """Raises BadInput naming file, row and field."""
        at = int(np.searchsorted(self._ends, number, side="right"))
        table, row = self._tables[at], number - ([0, *self._ends][at])
        where = _Where(table, row)
        try:
            fields = table.row(row)
        except ValueError as error:
            raise BadInput(str(error)) from error
        return Conversation(
            where=where,
            messages=_messages(fields.get("messages"), where),
            tools=_tools(fields.get("tools"), where),
            source=str(fields.get("source") or self.paths[at].stem),
            id=str(fields.get("id") or f"{self.paths[at].stem}-{row}"),
        )

    def order(self, seed: int, epoch: int) -> Order:
        """Returns all numbers, shuffled over all files."""
        return shuffled(len(self), seed, epoch)


class _Where:
    """File and row, which are looked up when they are asked for: that takes long in a large file."""

    def __init__(self, table: Any, row: int) -> None:
        self._table, self._row = table, row

    def __str__(self) -> str:
        return self._table.where(self._row)


def _messages(value: Any, where: _Where) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadInput(f"{where}: messages: must be a list of messages, got {shown(value)}")
    try:
        return normalize(value)
    except ValueError as error:
        raise BadInput(f"{where}: messages: {error}") from error


def _tools(value: Any, where: _Where) -> tuple[Mapping[str, Any], ...]:
    tools = value or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where}: tools: not JSON ({error}): {shown(value)}") from error
    else:
        tools = without_nulls(tools)
    if not isinstance(tools, list) or not all(map(_is_schema, tools)):
        raise BadInput(f"{where}: tools: must be a list of OpenAI's tool schemas, got {shown(value)}")
    return tuple(tools)


def _is_schema(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


class Renderer:
    """Renders conversations to the tokens that a model reads and learns, by the chat template of its checkpoint.

    A template may open each turn of the assistant, with <reason> say. Conversations in which the assistant never begins
    so are no problems to solve; they are rendered with reason=false where the template knows that.
    """

    def __init__(self, model: Path) -> None:
        """Raises BadInput for a checkpoint whose tokenizer has no chat template that can be used."""
        self._model = model
        try:
            self.problems = ChatTemplate.load(model)
        except TemplateError as error:
            raise self._unusable(error) from error
        self.plain = self.problems
        if self.problems.prefill:
            with suppress(TemplateError):  # the template may have no such variable
                self.plain = ChatTemplate.load(model, ChatConfig(template_arguments={"reason": False}))

    def chat(self, conversation: Conversation) -> ChatTemplate:
        prefill = self.problems.prefill
        contents = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
        chat = self.problems if any(content.startswith(prefill) for content in contents) else self.plain
        try:
            return chat.showing(conversation.tools) if conversation.tools else chat
        except TemplateError as error:
            raise self._unusable(error) from error

    def example(self, conversation: Conversation) -> Example:
        """Raises BadInput naming file, row, message and field."""
        chat = self.chat(conversation)
        try:
            return Example.of(chat.conversation(conversation.messages))
        except ValueError as error:
            advice = "Fix: correct the row, or take it out"
            raise BadInput(f"{conversation.where}: messages: {error}. {advice}") from error

    def prompt(self, conversation: Conversation) -> list[int]:
        """Returns the tokens that the assistant's first turn follows."""
        return self.chat(conversation).prompt_ids(conversation.messages[: conversation.first_answer])

    def _unusable(self, error: TemplateError) -> BadInput:
        command = f"python recipes/rstar2/template.py model={self._model} output=..."
        return BadInput(f"model: the chat template of {self._model} cannot be used: {error}. Fix: {command}")


class Plan:
    """Decides which conversations are trained, and when.

    Those longer than max_tokens are left out (too_long: how many), and `held_out_rows` others, drawn by seed. trained
    and held_out: numbers of conversations, ascending. Raises BadInput when fewer than a batch are left.
    """

    def __init__(
        self,
        conversations: Conversations,
        lengths: NDArray[np.int32],
        *,
        max_tokens: int,
        batch_size: int,
        held_out_rows: int,
        seed: int,
    ) -> None:
        """lengths: tokens of each conversation."""
        self.conversations, self.batch_size = conversations, batch_size
        self._seed = seed
        fitting = np.flatnonzero(lengths <= max_tokens)
        keys = np.random.PCG64(seed).random_raw(len(fitting))
        self.too_long = len(lengths) - len(fitting)
        self.held_out: Rows = np.sort(fitting[np.argsort(keys, kind="stable")[:held_out_rows]])
        self.trained: Rows = np.setdiff1d(fitting, self.held_out)
        self._order = lru_cache(2)(self._shuffled)  # a batch may lie in two epochs
        if len(self.trained) < batch_size:
            names = ", ".join(map(str, conversations.paths))
            raise BadInput(
                f"data: {len(self.trained)} conversations are left of {len(lengths)} in {names} ({self.too_long} "
                f"longer than max_tokens={max_tokens}, {len(self.held_out)} held out), fewer than "
                f"batch_size={batch_size}. Fix: more data, or other values of these options"
            )

    def steps(self, epochs: float) -> int:
        """Returns how many batches so many epochs are."""
        return max(1, round(epochs * len(self.trained) / self.batch_size))

    def epochs(self, step: int) -> float:
        """Returns how many epochs are trained after a step."""
        return step * self.batch_size / len(self.trained)

    def rows(self, step: int) -> list[int]:
        """Returns the conversations of a step, counted from 1. The epochs go on without end."""
        first = (step - 1) * self.batch_size
        places = (divmod(position, len(self.trained)) for position in range(first, first + self.batch_size))
        return [int(self._order(epoch)[at]) for epoch, at in places]

    def _shuffled(self, epoch: int) -> Rows:
        order = self.conversations.order(self._seed, epoch)
        return order[np.isin(order, self.trained)]


class Lengths:
    """Counts the tokens of each conversation once and keeps the counts in a file."""

    def __init__(self, path: Path, conversations: Conversations, renderer: Renderer, model: Path) -> None:
        self._path, self._conversations, self._renderer = path, conversations, renderer
        self._lengths = np.zeros(len(conversations), np.int32)
        files = [*conversations.paths, *sorted(model.glob("*token*")), *sorted(model.glob("*.jinja"))]
        marks = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        self._mark = zlib.crc32(json.dumps(marks).encode()) & 0x7FFFFFFF  # identifies these files and this tokenizer

    def read(self) -> NDArray[np.int32] | None:
        """Returns what `write` wrote, or None where there is nothing, or counts of other files or another tokenizer."""
        try:
            mark, *_ = kept = np.load(self._path)
        except (OSError, ValueError):
            return None
        return kept[1:] if len(kept) == len(self._conversations) + 1 and mark == self._mark else None

    def measure(self, rows: range) -> None:
        """Counts the tokens of these rows. Raises BadInput for a row that is no conversation."""
        for row in rows:
            self._lengths[row] = len(self._renderer.example(self._conversations[row]).ids_T)

    def write(self) -> NDArray[np.int32]:
        """Writes all counts, once they are measured, and returns them."""
        content = io.BytesIO()
        np.save(content, np.asarray([self._mark, *self._lengths], np.int32))
        write_whole(self._path, [content.getvalue()])
        return self._lengths
