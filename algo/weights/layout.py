"""What every way of weight transfer needs: the weights as bytes, memory that replicas pull, a deadline for a pull.

Invariants
- Memory is not written while a replica pulls it, so what a replica pulls is one version, whole.
- A replica depends on no other: one that dies during a transfer, or comes later, changes nothing for the rest. If it
  dies silently (nccl), its pull is broken off after PULL_S; a group that is never completed costs a thread.
"""

from __future__ import annotations

import itertools
import json
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Bytes that are gathered ahead of the copy, and that a replica receives before it begins to load.
BUCKET_BYTES = 64 << 20
SOCKET = "pulls"  # name of the socket in the folder of Pulled
# Bytes of a GPU's memory through which host memory is sent to replicas' GPUs.
PIECE_BYTES = 64 << 20
# Deadline of a pull, in seconds; a replica's update has it too.
PULL_S = 60.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The weights as bytes, one after the other in the order given. shapes: by Hugging Face name."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yields (name, first byte, byte after the last)."""
        end = 0
        for name, shape in self.shapes.items():
            start, end = end, end + math.prod(shape) * self.dtype.itemsize
            yield name, start, end

    @property
    def size_bytes(self) -> int:
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def buckets(self) -> list[list[tuple[str, int, int]]]:
        """Returns spans of whole weights, in groups of BUCKET_BYTES or little more."""
        buckets: list[list[tuple[str, int, int]]] = []
        for span in self.spans():
            if not buckets or buckets[-1][-1][2] - buckets[-1][0][1] >= BUCKET_BYTES:
                buckets.append([])
            buckets[-1].append(span)
        return buckets

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns the weights as views of memory, uint8 [size_bytes]."""
        return {name: memory[start:end].view(self.dtype).view(self.shapes[name]) for name, start, end in self.spans()}


class Transport(Protocol):
    """Hands one rank's published weights on. The smallest one, for replicas that share this process:

    class Here:
        def __init__(self, layout): self.views = layout.views(torch.empty(layout.size_bytes, dtype=torch.uint8))
        def writing(self, version): return contextlib.nullcontext(self.views)
        def address(self, version): return f"here-{version}"
    """

    def writing(self, version: int) -> AbstractContextManager[dict[str, Tensor]]:
        """Yields where to write each weight; at the end they are this version. Empty: this rank hands nothing on."""
        ...

    def address(self, version: int) -> str:
        """Returns what a replica's `update_weights` needs."""
        ...


class Pulled:
    """Lets replicas pull weights from this process's memory: the part that gloo and nccl share.

    A replica connects to a UNIX socket in `folder`, asks for a version in a line of JSON, and gets the layout. A thread
    serves it, in a group of its own whose members meet in a file of that folder (`meeting`). While weights are written
    the replica waits; a request for another version than the current one is refused.

    folder: private. The stores of such groups hold pickles, so nobody else may write them; and a socket in it has no
    port that others could reach.
    """

    scheme: str

    def __init__(self, layout: Layout, folder: Path, *, pinned: bool = False) -> None:
        """pinned: whether the memory is pinned, so that a GPU copies to and from it at its link's full speed."""
        self._layout, self._folder = layout, folder
        self._memory = torch.empty(layout.size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._views = layout.views(self._memory)
        self._version: int | None = None  # None while it is written
        self._pulls = 0
        self._changed = threading.Condition()
        folder.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        (folder / SOCKET).unlink(missing_ok=True)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen()
        threading.Thread(target=self._answer, name="weights", daemon=True).start()

    @contextmanager
    def writing(self, version: int) -> Iterator[dict[str, Tensor]]:
        with self._changed:
            self._version = None
            if not self._changed.wait_for(lambda: not self._pulls, 2 * PULL_S):  # each has ended by then, or was ended
                raise TimeoutError(
                    f"weights {version} wait: a replica still pulls the version before, {2 * PULL_S:g} s later"
                )
        yield self._views
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def address(self, version: int) -> str:
        return f"{self.scheme}://{self._folder}"

    def _description(self) -> str:
        """Returns buckets of [name, dtype, shape] as JSON, in the order in which they are sent."""
        dtype = str(self._layout.dtype).removeprefix("torch.")
        buckets = self._layout.buckets()
        return json.dumps([[(name, dtype, self._layout.shapes[name]) for name, _, _ in bucket] for bucket in buckets])

    def _answer(self) -> None:
        description = self._description().encode()
        for number in itertools.count(1):
            connection, _ = self._listener.accept()
            arguments = connection, description
            threading.Thread(target=self._serve, args=arguments, name=f"pull-{number}", daemon=True).start()

    def _serve(self, connection: socket.socket, description: bytes) -> None:
        """Serves one replica. It joins the replica first, so that nothing waits for one that never comes."""
        wanted = None
        try:
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(PULL_S)
                wanted = json.loads(lines.readline())
                connection.sendall(description)
            if not wanted["asks"]:
                return  # a further member of a group
            joined = self._joined(meeting(self._folder, wanted["group"], wanted["members"]), wanted["members"])
            with joined as send, self._held(wanted["version"]):
                for bucket in self._layout.buckets():
                    send(self._memory[bucket[0][1] : bucket[-1][2]])
        except Exception as error:  # the replica died, which its own supervisor notices
            print(f"learner: weight pull {wanted} broke off: {error}", file=sys.stderr)

    @contextmanager
    def _held(self, version: int) -> Iterator[None]:
        """Keeps this version from being overwritten meanwhile. Raises RuntimeError if it is not the current one."""
        with self._changed:
            self._changed.wait_for(lambda: self._version is not None, PULL_S)
            if self._version != version:
                raise RuntimeError(f"refused: the current version is {self._version}")
            self._pulls += 1
        try:
            yield
        finally:
            with self._changed:
                self._pulls -= 1
                self._changed.notify_all()

    def _joined(self, store: dist.Store, members: int) -> AbstractContextManager[Callable[[Tensor], Any]]:
        """Joins a group with one replica as rank 0; yields a function that sends memory and returns when it is free."""
        raise NotImplementedError


def staged(memory: Tensor, buffer: Tensor) -> Iterator[Tensor]:
    """Yields memory (uint8, host) piece by piece as copies in a buffer (uint8, of a device), one after the other.

    Copies are put into the device's current stream, and so is what a caller does with a piece: it is done before the
    next copy begins.
    """
    for piece in memory.split(len(buffer)):
        copied = buffer[: len(piece)]
        copied.copy_(piece, non_blocking=True)
        yield copied


@contextmanager
def ended(end: Callable[[], None]) -> Iterator[threading.Event]:
    """Calls `end` once: at the end of the block, or after PULL_S if the block still waits; then the event is set."""
    late = threading.Event()

    def expire() -> None:
        late.set()
        end()

    watchdog = threading.Timer(PULL_S, expire)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield late
    finally:
        watchdog.cancel()
        watchdog.join()
        if not late.is_set():
            end()


def meeting(folder: Path, group: str, members: int) -> dist.Store:
    """Returns the store of a group that pulls, in a file of its own: one that dies while writing harms no other."""
    store = dist.FileStore(str(folder / f"pull-{group}"), members)
    store.set_timeout(timedelta(seconds=PULL_S))
    return store
