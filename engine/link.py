"""The protocol between the node and the learner (ZeroMQ PAIR, node binds), and the node's end of it.

Invariants
- One message is [msgpack header, raw array frame...]; arrays carry dtype and shape in the header, nothing is pickled.
- The learner answers every request, in order, with exactly one reply: the awaited type or `Failed`.
- Every await has a deadline; a learner that dies or stays silent raises `LearnerDied` with its last words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class Configure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message. learner: fields of algo.learner.LearnerConfig. canary: fixed token sequences."""

    checkpoint: str
    learner: dict[str, Any]
    canary: list[list[int]]
    weights_dir: str
    seed: int


class Train(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Train one Batch (its arrays follow as frames) and publish the result as weight version `version`."""

    step: int
    version: int


class Save(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write a Hugging Face checkpoint (weights, config, tokenizer) to path."""

    path: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End cleanly."""


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Configure. weights: a published file with version 0; canary logprobs follow as one frame."""

    weights: str
    parameters: int
    world_size: int
    versions: dict[str, str]


class Trained(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Train. weights: path of the published file; canary logprobs [sum(len - 1)] follow as one frame.

    metrics: loss, grad_norm, entropy, clip fractions, importance-ratio statistics, seconds of each part.
    """

    step: int
    version: int
    weights: str
    metrics: dict[str, float]


class Saved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    path: str


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The learner cannot go on: the reason with its numbers."""

    reason: str


Request = Configure | Train | Save | Stop
Reply = Ready | Trained | Saved | Failed


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    message: msgspec.Raw
    arrays: list[tuple[str, str, tuple[int, ...]]]


_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(_Header)
_request = msgspec.msgpack.Decoder(Request)
_reply = msgspec.msgpack.Decoder(Reply)


def pack(message: Request | Reply, arrays: Mapping[str, NDArray[Any]] | None = None) -> list[bytes | memoryview]:
    """Frames of a message. Arrays are sent as they lie in memory (made contiguous where they are not)."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    specs = [(name, array.dtype.str, array.shape) for name, array in contiguous.items()]
    header = _encoder.encode(_Header(message=msgspec.Raw(_encoder.encode(message)), arrays=specs))
    return [header, *(memoryview(array.reshape(-1).view(np.uint8)) for array in contiguous.values())]


def _arrays(header: _Header, frames: Sequence[Any]) -> dict[str, NDArray[Any]]:
    if len(header.arrays) != len(frames):
        raise ValueError(f"{len(header.arrays)} arrays announced, {len(frames)} frames received")
    return {
        name: np.frombuffer(frame, dtype=np.dtype(dtype)).reshape(shape)
        for (name, dtype, shape), frame in zip(header.arrays, frames, strict=True)
    }


def unpack_request(frames: Sequence[Any]) -> tuple[Request, dict[str, NDArray[Any]]]:
    """Raises ValueError (msgspec.DecodeError is one) for anything that is not a request."""
    header = _header.decode(frames[0])
    return _request.decode(header.message), _arrays(header, frames[1:])


def unpack_reply(frames: Sequence[Any]) -> tuple[Reply, dict[str, NDArray[Any]]]:
    """Raises ValueError (msgspec.DecodeError is one) for anything that is not a reply."""
    header = _header.decode(frames[0])
    return _reply.decode(header.message), _arrays(header, frames[1:])
