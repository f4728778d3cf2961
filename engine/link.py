"""The protocol between the node and the learner (ZeroMQ PAIR, node binds), and the node's end of it.

Invariants
- One message is [msgpack header, raw array frame...]; arrays carry dtype and shape in the header, nothing is pickled.
- The learner answers every request, in order, with exactly one reply: the awaited type or `Failed`.
- Every await has a deadline; a learner that dies or stays silent raises `LearnerDied` with its last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from engine.errors import first_error
from engine.types import Batch, Floats


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


_ROOT = Path(__file__).resolve().parent.parent

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
    return [header, *(array.reshape(-1).view(np.uint8).data for array in contiguous.values())]


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


class LearnerDied(RuntimeError):
    """The learner ended, failed or did not answer in time; the message says which, with its last words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerProcessConfig:
    """module: what the launcher runs on each rank. launcher: the command before `--nproc-per-node=... -m module ...`
    (on several hosts: torchrun with its rendezvous). Deadlines are for one answer.
    """

    module: str
    ranks: int = 1
    launcher: tuple[str, ...] = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    start_deadline_s: float = 120.0
    step_deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {self.ranks}")


class LearnerProcess:
    """Starts the learner's ranks with torch's launcher and talks to rank 0.

    `async with LearnerProcess(config, workspace, log) as learner`, then `configure` and any number of `train`.
    Leaving the context ends all its processes.
    """

    def __init__(self, config: LearnerProcessConfig, workspace: Path, log: Path) -> None:
        self.config = config
        self._address = f"ipc://{workspace}/learner"
        self._log = log
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._process: asyncio.subprocess.Process | None = None
        self._answered = False

    async def __aenter__(self) -> Self:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._address)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment.setdefault("GOMP_SPINCOUNT", "3000")  # the default spins long: 2.5 times as slow on busy cores
        path = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)  # the node may have been started from any folder
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *[*self.config.launcher, f"--nproc-per-node={self.config.ranks}"],
                *["-m", self.config.module, "--connect", self._address],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is the node's to handle
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        try:
            if process is not None:
                await self._end(process)
        finally:
            self._socket.close()
            self._context.term()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Asks one that has answered before, then kills the launcher's session; a rank dies with its launcher."""
        try:
            if self._answered and process.returncode is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5.0):
                        await self._socket.send_multipart(pack(Stop()))
                        await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def configure(self, message: Configure) -> tuple[Ready, Floats]:
        """Builds the learner; returns what it published as version 0 and its canary log-probabilities."""
        reply, arrays = await self._ask(message, {}, self.config.start_deadline_s)
        if not isinstance(reply, Ready):
            raise LearnerDied(f"the learner answered {type(reply).__name__} to Configure")
        return reply, arrays["canary"]

    async def train(self, batch: Batch, version: int) -> tuple[Trained, Floats]:
        """One step: the published weights (version `version`), metrics and canary log-probabilities."""
        reply, arrays = await self._ask(
            Train(step=batch.step, version=version), batch.arrays(), self.config.step_deadline_s
        )
        if not isinstance(reply, Trained):
            raise LearnerDied(f"the learner answered {type(reply).__name__} to Train")
        return reply, arrays["canary"]

    async def save(self, path: Path) -> None:
        """Writes a Hugging Face checkpoint. Raises LearnerDied with the reason (a full disk, say)."""
        await self._ask(Save(path=str(path)), {}, self.config.step_deadline_s)

    async def _ask(
        self, message: Request, arrays: Mapping[str, NDArray[Any]], deadline_s: float
    ) -> tuple[Reply, dict[str, NDArray[Any]]]:
        assert self._process is not None
        name = type(message).__name__
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                death = group.create_task(self._death(self._process), name="learner-death")
                await self._socket.send_multipart(pack(message, arrays))
                reply, received = unpack_reply(await self._socket.recv_multipart())
                death.cancel()
        except TimeoutError:
            words = f"the learner did not answer {name} within {deadline_s:g} s{self._last_words()}"
            raise LearnerDied(words) from None
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
        self._answered = True
        if isinstance(reply, Failed):
            raise LearnerDied(reply.reason)
        return reply, received

    async def _death(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        raise LearnerDied(f"the learner ended with exit code {code}{self._last_words()}")

    def _last_words(self) -> str:
        """The end of the log, without what torch's launcher says of its own about a rank that failed."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = list(itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
        return "".join(f"\n  {line}" for line in [f"log: {self._log}", *(said or lines)[-3:]])
