"""The learner process: one per rank, started by `engine.learner.launch`, fed by the node over ZeroMQ.

    python -S -m engine.learner.launch --ranks R --folder DIR algo.learner --connect ipc:///path/of/socket

On other hosts the ranks get `--connect none --checkpoint DIR`: a folder with the checkpoint's configuration. Their
weights come from rank 0.

Invariants
- Rank 0 owns the socket; every rank sees the same requests in the same order.
- Every request but Stop gets exactly one reply. After it has answered `Failed` to anything but Save, the process ends
  with exit code 1; a failed Save leaves the learner serving, since its state is intact.
- It never outlives the node: it ends when the connection breaks or no node answers, and is killed with its launcher.

Torch is not imported with this module. The process imports it before it waits for Configure, which comes when the
replicas are up.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zmq

from algo.learner.config import LearnerConfig
from engine.learner import messages
from engine.types import Batch

if TYPE_CHECKING:
    from algo.learner.trainer import Trainer

Answer = tuple[messages.Reply, messages.Arrays]

CONNECT_S = 30  # the node binds before it starts the learner; a longer silence means that it is gone
EMPTY_BATCHES = 10  # so many steps without anything to learn from are a broken run, not an unlucky one
NO_CANARY: messages.Arrays = {"canary": np.zeros(0, np.float32)}  # for weights that nobody samples with
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
LARGEST_KEPT = 128 << 20  # bytes; a freed block up to this size stays with the process


class NodeGone(RuntimeError):
    """The node is gone, so there is nobody to answer."""


class Fatal(RuntimeError):
    """The learner cannot continue; the message goes to the node as `Failed`."""


@contextmanager
def _fatal(doing: str) -> Iterator[None]:
    """Turns any exception inside into Fatal, with one line that begins with what was being done."""
    try:
        yield
    except Exception as error:
        raise Fatal(f"{doing}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class NodeLink:
    """Rank 0's end of the PAIR socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._patience_ms: int | None = 1000 * CONNECT_S

    def receive(self) -> list[bytes]:
        """Returns the next request's frames. Raises NodeGone without a connection, or if none is made in CONNECT_S."""
        while True:
            ready = dict(self._poller.poll(self._patience_ms))
            if self._socket in ready:
                return self._socket.recv_multipart()
            if not ready:
                raise NodeGone(f"no node answered within {CONNECT_S} s")
            self._patience_ms = None  # connected: from now on a broken connection wakes us
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], sys.byteorder)
            if event == zmq.EVENT_DISCONNECTED and not self._socket.poll(0):
                raise NodeGone("the node closed the connection")

    def reply(self, message: messages.Reply, arrays: messages.Arrays) -> None:
        self._socket.send_multipart(messages.pack(message, arrays))

    def close(self) -> None:
        """Closes the socket; the last message (a Failed, for instance) has two seconds to leave."""
        self._socket.disable_monitor()
        self._context.destroy(linger=2000)


class Learner:
    """Answers requests; the first is a Configure. Its methods raise Fatal."""

    trainer: Trainer
    _batches = 0
    _empty = 0  # consecutive batches without a token to train

    def __init__(self, checkpoint: Path | None = None) -> None:
        """checkpoint: this host's own copy, instead of the path in Configure."""
        self._checkpoint = checkpoint

    def configure(self, request: messages.Configure) -> Answer:
        from algo.learner.trainer import Trainer

        config, source = LearnerConfig(**request.learner), self._checkpoint or Path(request.checkpoint)
        with _fatal(f"checkpoint {source}"):
            self.trainer = Trainer(config, source, request.canary, Path(request.weights_dir), request.seed)
        version = 0
        if request.resume is not None:
            with _fatal("resume"):
                version = self.trainer.restore(Path(request.resume))
        elif request.begin_from is not None:
            with _fatal("begin from another run"):
                self.trainer.restore(Path(request.begin_from))
        weights, canary, _ = self.publish(version)
        ready = messages.Ready(
            version=version,
            weights=weights,
            canary_further=self.trainer.canary.further,
            canary_gaps=self.trainer.canary.gaps,
            parameters=self.trainer.parameters,
            world_size=self.trainer.world_size,
            versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        )
        return ready, canary

    def checkpoint(self, request: messages.Checkpoint) -> Answer:
        with _fatal("checkpoint"):
            self.trainer.checkpoint(Path(request.path), request.version)
        return messages.Saved(path=request.path), {}

    def check(self, *, to_end: bool) -> None:
        """Raises Fatal if a checkpoint could not be written. to_end: waits for one that is being written."""
        if hasattr(self, "trainer"):
            with _fatal("checkpoint"):
                self.trainer.checkpoints.wait(to_end=to_end)

    def train(self, request: messages.Train, arrays: messages.Arrays) -> Answer:
        from algo.learner.measure.torch_trace import traced

        self._batches += 1
        with _fatal(f"step {request.step}"), traced(self.trainer.config.trace, self._batches):
            metrics = self.trainer.train(Batch.of_arrays(request.step, arrays), request.version or None, request.rows)
        self._empty = 0 if metrics["tokens"] else self._empty + 1
        if self._empty == EMPTY_BATCHES:
            raise Fatal(f"step {request.step}: {EMPTY_BATCHES} batches in a row held nothing to train on")
        weights, canary, seconds = self.publish(request.version) if request.version else ("", NO_CANARY, {})
        metrics |= seconds | (self.trainer.canary.metrics if request.version else {})
        trained = messages.Trained(
            step=request.step,
            version=request.version,
            weights=weights,
            metrics=metrics,
            canary_further=self.trainer.canary.further if request.version else [],
        )
        return trained, {**canary, **self.trainer.noted}

    def save(self, request: messages.Save) -> Answer:
        try:
            self.trainer.save(Path(request.path), chat_template=request.chat_template, end_of_turn=request.end_of_turn)
        except Exception as error:
            return messages.Failed(reason=f"cannot save checkpoint to {request.path}: {_one_line(error)}"), {}
        return messages.Saved(path=request.path), {}

    def score(self, arrays: messages.Arrays) -> Answer:
        with _fatal("scoring"):
            return messages.Scored(), {"logprobs": self.trainer.score(Batch.of_arrays(0, arrays))}

    def publish(self, version: int) -> tuple[str, messages.Arrays, dict[str, float]]:
        """Publishes the weights, scores the canary, releases the GPU; returns the address, the scores, the seconds."""
        trainer, started = self.trainer, time.perf_counter()
        with _fatal(f"cannot publish version {version} to {trainer.publisher.weights_dir}"):
            weights = trainer.publisher.publish(version)
        published = time.perf_counter()
        canary = trainer.score_canary()
        seconds = {"publish_s": published - started, "canary_s": time.perf_counter() - published}
        trainer.release_gpu()
        return weights, {"canary": canary}, seconds


def serve(node: NodeLink | None, checkpoint: Path | None = None) -> None:
    """Consumes requests and answers each; returns on Stop.

    node: None on ranks other than 0. Raises Fatal or NodeGone.
    """
    from algo.learner.trainer import broadcast, join_group

    learner = Learner(checkpoint)
    frames = node.receive() if node else None
    if frames is not None:
        check_first(frames)
    join_group()
    while True:
        request, arrays = messages.unpack_request(broadcast(frames))
        learner.check(to_end=isinstance(request, messages.Stop))
        match request:
            case messages.Configure():
                answer = learner.configure(request)
            case messages.Train():
                answer = learner.train(request, arrays)
            case messages.Save():
                answer = learner.save(request)
            case messages.Score():
                answer = learner.score(arrays)
            case messages.Checkpoint():
                answer = learner.checkpoint(request)
            case messages.Stop():
                return
        if node:
            node.reply(*answer)
            frames = node.receive()


def check_first(frames: list[bytes]) -> None:
    """Checks the first message for all that is cheap to see, before the ranks join. Raises Fatal or NodeGone."""
    request, _ = messages.unpack_request(frames)
    if isinstance(request, messages.Stop):
        raise NodeGone("stopped before it was configured")  # exit code 1, so that the launcher ends the ranks that wait
    if not isinstance(request, messages.Configure):
        raise Fatal(f"Configure expected first, got {type(request).__name__}")
    source = Path(request.checkpoint)
    with _fatal(f"checkpoint {source}: config.json cannot be read"):
        config = json.loads((source / "config.json").read_text())
    if not isinstance(config, dict) or "model_type" not in config:
        raise Fatal(f"checkpoint {source}: config.json names no model_type")
    if not any(source.glob("*.safetensors")):
        raise Fatal(f"checkpoint {source}: holds no *.safetensors file")
    if (size := config.get("vocab_size")) and any(token >= size for ids in request.canary for token in ids):
        raise Fatal(f"checkpoint {source}: its tokenizer gives tokens beyond the model's vocabulary of {size}")
    LearnerConfig(**request.learner).lr_at(1)


def _set_up_process() -> None:
    """Ignores SIGINT, which belongs to the node (it stops the learner with Stop), and keeps freed memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks, which it would return to the kernel at once; no effect without glibc.

    Otherwise each training step pays for thousands of page faults (measured: 20,000, a tenth of the step). Logits of a
    large vocabulary are still returned at once: if they were kept, smaller blocks would soon cut theirs, and the heap
    of a row of 32,768 tokens grew to 16.7 GB with a vocabulary of 151,936, of which the passes use a sixth.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def main() -> int:
    _set_up_process()
    parser = argparse.ArgumentParser(description="rocstar learner rank")
    parser.add_argument("--connect", required=True, help="the node's ZeroMQ address; none on other hosts")
    parser.add_argument("--checkpoint", type=Path, help="where this host has the checkpoint's configuration")
    options = parser.parse_args()
    speaks = options.connect != "none" and os.environ.get("LOCAL_RANK", "0") == "0"
    node = NodeLink(options.connect) if speaks else None
    try:
        serve(node, options.checkpoint)
    except Exception as error:
        reason = str(error) if isinstance(error, Fatal | NodeGone) else _one_line(error)
        traceback.print_exc()  # for the log, since the bug may be in the user's loss
        print(f"learner: {reason}", file=sys.stderr)
        if node and not isinstance(error, NodeGone):
            node.reply(messages.Failed(reason=reason), {})
        return 1
    finally:
        if node:
            node.close()
    return 0


def leave(status: int) -> None:
    """Ends a rank when its threads are done (one may be writing a checkpoint), without Python's finalization.

    In the finalization a thread of gloo may free its tensors, which aborts the process; the launcher then ends ranks
    that are still writing.
    """
    atexit.register(os._exit, status)
    atexit.register(sys.stdout.flush)
