"""The replica's half of "nccl" and "ipc". Written against vLLM 0.26 to 0.32; not yet run on a GPU.

Runs inside the engine's workers, each of which has a GPU. The learner's half is `algo.weights.transport_gpu`.
"""

from __future__ import annotations

import base64
import json

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

from engine.replica.weight_transfer import HostWeightTransfer, Published
from engine.replica.weight_transfer_gloo import ask, size_bytes, views


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
                group.broadcast(memory, src=0, stream=stream)
                self.load(views(memory, bucket))
            stream.synchronize()
        finally:
            group.destroy()


class IpcWeightTransfer(HostWeightTransfer):
    """Backend "ipc", on a GPU that a rank of the learner has too."""

    def receive_weights(self, update_info: Published) -> None:
        published = json.loads(update_info.path.removeprefix("ipc:"))
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        if gpu not in published["handles"]:
            raise RuntimeError(f"no rank of the learner has the GPU {gpu}, but {', '.join(published['handles'])}")
        memory = _opened(published["handles"][gpu], self.device.index)
        self.load(views(memory, published["weights"]))
        torch.cuda.synchronize()
        found = int(memory[-8:].view(torch.int64))
        if found != update_info.version:
            raise RuntimeError(f"weights {update_info.version} were overwritten while they were read: now {found}")


def _opened(handle: dict, device: int) -> torch.Tensor:
    """The learner's memory, uint8."""
    size = handle["size_bytes"]
    return rebuild_cuda_tensor(
        torch.Tensor,
        (size,),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        device,
        base64.b64decode(handle["handle"]),
        size,
        handle["offset_bytes"],
        False,
        base64.b64decode(handle["counter_handle"]),
        handle["counter_offset"],
        base64.b64decode(handle["event_handle"]),
        handle["event_sync_required"],
    )
