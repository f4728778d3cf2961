"""The records of the journal, each of which is a frame (`engine.encoding`), and the pieces of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from engine.encoding import HEADER, decoder
from engine.routes import Routes
from engine.types import Bools, Floats, Ids, Prompt, Trajectory, Turn

Mark = tuple[int, int, int, int]  # tokens, turns, characters and routed positions of a trajectory
NO_MARK: Mark = (0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What a turn added to a trajectory. T is the number of its tokens, prompt and reply tokens included.

    routes: those that the turn added, which are not of the same positions: its last token has one with the next turn.
    """

    token_ids_T: Ids
    sampled_T: Bools
    logprobs_T: Floats
    versions_T: Ids
    turns: tuple[Turn, ...]
    text: str
    routes: Routes | None = None


Whole = TypeVar("Whole", Piece, Trajectory)


class _Record(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    lease: int
    attempt: int


class Drawn(_Record, frozen=True, tag=True, array_like=True, kw_only=True):
    """An attempt of a lease (0, then one more with each refill) drew a prompt, at this position of the stream."""

    position: int
    prompt: Prompt


class Grown(_Record, frozen=True, tag=True, array_like=True, kw_only=True):
    """A turn of a trajectory ended. tokens: how many it has sampled so far, discarded ones included."""

    sample: int
    piece: Piece
    tokens: int


class Began(_Record, frozen=True, tag=True, array_like=True, kw_only=True):
    """The trajectory began again, so its earlier pieces are void."""

    sample: int
    discarded: int
    tokens: int


class Ended(_Record, frozen=True, tag=True, array_like=True, kw_only=True):
    """The trajectory ended.

    The record has no prompt, and only those tokens, turns and text that no earlier piece holds. A later record of the
    same trajectory, with its reward, replaces the first.
    """

    sample: int
    trajectory: Trajectory
    tokens: int


class Decided(_Record, frozen=True, tag=True, array_like=True, kw_only=True):
    """The group is complete and has these members, before selection."""

    members: tuple[int, ...]
    drop: str | None
    waste: dict[str, int]


Record = Drawn | Grown | Began | Ended | Decided


def join_pieces(pieces: list[Piece]) -> Piece:
    """Returns consecutive pieces as one."""
    return Piece(
        **{name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in _ARRAYS},
        turns=tuple(turn for piece in pieces for turn in piece.turns),
        text="".join(piece.text for piece in pieces),
        routes=Routes.join([piece.routes for piece in pieces if piece.routes is not None]),
    )


_ARRAYS = ("token_ids_T", "sampled_T", "logprobs_T", "versions_T")


def parts(piece: Piece | Trajectory) -> dict[str, Any]:
    """Returns the fields that a piece has, by name."""
    return {name: getattr(piece, name) for name in (*_ARRAYS, "turns", "text", "routes")}


def size(piece: Piece) -> Mark:
    """Returns the end of a piece as a mark within its trajectory."""
    return len(piece.token_ids_T), len(piece.turns), len(piece.text), len(piece.routes or ())


def moved(mark: Mark, piece: Piece) -> Mark:
    """Returns the mark behind a piece that begins at this one."""
    tokens, turns, characters, routed = size(piece)
    return mark[0] + tokens, mark[1] + turns, mark[2] + characters, mark[3] + routed


def after(whole: Whole, mark: Mark) -> Whole:
    """Returns the rest of a trajectory, from a mark on."""
    tokens, turns, characters, routed = mark
    arrays: Mapping[str, Any] = {name: getattr(whole, name)[tokens:] for name in _ARRAYS}
    routes = None if whole.routes is None else whole.routes.from_position(routed)
    return replace(whole, **arrays, turns=whole.turns[turns:], text=whole.text[characters:], routes=routes)


def is_cut_off(rest: bytes) -> bool:
    """Returns whether the bytes after the last whole frame look like a frame that was written in part.

    A machine that loses power may leave zeros in place of the bytes that were not written.
    """
    written = rest.rstrip(b"\0")
    if len(written) <= HEADER.size:
        return True
    length, _ = HEADER.unpack_from(written)
    return len(written) < HEADER.size + length


def decode(payload: bytes) -> Record:
    """Decodes a record. Raises msgspec.DecodeError for one of another version."""
    return _record.decode(payload)


def decode_trajectories(payload: bytes) -> list[Trajectory]:
    """Decodes trajectories. Raises msgspec.DecodeError for those of another version."""
    return _trajectories.decode(payload)


_record: msgspec.msgpack.Decoder[Record] = decoder(Record)
_trajectories: msgspec.msgpack.Decoder[list[Trajectory]] = decoder(list[Trajectory])
