"""The learner's half of weight transfer between GPUs, nccl: replicas pull from the GPU of rank 0.

Each replica has a communicator of its own. Written against vLLM 0.26 to 0.33; not yet run on a GPU.

Invariant: one copy of the published weights lies on the GPU of rank 0, and none on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from algo.weights.layout import Layout, Pulled, ended


class Nccl(Pulled):
    scheme = "nccl"

    def __init__(self, layout: Layout, folder: Path) -> None:
        super().__init__(layout, folder, torch.device("cuda", torch.cuda.current_device()))

    @contextmanager
    def _joined(self, store: dist.Store, members: int) -> Iterator[Callable[[Tensor], Any]]:
        """Sends on a stream of its own, that of this thread, since NCCL waits for a dead replica until it is ended."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        torch.cuda.set_device(self._memory.device)  # this thread's device
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
