"""The latest responses of OpenAI's Responses API, so that a request may go on from one by its id. Pure.

Invariants
- At most `most` responses are kept; the oldest one is dropped first.
- An item of a response is kept as long as its response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.gateway.requests import BadRequest
from engine.rollout.chat_template import Message

IN_SESSION, WITHOUT_SESSION = 256, 4096
"""How many responses a session keeps, and how many the server keeps for requests that name no session.

The latter are as many as there may be sessions: each of so many clients can go on from its last response.
"""


class NoSuchResponse(BadRequest):
    """The response that a request goes on from is not kept. Clients look for the code and the first sentence."""

    code = "previous_response_not_found"

    def __init__(self, response_id: str, most: int) -> None:
        super().__init__(
            "previous_response_id",
            f"Previous response with id {response_id!r} not found. The last {most} responses of a session are kept, "
            "and none that was asked for with store=false. Fix: send the whole conversation as input",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptResponse:
    """A response. messages: the conversation up to and with its turn, without the instructions. items: its output."""

    messages: tuple[Message, ...]
    items: tuple[Mapping[str, Any], ...]


class KeptResponses:
    """The latest responses by their ids, and their items by theirs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._responses: dict[str, KeptResponse] = {}  # the oldest one first
        self._items: dict[str, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, response_id: str, messages: Sequence[Message], items: Sequence[Mapping[str, Any]]) -> None:
        """Keeps a response, in the place of the oldest one if there are too many."""
        if len(self._responses) >= self._most:
            oldest = self._responses.pop(next(iter(self._responses)))
            for item in oldest.items:
                del self._items[item["id"]]
        self._responses[response_id] = KeptResponse(messages=tuple(messages), items=tuple(items))
        self._items.update((item["id"], item) for item in items)

    def messages(self, response_id: str) -> tuple[Message, ...]:
        """Returns the conversation that a response ends. Raises NoSuchResponse."""
        kept = self._responses.get(response_id)
        if kept is None:
            raise NoSuchResponse(response_id, self._most)
        return kept.messages

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        """Returns an item of a kept response; None if there is none with this id."""
        return self._items.get(item_id)
