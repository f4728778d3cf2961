"""The protocol between the node and the learner (ZeroMQ PAIR, node binds): its messages, and their frames.

Invariants
- One message is [message, (name, dtype, shape) of each array, raw array...], the first two in msgpack; nothing is
  pickled.
- The learner answers every request, in order, with exactly one reply: the awaited type or `Failed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class Configure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message. learner: fields of algo.learner.config.LearnerConfig. canary: fixed token sequences.

    checkpoint: a Hugging Face folder. resume: a checkpoint of this learner to go on from. begin_from: one of another
    run, with whose weights, optimizer and random numbers version 0 begins; not used where there is `resume`.
    """

    checkpoint: str
    learner: dict[str, Any]
    canary: list[list[int]]
    weights_dir: str
    seed: int
    resume: str | None = None
    begin_from: str | None = None


class Train(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Train one Batch (its arrays follow as frames) and publish the result as weight version `version`.

    version 0: nobody samples with these weights (supervised fine-tuning), so they are not published. rows: sequences of
    the batch whose tokens' numbers are wanted, ascending.
    """

    step: int
    version: int
    rows: tuple[int, ...] = ()


class Save(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write a Hugging Face checkpoint (weights, config, tokenizer) to path.

    chat_template: the Jinja text that the run used in place of the tokenizer's. end_of_turn: the token that ends its
    turns. None: as in the checkpoint of Configure.
    """

    path: str
    chat_template: str | None = None
    end_of_turn: int | None = None


class Score(msgspec.Struct, frozen=True, tag=True):
    """log p of each sampled token of one Batch (its arrays follow as frames) under the weights as they are."""


class Checkpoint(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Copy all that resuming takes, answer, and write it to path meanwhile. One that fails fails the next request."""

    path: str
    version: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End cleanly."""


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Configure. weights: a published file with version `version` (0 unless resumed); canary logprobs follow
    as one frame.
    """

    weights: str
    parameters: int
    world_size: int
    versions: dict[str, str]
    version: int = 0


class Trained(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Train. weights: path of the published file; canary logprobs [sum(len - 1)] follow as one frame, and, if
    rows were asked for, `logprobs`, `entropy` and `logprob_gradient` of their tokens (`algo.learner.measure.tokens`).

    metrics: loss, grad_norm, entropy, clip fractions, importance-ratio statistics, seconds of each part.
    """

    step: int
    version: int
    weights: str
    metrics: dict[str, float]


class Saved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Save, and to Checkpoint."""

    path: str


class Scored(msgspec.Struct, frozen=True, tag=True):
    """Answer to Score; log-probabilities [N] follow as one frame, 0 where nothing was sampled."""


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The learner cannot go on: the reason with its numbers."""

    reason: str


Request = Configure | Train | Save | Score | Checkpoint | Stop
Reply = Ready | Trained | Saved | Scored | Failed
Arrays = Mapping[str, NDArray[Any]]

_request = msgspec.msgpack.Decoder(Request)
_reply = msgspec.msgpack.Decoder(Reply)
_specs = msgspec.msgpack.Decoder(list[tuple[str, str, tuple[int, ...]]])


def pack(message: Request | Reply, arrays: Arrays | None = None) -> list[bytes | memoryview]:
    """Frames of a message. Arrays are sent as they lie in memory (made contiguous where they are not)."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    specs = [(name, array.dtype.str, array.shape) for name, array in contiguous.items()]
    data = (array.reshape(-1).view(np.uint8).data for array in contiguous.values())
    return [msgspec.msgpack.encode(message), msgspec.msgpack.encode(specs), *data]


def _unpack(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[Any]) -> tuple[Any, Arrays]:
    message, specs, *data = frames
    arrays = {
        name: np.frombuffer(frame, dtype=np.dtype(dtype)).reshape(shape)
        for (name, dtype, shape), frame in zip(_specs.decode(specs), data, strict=True)
    }
    return decoder.decode(message), arrays


def unpack_request(frames: Sequence[Any]) -> tuple[Request, Arrays]:
    """Raises ValueError (msgspec.DecodeError is one) for anything that is not a request."""
    return _unpack(_request, frames)


def unpack_reply(frames: Sequence[Any]) -> tuple[Reply, Arrays]:
    """Raises ValueError (msgspec.DecodeError is one) for anything that is not a reply."""
    return _unpack(_reply, frames)
