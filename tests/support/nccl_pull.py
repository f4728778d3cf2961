"""Both halves of "nccl" without a GPU: memory of the host stands for the GPUs', and vLLM's own store for NCCL.

    python -m tests.support.nccl_pull

The learner's half runs in this process, and threads are the two workers of a replica, which share its layers. Real are:
who asks for weights, ranks and numbers of members, the meeting, buckets, views, and what happens when a worker is gone.
Prints one JSON object.
"""

import json
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from engine.replica.config import prepare_environment

SHAPES = {"a.weight": (30, 20), "b.weight": (7,), "c.weight": (40, 10)}
GONE_S = 3.0  # in place of a minute


class Stream:
    def synchronize(self): ...


class HostTorch:
    """Stands for torch, with the host in place of a GPU."""

    cuda = SimpleNamespace(
        Stream=Stream,
        current_device=lambda: 0,
        current_stream=lambda device: Stream(),
        set_device=lambda device: None,
        stream=lambda stream: nullcontext(),
    )

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, *_):
        return torch.device("cpu")

    def empty(self, *size, pin_memory=False, **kind):
        return torch.empty(*size, **kind)


class Communicator:
    """Stands in for PyNcclCommunicator: it waits for all members, as NCCL does, until it is destroyed."""

    members = []  # noqa: RUF012 (of all groups)

    def __init__(self, group, device):
        self._group, self._ended = group, threading.Event()
        Communicator.members.append((group.rank, group.world_size))
        group.all_gather_obj(group.rank)

    def broadcast(self, tensor, src, stream):
        """Sends the bytes, and waits until every other member has them, or the group was destroyed."""
        if self._group.rank == src:
            self._group.broadcast_obj(bytes(tensor.numpy()), src)
        else:
            tensor.copy_(torch.frombuffer(bytearray(self._group.broadcast_obj(None, src)), dtype=torch.uint8))
        for rank in range(self._group.world_size):
            self._taken(rank)

    def _taken(self, rank):
        if rank == self._group.rank:
            self._group.broadcast_obj("taken", rank)
            return
        key = f"broadcast_from/{rank}/{self._group.broadcast_recv_src_counter[rank]}"
        while not self._group.store.check([key]):
            if self._ended.wait(0.01):
                return
        self._group.broadcast_obj(None, rank)

    def destroy(self):
        self._ended.set()


def put_stand_ins():
    import vllm.distributed.device_communicators.pynccl as pynccl

    import algo.weights.layout
    import algo.weights.transport_gpu
    import engine.replica.weight_transfer_gpu

    pynccl.PyNcclCommunicator = engine.replica.weight_transfer_gpu.PyNcclCommunicator = Communicator
    for module in (algo.weights.layout, algo.weights.transport_gpu, engine.replica.weight_transfer_gpu):
        module.torch = HostTorch()
    algo.weights.layout.PULL_S = GONE_S
    algo.weights.layout.BUCKET_BYTES = 1000  # several buckets
    assert algo.weights.layout.PIECE_BYTES == engine.replica.weight_transfer_gpu.PIECE_BYTES, "both sides cut alike"
    algo.weights.transport_gpu.PIECE_BYTES = engine.replica.weight_transfer_gpu.PIECE_BYTES = 300  # several pieces


class Worker:
    """Is a worker's half, which takes what it gets."""

    def __init__(self, rank, members, dies_after=None):
        from engine.replica.weight_transfer_gpu import NcclWeightTransfer

        self.transfer = object.__new__(NcclWeightTransfer)
        self.transfer.parallel_config = SimpleNamespace(rank=rank, world_size=members)
        self.transfer.device = torch.device("cpu")
        self.transfer.load = self.load
        self.weights, self._dies_after = {}, dies_after

    def load(self, weights):
        if self._dies_after is not None and len(self.weights) >= self._dies_after:
            raise SystemExit  # as if its process were gone: it takes nothing any more
        self.weights |= {name: weight.clone() for name, weight in weights}

    def pull(self, address, version, reader):
        from engine.replica.weight_transfer import Published

        arguments = Published(path=address, version=version, reader=reader)
        thread = threading.Thread(target=self.transfer.receive_weights, args=(arguments,), daemon=True)
        thread.start()
        return thread


def filled(views, version):
    for name, view in views.items():
        view.copy_(torch.full(view.shape, float(version)) + len(name))


def holds(worker, version):
    wanted = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    filled(wanted, version)
    same = worker.weights.keys() == wanted.keys()
    return same and all(torch.equal(worker.weights[name], wanted[name]) for name in wanted)


def main():
    put_stand_ins()
    from algo.weights.layout import Layout
    from algo.weights.transport_gpu import Nccl

    result = {}
    with tempfile.TemporaryDirectory() as folder:
        nccl = Nccl(Layout(SHAPES, torch.bfloat16), Path(folder))
        with nccl.writing(1) as views:
            filled(views, 1)
        workers = [Worker(rank, 2) for rank in range(2)]
        pulls = [worker.pull(nccl.address(1), 1, "replica-0") for worker in workers]
        for pull in pulls:
            pull.join(20)
        result["both"] = [holds(worker, 1) for worker in workers]
        result["members"] = sorted(Communicator.members)

        dying = [Worker(0, 2), Worker(1, 2, dies_after=0)]
        begun = time.monotonic()
        for worker in dying:
            worker.pull(nccl.address(1), 1, "replica-1")
        other = [Worker(rank, 2) for rank in range(2)]
        pulls = [worker.pull(nccl.address(1), 1, "replica-2") for worker in other]
        for pull in pulls:
            pull.join(20)
        result["beside_a_dying_one"] = [holds(worker, 1) for worker in other]
        with nccl.writing(2) as views:
            filled(views, 2)
        result["waited_s"] = round(time.monotonic() - begun, 1)
        again = [Worker(rank, 2) for rank in range(2)]
        pulls = [worker.pull(nccl.address(2), 2, "replica-0") for worker in again]
        for pull in pulls:
            pull.join(20)
        result["next"] = [holds(worker, 2) for worker in again]
    print(json.dumps(result))


if __name__ == "__main__":
    from algo.learner.learner import leave

    prepare_environment()
    main()
    leave(0)  # as a rank does: threads that still wait for the dead would abort Python's finalization
