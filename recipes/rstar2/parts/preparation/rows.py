"""What a row of a data set becomes: a problem with an answer, a conversation, or a reason why it is neither.

A problem is written in the row format of rStar2-Agent's release, which `engine.data.prompts.read_prompts` reads; a
conversation in the SFT format that `recipes.rstar2.parts.tuning.conversations` reads.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.data.tables import shown

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A question with one answer that can be checked. index: the number of its row in the source, from 0.

    >>> Problem(id="a-0", index=0, source="rstar_a", question="What is 6 * 7?", answer="42").text
    'What is 6 * 7?'
    """

    id: str
    index: int
    source: str
    question: str
    answer: str
    ability: str = "math"

    @property
    def text(self) -> str:
        """The text by which it is compared with others."""
        return self.question

    @property
    def identity(self) -> str:
        """Two rows with one identity are duplicates."""
        return self.question

    @property
    def chars(self) -> int:
        return len(self.question)

    def columns(self, split: str) -> dict[str, Any]:
        """Returns it as a row of the release."""
        query = {"query": self.question, "ground_truth": self.answer}
        return {
            "data_source": self.source,
            "agent_name": "rstar2_agent",
            "prompt": [{"role": "user", "content": self.question}],
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": self.answer},
            "extra_info": {
                "split": split,
                "index": self.index,
                "answer": self.answer,
                "question": self.question,
                "need_tools_kwargs": False,
                "interaction_kwargs": query,
            },
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """messages: in OpenAI's form, the arguments of calls as JSON text. tools: JSON text of their schemas, or empty."""

    id: str
    index: int
    source: str
    messages: Sequence[Message]
    tools: str = ""

    @property
    def text(self) -> str:
        """The text by which it is compared with others: what user and assistant write."""
        return "\n".join(message["content"] for message in self.messages if message["role"] in ("user", "assistant"))

    @property
    def identity(self) -> str:
        """Two rows with one identity are duplicates."""
        return "\n".join([*(f"{message['role']}: {_said(message)}" for message in self.messages), self.tools])

    @property
    def chars(self) -> int:
        return sum(len(_said(message)) for message in self.messages) + len(self.tools)

    def columns(self, split: str) -> dict[str, Any]:
        return {"messages": self.messages, "tools": self.tools, "source": self.source, "id": self.id}


def _said(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"] + "".join(f"{call['name']}{call['arguments']}" for call in calls)


Row = Problem | Conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A row that is not used. reason: a word to count it under. detail: what a person wants to know besides.

    against: the row of a test set that it repeats, where that is the reason.
    """

    reason: str
    detail: str = ""
    against: str = ""


class WrongField(ValueError):
    """A column is missing or holds another type than the set has: the file is refused."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Reads a row of a source. Each method raises WrongField naming the column, what it must hold and what it holds."""

    row: Mapping[str, Any]

    def value(self, *columns: str) -> Any:
        """Returns the value of the first of these columns that the row has. "a.b" is the field b of column a."""
        for column in columns:
            value: Any = self.row
            for part in column.split("."):
                value = value.get(part, _Missing) if isinstance(value, Mapping) else _Missing
            if value is not _Missing:
                return value
        known = " or ".join(map(repr, columns))
        raise WrongField(f"no column {known}")

    def text(self, *columns: str) -> str:
        value = self.value(*columns)
        if not isinstance(value, str):
            raise WrongField(f"{columns[0]}: must be text, got {shown(value)}")
        return value

    def optional_text(self, *columns: str) -> str:
        """Returns the text, empty where there is none of these columns, or nothing in it."""
        try:
            value = self.value(*columns)
        except WrongField:
            return ""
        return self.text(*columns) if value is not None else ""

    def number_or_text(self, *columns: str) -> str:
        """Returns the text of a number too: 43.0 of a column of floats is "43"; nothing is ""."""
        value = self.value(*columns)
        if value is None:
            return ""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise WrongField(f"{columns[0]}: must be text or a number, got {shown(value)}")
        return str(value)

    def objects(self, *columns: str) -> list[Mapping[str, Any]]:
        """Returns a list of objects, of messages for example."""
        value = self.value(*columns)
        if not isinstance(value, list) or not all(isinstance(part, Mapping) for part in value):
            raise WrongField(f"{columns[0]}: must be a list of objects, got {shown(value)}")
        return value


class _Missing:
    """Stands for a column that a row does not have; None is a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a row comes from, and what was asked of its set. id: as `read_prompts` names the row of the source.

    broken_calls: the share of demonstrations whose first call fails.
    """

    id: str
    index: int
    seed: int = 0
    protocol: str = "report"
    broken_calls: float = 0.0


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case, numbers among them, without punctuation and mathematical signs.

    >>> words("Let $x^2 = 16$, and find X.")
    ['let', 'x', '2', '16', 'and', 'find', 'x']
    """
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower())


def fingerprint(text: str) -> int:
    """64 bits that texts share which differ in case, white space or the form of their characters alone.

    Signs count: 2 + 3 is another question than 2 - 3.

    >>> fingerprint("How many ?") == fingerprint("how  many?")
    True
    """
    plain = "".join(unicodedata.normalize("NFKC", text).lower().split())
    return int.from_bytes(hashlib.blake2b(plain.encode(errors="replace"), digest_size=8).digest(), "big")
