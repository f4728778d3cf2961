"""The protocol between the node and the learner (ZeroMQ PAIR, the node binds): its messages, and their frames.

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
    """The first message. learner: fields of algo.learner.config.LearnerConfig. canary: fixed token sequences.

    checkpoint: a Hugging Face folder. resume: the learner's checkpoint to resume from. begin_from: a checkpoint of
    another run, whose weights, optimizer and random state version 0 begins with; ignored if there is `resume`.
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

    version 0: nobody samples with these weights (supervised fine-tuning), so they are not published. rows: the
    sequences of the batch, ascending, for whose tokens the answer has numbers.
    """

    step: int
    version: int
    rows: tuple[int, ...] = ()


class Save(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write a Hugging Face checkpoint (weights, config, tokenizer) to path.

    chat_template: the Jinja text that the run used in place of the tokenizer's. end_of_turn: the token that ends its
    turns. None keeps that of the checkpoint in Configure.
    """

    path: str
    chat_template: str | None = None
    end_of_turn: int | None = None


class Score(msgspec.Struct, frozen=True, tag=True):
    """Score each sampled token of one Batch (its arrays follow as frames) under the current weights."""


class Checkpoint(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Copy the state that resuming needs, answer, then write it to path. If that fails, so does the next request."""

    path: str
    version: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End cleanly."""


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Configure. The canary's log-probabilities follow as one frame.

    weights: path of the published file, of version `version` (0 unless resumed). canary_further: sequences that follow
    the canary's in Configure, so that each expert of a mixture is reached. canary_gaps: what it cannot see; empty if it
    covers the model.
    """

    weights: str
    parameters: int
    world_size: int
    versions: dict[str, str]
    version: int = 0
    canary_further: list[list[int]] = []
    canary_gaps: str = ""


class Trained(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Train. The canary's log-probabilities [sum(len - 1)] follow as one frame, and, if rows were asked for,
    `logprobs`, `entropy` and `logprob_gradient` of their tokens (`algo.learner.measure.tokens`). canary_further: as in
    Ready, for these weights.

    weights: path of the published file. metrics: loss, grad_norm, entropy, clip fractions, importance-ratio statistics,
    seconds of each part.
    """

    step: int
    version: int
    weights: str
    metrics: dict[str, float]
    canary_further: list[list[int]] = []


class Saved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Save, and to Checkpoint."""

    path: str


class Scored(msgspec.Struct, frozen=True, tag=True):
    """Answer to Score; log-probabilities [N] follow as one frame, 0 where nothing was sampled."""


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The learner cannot do what it was asked. reason: the cause with its numbers."""

    reason: str


Request = Configure | Train | Save | Score | Checkpoint | Stop
Reply = Ready | Trained | Saved | Scored | Failed
Arrays = Mapping[str, NDArray[Any]]

_request = msgspec.msgpack.Decoder(Request)
_reply = msgspec.msgpack.Decoder(Reply)
_specs = msgspec.msgpack.Decoder(list[tuple[str, str, tuple[int, ...]]])


def pack(message: Request | Reply, arrays: Arrays | None = None) -> list[bytes | memoryview]:
    """Returns the frames of a message. Arrays are sent as they lie in memory; only non-contiguous ones are copied."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    specs = [(name, array.dtype.str, array.shape) for name, array in contiguous.items()]
    data = (array.reshape(-1).view(np.uint8).data for array in contiguous.values())
    return [msgspec.msgpack.encode(message), msgspec.msgpack.encode(specs), *data]


def _unpack(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[Any]) -> tuple[Any, Arrays]:
    message, specs, *data = frames
    try:
        arrays = {
            name: np.frombuffer(frame, dtype=np.dtype(dtype)).reshape(shape)
            for (name, dtype, shape), frame in zip(_specs.decode(specs), data, strict=True)
        }
    except TypeError as error:  # numpy's, for an unknown dtype
        raise ValueError(str(error)) from None
    return decoder.decode(message), arrays


def unpack_request(frames: Sequence[Any]) -> tuple[Request, Arrays]:
    """Decodes a request. Raises ValueError (msgspec.DecodeError is one) for anything else."""
    return _unpack(_request, frames)


def unpack_reply(frames: Sequence[Any]) -> tuple[Reply, Arrays]:
    """Decodes a reply. Raises ValueError (msgspec.DecodeError is one) for anything else."""
    return _unpack(_reply, frames)
