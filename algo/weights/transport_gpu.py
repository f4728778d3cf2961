"""The learner's half of weight transfer on GPUs. Written against vLLM 0.26 to 0.32; not yet run on a GPU.

    nccl  replicas pull from the GPU of rank 0, each over a communicator of its own
    ipc   replicas read the memory of the learner's GPU that they share (`engine.replica.weight_transfer_gpu`)

Invariants
- Both hold one copy of the published weights: on the GPU of rank 0 (nccl), on each GPU of the learner (ipc).
- With ipc the last 8 bytes of that copy are its version, -1 while it is written: who reads it meanwhile sees that.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from algo.weights.layout import Layout, Pulled, ended

# What `reduce_tensor` says of memory on a GPU after shape and dtype, in its order.
HANDLE = (
    *("device", "handle", "size_bytes", "offset_bytes", "requires_grad"),
    *("counter_handle", "counter_offset", "event_handle", "event_sync_required"),
)


class Nccl(Pulled):
    scheme = "nccl"

    def __init__(self, layout: Layout, folder: Path) -> None:
        super().__init__(layout, folder, torch.device("cuda", torch.cuda.current_device()))

    @contextmanager
    def _joined(self, store: dist.Store, members: int) -> Iterator[Callable[[Tensor], Any]]:
        """On a stream of its own, that of this thread: NCCL waits for a replica that died until it is told to end."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        torch.cuda.set_device(self._memory.device)  # of this thread
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            group = PyNcclCommunicator(StatelessProcessGroup(0, members, store), device=self._memory.device)
            with ended(group.destroy) as late:

                def send(memory: Tensor) -> None:
                    group.broadcast(memory, src=0, stream=stream)
                    stream.synchronize()
                    if late.is_set():
                        raise TimeoutError("the replica did not take it in time")

                yield send


class Ipc:
    """One of these on every rank: a replica finds the handle of its own GPU in the address."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        words = -(-layout.size_bytes // 8) + 1
        self._memory = torch.empty(8 * words, dtype=torch.uint8, device="cuda")
        self._version = self._memory[-8:].view(torch.int64)
        self._views = layout.views(self._memory[: layout.size_bytes])
        self._handle = _handle(self._memory)
        self._handles: dict[str, dict[str, Any]] = {}

    @contextmanager
    def writing(self, version: int) -> Iterator[dict[str, Tensor]]:
        self._version.fill_(-1)
        yield self._views
        self._version.fill_(version)
        torch.cuda.synchronize()
        handles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(handles, self._handle)  # ends only when every rank has written
        self._handles = {gpu: handle for part in handles for gpu, handle in part.items()}

    def address(self, version: int) -> str:
        dtype = str(self._layout.dtype).removeprefix("torch.")
        weights = [(name, dtype, shape) for name, shape in self._layout.shapes.items()]
        return "ipc:" + json.dumps({"handles": self._handles, "weights": weights})


def _handle(memory: Tensor) -> dict[str, dict[str, Any]]:
    """GPU -> what opens its memory in another process, as plain values. Once for each memory: PyTorch counts them."""
    _, found = reduce_tensor(memory)
    plain = [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in found[6:]]
    return {str(torch.cuda.get_device_properties(memory.device).uuid): dict(zip(HANDLE, plain, strict=True))}
