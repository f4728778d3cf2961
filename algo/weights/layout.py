"""What every way of weight transfer stands on: the weights as bytes, memory that replicas pull, a deadline for a pull.

Invariants
- Memory is not written while somebody pulls it, so what a replica pulls is one version, whole.
- A replica depends on no other: one that dies during a transfer, or comes later, changes nothing for the rest. Where
  it dies without a word (nccl), its pull is broken off after PULL_S; a group that never comes about costs a thread.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# What is gathered ahead of the copy, and what a replica receives before it begins to load.
BUCKET_BYTES = 64 << 20
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

    A replica writes what it wants into the store under "pull-N", N counting up; it is served by a thread, in a group of
    its own. While weights are written it is kept waiting; for another version than there is it is refused.
    """

    scheme: str

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._memory = torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
        self._views = layout.views(self._memory)
        self._version: int | None = None  # None while it is written
        self._pulls = 0
        self._changed = threading.Condition()
        self._host, self._port, self._store = _listen()
        self._store.set("layout", self._description())
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
        return f"{self.scheme}://{self._host}:{self._port}"

    def _description(self) -> str:
        """Buckets of [name, dtype, shape] in the order in which they are sent."""
        dtype = str(self._layout.dtype).removeprefix("torch.")
        buckets = self._layout.buckets()
        return json.dumps([[(name, dtype, self._layout.shapes[name]) for name, _, _ in bucket] for bucket in buckets])

    def _answer(self) -> None:
        store = dist.TCPStore(self._host, self._port, timeout=timedelta(days=1))
        number = 0
        while True:
            number += 1
            wanted = json.loads(store.get(f"pull-{number}"))
            threading.Thread(target=self._serve, args=(wanted,), name=f"pull-{number}", daemon=True).start()

    def _serve(self, wanted: dict[str, Any]) -> None:
        """Joins the replica first: where that never comes about, nothing waits for it."""
        try:
            store = dist.TCPStore(self._host, self._port, timeout=timedelta(seconds=PULL_S))
            joined = self._joined(dist.PrefixStore(wanted["group"], store), wanted["members"])
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


def _listen() -> tuple[str, int, dist.TCPStore]:
    """Host, port and store; on one machine, nothing from outside can connect."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    host = "127.0.0.1" if here else socket.gethostbyname(os.environ["MASTER_ADDR"])
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return host, port, store
