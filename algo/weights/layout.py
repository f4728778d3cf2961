"""What every way of weight transfer stands on: the weights as bytes, memory that replicas pull, a deadline for a pull.

Invariants
- Memory is not written while somebody pulls it, so what a replica pulls is one version, whole.
- A replica depends on no other: one that dies during a transfer, or comes later, changes nothing for the rest. Where
  it dies without a word (nccl), its pull is broken off after PULL_S; a group that never comes about costs a thread.
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

# What is gathered ahead of the copy, and what a replica receives before it begins to load.
BUCKET_BYTES = 64 << 20
SOCKET = "pulls"  # in the folder that Pulled has
# A pull takes no longer: a replica's update has this deadline too.
PULL_S = 60.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The weights as bytes, one after the other in the order given; shapes: by Hugging Face name."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """(name, first byte, byte after the last)."""
        end = 0
        for name, shape in self.shapes.items():
            start, end = end, end + math.prod(shape) * self.dtype.itemsize
            yield name, start, end

    @property
    def size_bytes(self) -> int:
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def buckets(self) -> list[list[tuple[str, int, int]]]:
        """Spans of whole weights, BUCKET_BYTES or little more together."""
        buckets: list[list[tuple[str, int, int]]] = []
        for span in self.spans():
            if not buckets or buckets[-1][-1][2] - buckets[-1][0][1] >= BUCKET_BYTES:
                buckets.append([])
            buckets[-1].append(span)
        return buckets

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The weights in memory, uint8 [size_bytes]."""
        return {name: memory[start:end].view(self.dtype).view(self.shapes[name]) for name, start, end in self.spans()}


class Transport(Protocol):
    """How one rank hands published weights on. The smallest one, for replicas that share this process:

    class Here:
        def __init__(self, layout): self.views = layout.views(torch.empty(layout.size_bytes, dtype=torch.uint8))
        def writing(self, version): return contextlib.nullcontext(self.views)
        def address(self, version): return f"here-{version}"
    """

    def writing(self, version: int) -> AbstractContextManager[dict[str, Tensor]]:
        """Where to write each weight; on the way out they are this version. Empty: this rank hands nothing on."""
        ...

    def address(self, version: int) -> str:
        """What a replica's `update_weights` needs."""
        ...


class Pulled:
    """Weights in this process's memory, which replicas pull: the part that gloo and nccl share.

    A replica connects to a UNIX socket in `folder`, says in a line of JSON what it wants, and gets the layout. It is
    served by a thread, in a group of its own, whose members meet in a file of that folder (`meeting`). While weights
    are written it is kept waiting; for another version than there is it is refused.

    folder: private. The stores of such groups hold pickles, so nobody else may write them; and a socket of it has no
    port that others could reach.
    """

    scheme: str

    def __init__(self, layout: Layout, folder: Path, device: torch.device) -> None:
        self._layout, self._folder = layout, folder
        self._memory = torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
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
            if not self._changed.wait_for(lambda: not self._pulls, 2 * PULL_S):  # each has ended or was ended by then
                raise TimeoutError(f"weights {version}: a replica still pulls those before after {2 * PULL_S:g} s")
        yield self._views
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()  # not of all: a pull may hang on another
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def address(self, version: int) -> str:
        return f"{self.scheme}://{self._folder}"

    def _description(self) -> str:
        """Buckets of [name, dtype, shape] in the order in which they are sent."""
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
        """Joins the replica first: where that never comes about, nothing waits for it."""
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
        except Exception as error:  # the replica died: its own supervisor knows
            print(f"learner: weight pull {wanted} broke off: {error}", file=sys.stderr)

    @contextmanager
    def _held(self, version: int) -> Iterator[None]:
        """This version, which is not overwritten meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._version is not None, PULL_S)
            if self._version != version:
                raise RuntimeError(f"refused: there is version {self._version}")
            self._pulls += 1
        try:
            yield
        finally:
            with self._changed:
                self._pulls -= 1
                self._changed.notify_all()

    def _joined(self, store: dist.Store, members: int) -> AbstractContextManager[Callable[[Tensor], Any]]:
        """A group with one replica, as rank 0: sends memory (uint8) to it, and returns when it may be overwritten."""
        raise NotImplementedError


@contextmanager
def ended(end: Callable[[], None]) -> Iterator[threading.Event]:
    """Calls `end` once: on the way out, or after PULL_S, if what waits inside does not come; then the event is set."""
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
    """The store of a group that pulls, in a file of its own: one that dies while it writes harms no other."""
    store = dist.FileStore(str(folder / f"pull-{group}"), members)
    store.set_timeout(timedelta(seconds=PULL_S))
    return store
