"""The learner process: one per rank, started by PyTorch's own launcher, fed by the node over ZeroMQ.

    python -m torch.distributed.run --standalone --nproc-per-node=R -m algo.learner --connect ipc:///path/of/socket

Invariants
- Rank 0 owns the socket; every rank sees the same requests in the same order.
- Every request but Stop gets exactly one reply. After `Failed` in answer to Configure or Train the process ends with
  exit code 1; a failed Save leaves the learner serving, since its state is intact.
- It never outlives the node: it ends when the connection breaks, when the launcher dies, or when no node answers.

Nothing here imports torch before a valid Configure was read, so that a recipe can import `LearnerConfig` cheaply and a
wrong path is reported at once.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import zmq
from numpy.typing import NDArray

from engine import link
from engine.types import Batch

if TYPE_CHECKING:
    from algo.trainer import Trainer

CONNECT_S = 30.0  # the node binds before it starts the learner; a longer silence means that it is gone
EMPTY_BATCHES = 10  # so many steps without anything to learn from are a broken run, not an unlucky one
PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How a batch becomes an update.

    minibatches: optimizer steps per batch. micro_batch_tokens: input positions (padding included) of one forward pass.
    warmup_steps: batches until the learning rate is reached. clip_low, clip_high: the ratio's bounds 1 - low, 1 + high.
    threads: of each rank. The old log-probabilities are the sampler's, so sampling must be at temperature 1.
    """

    lr: float = 3e-4
    warmup_steps: int = 3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    minibatches: int = 2
    micro_batch_tokens: int = 2048
    threads: int = 2
    dtype: Literal["float32"] = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("lr", "grad_clip", "clip_high"):
            self._require(name, getattr(self, name) > 0, "positive")
        for name in ("minibatches", "micro_batch_tokens", "threads"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup_steps", "weight_decay"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("clip_low", 0 < self.clip_low <= 1, "in (0, 1]")
        betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self._require("betas", betas, "two numbers in [0, 1)")
        self._require("dtype", self.dtype == "float32", "'float32' (the CPU trains in full precision)")

    def _require(self, name: str, valid: bool, rule: str) -> None:
        if not valid:
            raise ValueError(f"LearnerConfig.{name} must be {rule}, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> LearnerConfig:
        """From the wire. Raises ValueError naming an unknown field."""
        unknown = fields.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"LearnerConfig has no field {', '.join(sorted(unknown))}")
        return cls(**fields)


class NodeGone(RuntimeError):
    """The node or the launcher is gone; there is nobody to answer."""


class Fatal(RuntimeError):
    """Ends the learner; the message goes to the node as `Failed`."""


class NodeLink:
    """Rank 0's end of the PAIR socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 2000  # a last Failed still leaves
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._deadline: float | None = time.monotonic() + CONNECT_S
        self._parent = os.getppid()

    def receive(self) -> list[bytes]:
        """The next request's frames. Unblocked by a request, a broken connection or a dead launcher (NodeGone)."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(1000))
            if self._socket in ready:
                return self._socket.recv_multipart()
            if self._monitor in ready:
                event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
                self._deadline = None
                if event == zmq.EVENT_DISCONNECTED and not self._socket.poll(0):
                    raise NodeGone("the node closed the connection")
            if os.getppid() != self._parent:
                raise NodeGone("the launcher died")
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise NodeGone(f"no node answered within {CONNECT_S:.0f} s")

    def reply(self, message: link.Reply, arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._socket.send_multipart(link.pack(message, arrays))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=2000)


def check_checkpoint(path: str) -> Path:
    """The folder of a Hugging Face checkpoint. Raises Fatal with one line that says what is missing."""
    source = Path(path)
    if not source.is_dir():
        raise Fatal(f"checkpoint {path}: no such directory")
    try:
        config = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise Fatal(f"checkpoint {path}: config.json cannot be read ({error})") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise Fatal(f"checkpoint {path}: config.json names no model_type")
    if not any(source.glob("*.safetensors")):
        raise Fatal(f"checkpoint {path}: holds no *.safetensors file")
    return source


class Learner:
    """Serves requests until Stop. `node` is None on ranks other than 0."""

    def __init__(self, node: NodeLink | None) -> None:
        self._node = node
        self._trainer: Trainer | None = None
        self._empty = 0

    def run(self) -> None:
        """Consumes requests, answers each; returns on Stop. Raises Fatal or NodeGone."""
        frames = self._node.receive() if self._node else None
        if frames is not None:
            _check_configure(frames)
        _join_group()
        while True:
            request, arrays = link.unpack_request(_broadcast(frames))
            match request:
                case link.Configure():
                    self._configure(request)
                case link.Train():
                    self._train(request, arrays)
                case link.Save():
                    self._save(request)
                case link.Stop():
                    return
            frames = self._node.receive() if self._node else None

    def _reply(self, message: link.Reply, arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        if self._node:
            self._node.reply(message, arrays)

    def _ready(self) -> Trainer:
        if self._trainer is None:
            raise Fatal("Configure expected first")
        return self._trainer

    def _configure(self, request: link.Configure) -> None:
        import torch

        from algo.trainer import Trainer

        config = _config(request)
        torch.set_num_threads(config.threads)
        source = Path(request.checkpoint)
        try:
            trainer = Trainer(config, source, request.canary, Path(request.weights_dir), request.seed)
        except Exception as error:
            raise Fatal(f"checkpoint {source}: {_one_line(error)}") from error
        weights = _publish(trainer, 0)
        self._trainer = trainer
        ready = link.Ready(
            weights=str(weights),
            parameters=trainer.parameters,
            world_size=trainer.world_size,
            versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        )
        self._reply(ready, {"canary": trainer.score_canary()})

    def _train(self, request: link.Train, arrays: Mapping[str, NDArray[Any]]) -> None:
        from algo.trainer import Diverged

        trainer = self._ready()
        try:
            metrics = trainer.train(Batch(step=request.step, **arrays))
        except Diverged as error:
            raise Fatal(f"step {request.step}: {error}; the weights were not updated") from error
        self._empty = 0 if metrics["tokens"] else self._empty + 1
        if self._empty == EMPTY_BATCHES:
            raise Fatal(f"step {request.step}: {EMPTY_BATCHES} batches in a row held nothing to train on")
        trained = time.perf_counter()
        weights = _publish(trainer, request.version)
        published = time.perf_counter()
        canary = trainer.score_canary()
        metrics |= {"publish_s": published - trained, "canary_s": time.perf_counter() - published}
        self._reply(
            link.Trained(step=request.step, version=request.version, weights=str(weights), metrics=metrics),
            {"canary": canary},
        )

    def _save(self, request: link.Save) -> None:
        trainer = self._ready()
        try:
            trainer.save(Path(request.path))
        except Exception as error:
            self._reply(link.Failed(reason=f"cannot save checkpoint to {request.path}: {_one_line(error)}"))
        else:
            self._reply(link.Saved(path=request.path))


def _check_configure(frames: list[bytes]) -> None:
    """Everything that can be wrong with the first message and is cheap to see, before torch is loaded."""
    request, _ = link.unpack_request(frames)
    if isinstance(request, link.Stop):
        raise NodeGone("stopped before it was configured")  # exit code 1: the launcher ends the ranks that wait
    if not isinstance(request, link.Configure):
        raise Fatal(f"Configure expected first, got {type(request).__name__}")
    check_checkpoint(request.checkpoint)
    _config(request)


def _publish(trainer: Trainer, version: int) -> Path:
    try:
        return trainer.publish(version)
    except Exception as error:
        raise Fatal(f"cannot publish version {version} to {trainer.weights_dir}: {_one_line(error)}") from error


def _config(request: link.Configure) -> LearnerConfig:
    try:
        return LearnerConfig.of(request.learner)
    except (TypeError, ValueError) as error:
        raise Fatal(str(error)) from error


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _join_group() -> None:
    import torch.distributed as dist

    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: do not depend on its host name
    # A rank that waits for the next request waits as long as the rollouts take; a dead rank is seen by the launcher.
    dist.init_process_group("gloo", timeout=timedelta(days=1))


def _broadcast(frames: list[bytes] | None) -> list[bytes] | list[memoryview]:
    """Rank 0's frames on every rank."""
    import torch
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        assert frames is not None
        return frames
    count = torch.tensor([len(frames or ())])
    dist.broadcast(count, 0)
    sizes = torch.tensor([len(frame) for frame in frames]) if frames else torch.zeros(int(count), dtype=torch.int64)
    dist.broadcast(sizes, 0)
    joined = bytearray(b"".join(frames)) if frames else bytearray(int(sizes.sum()))
    dist.broadcast(torch.frombuffer(joined, dtype=torch.uint8), 0)
    ends = np.cumsum(sizes.numpy())
    return [memoryview(joined)[end - size : end] for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]


def _tie_to_launcher() -> None:
    """SIGKILL when the launcher dies; SIGINT belongs to the node, which stops the learner with Stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep_freed_memory() -> None:
    """glibc returns large freed blocks to the kernel at once; each training step then pays for thousands of page faults
    (measured: 20,000 and a tenth of the step). Without glibc nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def main() -> int:
    _tie_to_launcher()
    _keep_freed_memory()
    parser = argparse.ArgumentParser(description="rocstar learner rank")
    parser.add_argument("--connect", required=True, help="the node's ZeroMQ address")
    address = parser.parse_args().connect
    node = NodeLink(address) if os.environ.get("RANK", "0") == "0" else None
    try:
        Learner(node).run()
    except NodeGone as error:
        print(f"learner: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        reason = str(error) if isinstance(error, Fatal) else _one_line(error)
        print(f"learner: {reason}", file=sys.stderr)
        if node:
            node.reply(link.Failed(reason=reason))
        return 1
    finally:
        if node:
            node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
