"""Demonstrations for a tiny model of how databases are asked and changed.

Promises
- A demonstration is a list of chat messages on a training question whose prompt does not show the schema.
- The tool's replies are those of a real run: rows, or SQLite's error.
- They are flawed on purpose. Many guess the name of a column, where one look at the table would tell it.

One question and how an agent answers it:

    user       Tables: customer, product, purchase. How many customers live in Oslo? ...
    assistant  <reason>I look at the table.</reason>
               <tool_call>{"name": "query", "arguments": {"sql": "SELECT * FROM customer LIMIT 1"}}</tool_call>
    tool       id | name | town
               1 | Lea | Rome
    assistant  <reason>I see town.</reason>
               <answer>SELECT count(*) FROM customer WHERE town = 'Oslo'</answer>
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Iterator

from engine.types import Prompt
from recipes.tiny.task import Message, Mix, hermes_call
from recipes.tools.database import SqlLimits, table
from recipes.tools.generated_databases import COLUMNS, find, names_of, questions, renamed
from recipes.tools.inside.sql import outcome

ROWS = SqlLimits().rows


def demonstrations(mix: Mix, seed: int) -> Iterator[list[Message]]:
    """Yields demonstrations on training questions without end.

    mix: the shares that guess and do not look (head), that look first (clean), and that look after a guess that failed
    (err).
    """
    rng = random.Random(f"demonstrations-{seed}")
    for prompt in questions("train", seed, schema=False):
        kind = mix.draw(rng)
        yield [dict(prompt.messages[0]), *Demonstration(prompt, rng).solve(kind)]


class Demonstration:
    """What an agent does about one question, on its own copy of the database."""

    def __init__(self, prompt: Prompt, rng: random.Random) -> None:
        self._rng = rng
        self._changes = "changes" in prompt.metadata
        name = prompt.metadata["database"]
        self._sql = prompt.metadata["changes"][0] if self._changes else prompt.metadata["sql"]
        self._content = find(name)
        kind = name.partition("-")[0]
        used = re.findall(r"\b\w+\b(?!\()", self._sql)
        self._choices = {  # table: its column in the reference, and all names that the column may have
            each: (names_of(kind)[choices[0]], choices)
            for each, choices in COLUMNS[kind.partition(".")[0]].items()
            if names_of(kind)[choices[0]] in used
        }

    def solve(self, kind: str) -> Iterator[Message]:
        """Yields the messages after the prompt. kind: head, clean or err."""
        if kind == "head":
            yield from self._end("I guess the columns.", self._guess())
            return
        reason = "I look at the table."
        if kind == "err":
            tool = "execute" if self._changes else "query"
            yield from self._calls("I guess the columns.", tool, [self._wrong_guess()])
            reason = "There is an error, I look at the table."
        yield from self._calls(reason, "query", [f"SELECT * FROM {each} LIMIT 1" for each in self._choices])
        seen = ", ".join(real for real, _ in self._choices.values())
        yield from self._end(f"I see {seen}.", self._sql)

    def _guess(self) -> str:
        return renamed(self._sql, {real: self._rng.choice(choices) for real, choices in self._choices.values()})

    def _wrong_guess(self) -> str:
        while (guess := self._guess()) == self._sql:
            pass
        return guess

    def _end(self, reason: str, sql: str) -> Iterator[Message]:
        """Yields the answer, or the change and the answer."""
        if self._changes:
            yield from self._calls(reason, "execute", [sql])
            yield {"role": "assistant", "content": "<answer>Done.</answer>"}
        else:
            yield {"role": "assistant", "content": f"<reason>{reason}</reason>\n<answer>{sql}</answer>"}

    def _calls(self, reason: str, tool: str, statements: list[str]) -> Iterator[Message]:
        """Yields a turn with calls, and their replies."""
        calls = "\n".join(hermes_call(tool, {"sql": sql}) for sql in statements)
        yield {"role": "assistant", "content": f"<reason>{reason}</reason>\n{calls}"}
        for sql in statements:
            yield {"role": "tool", "content": self._reply(sql)}

    def _reply(self, sql: str) -> str:
        """Returns the tool's reply. It runs in this process: never pass what a model wrote."""
        database = sqlite3.connect(":memory:", isolation_level=None)
        try:
            database.deserialize(self._content)
            said = outcome(database, sql, ROWS)
            self._content = database.serialize()
        finally:
            database.close()
        return said["error"] if "error" in said else table(said, ROWS)
