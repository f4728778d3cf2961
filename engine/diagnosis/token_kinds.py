"""Sorts the uncertain tokens of a trajectory into kinds. Pure: texts and spans go in, arrays come out.

A token has *high entropy* if the entropy of the distribution that it was drawn from is among the highest HIGH_SHARE.
The top 20 % are the convention of "Beyond the 80/20 Rule" (arXiv 2506.01939), on which rStar2-Agent's report (arXiv
2508.20722) builds. The report names two kinds of such tokens:

- *forking* tokens, with which the model stops to doubt or check itself. Here they are the tokens of FORKING_PHRASES
  outside of tool calls.
- *reflection* tokens, with which the model responds to a tool's reply. Here they are the first AFTER_REPLY sampled
  tokens after a reply.

A token may be of both kinds. Shape legend: T tokens of a trajectory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HIGH_SHARE = 0.2
AFTER_REPLY = 20
# "But before", "double-check", "rerun" are examples of the report; the others are our reading of "self-reflection".
FORKING_PHRASES = (
    *("actually", "again", "alternatively", "another way", "but", "but before", "check", "double-check", "hmm"),
    *("hold on", "however", "instead", "let me", "let's", "make sure", "maybe", "mistake", "not sure"),
    *("on second thought", "perhaps", "re-check", "re-evaluate", "reconsider", "rerun", "verify", "wait"),
)

Bools = NDArray[np.bool_]


def _pattern(phrases: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern of whole phrases in any case, the longest first. A hyphen may be missing, or be a space."""
    longest_first = sorted(phrases, key=len, reverse=True)
    loose = [re.escape(phrase).replace(r"\-", r"[-\s]?").replace(r"\ ", r"\s+") for phrase in longest_first]
    return re.compile(rf"(?<!\w)(?:{'|'.join(loose)})(?!\w)", re.IGNORECASE)


_FORKING = _pattern(FORKING_PHRASES)
_CALL = re.compile("<tool_call>.*?(?:</tool_call>|$)", re.DOTALL)  # the tags of engine.rollout.tool_call_parser


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What each token of a trajectory is.

    turn_T: the turn that sampled it, -1 in the prompt and in replies. forking_T: whether a sampled token is forking.
    call_T: whether a sampled token is part of a tool call, its tags included. after_reply_T: 1 for the first sampled
    token after a reply, and so on; 0 in the first turn and for tokens that were not sampled. phrase_T: the phrase that
    begins with this token, in lower case, else "".
    """

    turn_T: NDArray[np.int32]
    forking_T: Bools
    call_T: Bools
    after_reply_T: NDArray[np.int32]
    phrase_T: tuple[str, ...]

    @property
    def sampled_T(self) -> Bools:
        return self.turn_T >= 0


def mark(texts_T: Sequence[str], turns: Sequence[tuple[int, int]]) -> Marks:
    """Marks each token. texts_T: the tokens' texts. turns: the sampled spans [start, end).

    >>> marks = mark(["Q?", "So", " 4", ".", "4", "But", " wait", "."], [(1, 4), (5, 8)])
    >>> marks.forking_T.tolist()
    [False, False, False, False, False, True, True, False]
    >>> marks.after_reply_T.tolist()
    [0, 0, 0, 0, 0, 1, 2, 3]
    """
    size = len(texts_T)
    turn_T, after_reply_T = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    forking_T, call_T = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    phrase_T = [""] * size
    for number, (start, end) in enumerate(turns):
        turn_T[start:end] = number
        if number:
            after_reply_T[start:end] = np.arange(1, end - start + 1)
        pieces = texts_T[start:end]
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        text = "".join(pieces)
        for call in _CALL.finditer(text):
            first, last = _tokens(ends, *call.span())
            call_T[start + first : start + last] = True
        for phrase in _FORKING.finditer(text):
            first, last = _tokens(ends, *phrase.span())
            if not call_T[start + first]:
                forking_T[start + first : start + last] = True
                phrase_T[start + first] = " ".join(phrase.group().lower().split())
    return Marks(
        turn_T=turn_T, forking_T=forking_T, call_T=call_T, after_reply_T=after_reply_T, phrase_T=tuple(phrase_T)
    )


def _tokens(ends: NDArray[np.int64], begin: int, end: int) -> tuple[int, int]:
    """Returns the tokens [first, last) that hold the characters [begin, end)."""
    return int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(ends, end, side="left")) + 1
