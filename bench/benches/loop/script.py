"""What the engines of `bench loop` sample. It imports nothing heavy: the node writes it, a stub worker reads it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Says what is sampled: turns of a filler, each but the last with a tool call, the last with an answer.

    step_s: seconds of an engine step. tokens: of a turn, on average; a turn has between half and one and a half times
    as many. calls: turns that end in a call. filler, call, answer: ids of texts. end: the id that ends a message; ends:
    how many of them a prompt holds, to which each call adds two, that of its turn and that of its reply.

    >>> script = Script(step_s=0.0, tokens=4, calls=1, filler=[5, 6], call=[7], answer=[8], end=2, ends=1)
    >>> script.turn([1, 2], seed=1), script.turn([1, 2, 5, 7, 2, 9, 2], seed=1)
    ([5, 7, 2], [5, 8, 2])
    """

    step_s: float
    tokens: int
    calls: int
    filler: list[int]
    call: list[int]
    answer: list[int]
    end: int
    ends: int

    def turn(self, token_ids: Sequence[int], seed: int) -> list[int]:
        """Returns the ids of the turn that follows token_ids. The same seed gives a turn of the same length."""
        calls = sum(token == self.end for token in token_ids) < self.ends + 2 * self.calls
        given = [*(self.call if calls else self.answer), self.end]
        length = max(len(given), self.tokens // 2 + seed % max(1, self.tokens))
        repeated = self.filler * (length // len(self.filler) + 1)
        return [*repeated[: length - len(given)], *given]
