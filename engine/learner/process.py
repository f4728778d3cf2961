"""The learner's processes, started by the node, and the node's end of the protocol in `engine.learner.messages`.

Invariants
- Every await has a deadline; a learner that dies or stays silent raises `LearnerDied` with its last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import zmq
import zmq.asyncio

from engine.errors import first_error
from engine.learner.launch import SAYS
from engine.learner.messages import (
    Arrays,
    Checkpoint,
    Configure,
    Failed,
    Ready,
    Request,
    Save,
    Saved,
    Score,
    Scored,
    Stop,
    Train,
    Trained,
    pack,
    unpack_reply,
)
from engine.types import Batch, Floats, LearnerNumbers
from sandbox.require import at_least, require

_ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = (sys.executable, "-S", "-m", "engine.learner.launch")  # -S: it starts faster without site-packages

Answer = TypeVar("Answer", Ready, Trained, Saved, Scored)


class LearnerDied(RuntimeError):
    """The learner ended, failed or did not answer in time. The message says which, with its last words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerProcessConfig:
    """How the learner's ranks are started. Deadlines are for one answer.

    module: what the launcher runs on each rank. devices: the GPU of each rank, none for the CPU. launcher: the command
    to which `--ranks=... --folder=... module ...` is added (`engine.learner.launch`, with options for several hosts).
    """

    module: str
    ranks: int = 1
    devices: tuple[int, ...] = ()
    launcher: tuple[str, ...] = LAUNCHER
    start_deadline_s: float = 600.0
    step_deadline_s: float = 600.0

    def __post_init__(self) -> None:
        require("ranks", self.ranks, at_least(1))
        if len(self.devices) not in (0, self.ranks):
            raise ValueError(f"devices must be one for each of the {self.ranks} ranks, got {self.devices}")


def visible(devices: tuple[int, ...], environment: Mapping[str, str] = os.environ) -> str:
    """Returns CUDA_VISIBLE_DEVICES for a process with these GPUs. As in vLLM, they number those visible to this one.

    Raises ValueError for a GPU that this process may not see.
    """
    if not (visible_here := environment.get("CUDA_VISIBLE_DEVICES")):
        return ",".join(map(str, devices))
    names = visible_here.split(",")
    if not all(device in range(len(names)) for device in devices):
        raise ValueError(
            f"devices must be below {len(names)} where CUDA_VISIBLE_DEVICES is {visible_here!r}, got {devices}"
        )
    return ",".join(names[device] for device in devices)


def _by_row(batch: Batch, rows: Sequence[int], arrays: Arrays) -> dict[int, LearnerNumbers]:
    """Returns the numbers of each row. arrays: those of all rows, one after another (`algo.learner.measure.tokens`)."""
    lengths = batch.lengths_B[list(rows)].tolist()
    ends = np.cumsum(lengths, dtype=int).tolist()
    return {
        row: LearnerNumbers(
            logprobs_T=arrays["logprobs"][end - length : end],
            entropy_T=arrays["entropy"][end - length : end],
            logprob_gradient_T=arrays["logprob_gradient"][end - length : end],
            minibatch=_minibatch(arrays["minibatch"][end - length : end]),
        )
        for row, length, end in zip(rows, lengths, ends, strict=True)
    }


def _minibatch(minibatch_T: Floats) -> int | None:
    trained_N = minibatch_T[~np.isnan(minibatch_T)]
    return int(trained_N[0]) if len(trained_N) else None


class LearnerProcess:
    """Starts the learner's ranks and talks to rank 0.

    `async with LearnerProcess(config, workspace, log) as learner`, then `configure` and any number of `train`.
    Its processes end when the context is left, and when this process is killed. Raises ValueError for devices that this
    process may not see.
    """

    _process: asyncio.subprocess.Process

    def __init__(self, config: LearnerProcessConfig, workspace: Path, log: Path) -> None:
        self.config = config
        self._visible = visible(config.devices)
        self._workspace, self._address = workspace, f"ipc://{workspace}/learner"
        self._log = log
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._answered = False

    async def __aenter__(self) -> Self:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._address)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment.setdefault("GOMP_SPINCOUNT", "3000")  # the default spins long: 2.5 times as slow on busy cores
        if self.config.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._visible
        path = filter(None, (str(_ROOT), environment.get("PYTHONPATH")))
        environment["PYTHONPATH"] = os.pathsep.join(path)  # the node may have been started from any folder
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-S", "-m", "engine.process.tied", str(os.getpid())],  # killed with the node
                *[*self.config.launcher, f"--ranks={self.config.ranks}", f"--folder={self._workspace}"],
                *[self.config.module, "--connect", self._address],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is the node's to handle
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Asks a learner that has answered before to stop, then kills the launcher's session. Ranks die with it."""
        process = self._process
        try:
            if self._answered and process.returncode is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5.0):
                        await self._socket.send_multipart(pack(Stop()))
                        await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                await process.wait()
            finally:
                self._socket.close()
                self._context.term()

    async def configure(self, message: Configure) -> tuple[Ready, Floats]:
        """Builds the learner. Returns what it published first, and the canary's log-probabilities."""
        ready, arrays = await self._ask(message, {}, Ready, self.config.start_deadline_s)
        return ready, arrays["canary"]

    async def train(self, batch: Batch, version: int) -> tuple[Trained, Floats]:
        """Trains one step. Returns the published weights (version `version`), metrics and canary log-probabilities."""
        trained, canary, _ = await self.train_noting(batch, version, ())
        return trained, canary

    async def train_noting(
        self, batch: Batch, version: int, rows: Sequence[int]
    ) -> tuple[Trained, Floats, dict[int, LearnerNumbers]]:
        """Trains as `train` does. Also returns what the learner computes for the tokens of these rows, by row."""
        message = Train(step=batch.step, version=version, rows=tuple(rows))
        trained, arrays = await self._ask(message, batch.arrays(), Trained, self.config.step_deadline_s)
        return trained, arrays["canary"], _by_row(batch, rows, arrays)

    async def save(self, path: Path, *, chat_template: str | None = None, end_of_turn: int | None = None) -> None:
        """Writes a Hugging Face checkpoint. Raises LearnerDied with the reason, such as a full disk.

        chat_template, end_of_turn: as in Save; a ChatTemplate's `template` and `end_of_turn`.
        """
        message = Save(path=str(path), chat_template=chat_template, end_of_turn=end_of_turn)
        await self._ask(message, {}, Saved, self.config.step_deadline_s)

    async def score(self, batch: Batch) -> Floats:
        """Returns log p of the batch's sampled tokens, [N], 0 elsewhere."""
        _, arrays = await self._ask(Score(), batch.arrays(), Scored, self.config.step_deadline_s)
        return arrays["logprobs"]

    async def checkpoint(self, path: Path, version: int) -> None:
        """Begins a checkpoint, and returns when the state is copied.

        path appears once all of it is on the disk, before the next checkpoint begins.
        """
        await self._ask(Checkpoint(path=str(path), version=version), {}, Saved, self.config.step_deadline_s)

    async def _ask(
        self, message: Request, arrays: Arrays, expected: type[Answer], deadline_s: float
    ) -> tuple[Answer, Arrays]:
        name = type(message).__name__
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                death = group.create_task(self._death(), name="learner-death")
                await self._socket.send_multipart(pack(message, arrays))
                reply, received = unpack_reply(await self._socket.recv_multipart())
                death.cancel()
        except TimeoutError:
            cause = f"the learner did not answer {name} within {deadline_s:g} s{self._last_words()}"
            raise LearnerDied(cause) from None
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        self._answered = True
        if isinstance(reply, Failed):
            if not isinstance(message, Save):  # after any other failure the learner ends
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5.0):
                        await self._process.wait()
            raise LearnerDied("\n  ".join([reply.reason, *self._killed()]))
        if not isinstance(reply, expected):
            raise LearnerDied(f"the learner answered {type(reply).__name__} to {name}")
        return reply, received

    async def _death(self) -> None:
        code = await self._process.wait()
        raise LearnerDied(f"the learner ended with exit code {code}{self._last_words()}")

    def _last_words(self) -> str:
        """Returns the end of the log, and the error of the rank that failed first and took the others down."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        of_ranks = [line for line in lines if not line.startswith(SAYS)]
        first = [line for line in of_ranks[:-3] if line.startswith("learner: ")][:1]
        return "".join(f"\n  {line}" for line in [f"log: {self._log}", *first, *of_ranks[-3:], *self._killed()])

    def _killed(self) -> list[str]:
        """Returns the launcher's line about the rank that failed first, if a signal ended it."""
        log = self._log.read_text(errors="replace")
        line = re.search(rf"^{SAYS}(rank \d+ was ended by .*)$", log, re.MULTILINE)
        return [line[1]] if line else []
