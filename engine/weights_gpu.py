"""The replica's half of "nccl" and "ipc". Written against vLLM 0.32 and torch 2.13; not yet run on a GPU.

Runs inside the engine's workers, each of which has a GPU. The learner's half is `algo.transport_gpu`.
"""

from __future__ import annotations

import base64
import json

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from engine.weights import HostWeightTransfer, NoRendezvous, Published
from engine.weights_pull import ask, views


class NcclWeightTransfer(NCCLWeightTransferEngine):
    """Backend "nccl": vLLM's own, but for its group, which is the learner's rank 0 and this replica, for one update."""

    init_info_cls = NoRendezvous
    update_info_cls = Published

    def init_transfer_engine(self, init_info: NoRendezvous) -> None:
        self.packed = True

    def receive_weights(self, update_info: Published) -> None:
        rank, members = 1 + self.parallel_config.rank, 1 + self.parallel_config.world_size
        store, buckets = ask(update_info, members, first=rank == 1)
        group = StatelessProcessGroup(rank=rank, world_size=members, store=store)
        self.model_update_group = PyNcclCommunicator(group, device=self.device)
        try:
            names, dtypes, shapes = zip(*(entry for bucket in buckets for entry in bucket), strict=True)
            super().receive_weights(NCCLWeightTransferUpdateInfo(list(names), list(dtypes), list(shapes)))
        finally:
            self.shutdown()


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
