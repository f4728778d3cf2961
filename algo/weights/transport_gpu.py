"""The learner's half of weight transfer between GPUs, nccl: replicas pull through the GPU of rank 0.

Each replica has a communicator of its own. Written against vLLM 0.26 to 0.33; not yet run on a GPU.

Invariant: published weights lie in host memory of rank 0, from which a replica may pull them at any time, also one that
comes later. A GPU holds PIECE_BYTES of them for each replica that is pulling: a whole copy would take 27.5 GiB of rank
0's GPU for a 14B, and decide what fits on all ranks. The price is the link between host and GPU (25 GB/s and more) in
place of that between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from algo.weights.layout import PIECE_BYTES, Layout, Pulled, ended, staged


class Nccl(Pulled):
    scheme = "nccl"

    def __init__(self, layout: Layout, folder: Path) -> None:
        super().__init__(layout, folder, pinned=True)
        self._device = torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def _joined(self, store: dist.Store, members: int) -> Iterator[Callable[[Tensor], Any]]:
        """Sends on a stream of its own, that of this thread, since NCCL waits for a dead replica until it is ended."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        torch.cuda.set_device(self._device)  # this thread's device
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=self._device)  # it may fail: before the group
            group = PyNcclCommunicator(StatelessProcessGroup(0, members, store), device=self._device)
            with ended(group.destroy) as late:

                def send(memory: Tensor) -> None:
                    for piece in staged(memory, buffer):
                        group.broadcast(piece, src=0, stream=stream)
                    stream.synchronize()
                    if late.is_set():
                        raise TimeoutError("the replica did not take it in time")

                yield send
