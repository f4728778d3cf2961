"""The replica's half of "nccl". Written against vLLM 0.26 to 0.33; not yet run on a GPU.

It runs inside the engine's workers, each of which has a GPU. The learner's half is `algo.weights.transport_gpu`.
"""

from __future__ import annotations

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

from engine.replica.weight_transfer import HostWeightTransfer, Published
from engine.replica.weight_transfer_gloo import ask, size_bytes, views

PIECE_BYTES = 64 << 20  # as the learner sends them


class NcclWeightTransfer(HostWeightTransfer):
    """Backend "nccl": a group of the learner's rank 0 and this replica's workers, for one update."""

    def receive_weights(self, update_info: Published) -> None:
        rank, members = 1 + self.parallel_config.rank, 1 + self.parallel_config.world_size
        store, buckets = ask(update_info, members, first=rank == 1)
        group = PyNcclCommunicator(StatelessProcessGroup(rank, members, store), device=self.device)
        try:
            stream = torch.cuda.current_stream(self.device)
            for bucket in buckets:
                memory = torch.empty(size_bytes(bucket), dtype=torch.uint8, device=self.device)
                for piece in memory.split(PIECE_BYTES):
                    group.broadcast(piece, src=0, stream=stream)
                self.load(views(memory, bucket))
            stream.synchronize()
        finally:
            group.destroy()
