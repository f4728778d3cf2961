"""Gathers the learner's weights and publishes them for the replicas; `algo.learner.state.export` is for other programs.

Invariant: every rank calls these with equal arguments (gathering is a collective); rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from algo.learner.model.lora import adapters, merged
from algo.learner.model.names import by_file
from algo.learner.model.sharding import sharding_mesh
from algo.weights.layout import BUCKET_BYTES, Layout, Transport
from algo.weights.transport import Gloo, Shm, Silent


class Publisher:
    """Publishes the learner's weights for the replicas (`algo.weights.transport`).

    scorer: holds the model as `scorer.model`.
    """

    def __init__(
        self, scorer: nn.Module, weights_dir: Path, transfer: str = "shm", dtype: str = "float32", peft: str = ""
    ) -> None:
        self.weights_dir = weights_dir
        self._scorer = scorer
        self._dtype = getattr(torch, dtype)
        self._make = partial(transport, transfer, weights_dir, peft=peft)
        self._named = named_adapters if transfer == "adapter" else named_weights
        self._transport: Transport | None = None

    def publish(self, version: int) -> str:
        """Returns the address from which replicas load this version, until the version after the next is published.

        Every rank gathers; only one that hands weights on writes them. Raises OSError if there is no room for them.
        """
        if self._transport is None:
            shapes = {name: tuple(weight.shape) for name, weight in self._named(self._scorer)}
            self._transport = self._make(Layout(shapes, self._dtype))
        with self._transport.writing(version) as views:
            for name, weight in self._named(self._scorer):
                if views:
                    views[name].copy_(weight)
        return self._transport.address(version)


def transport(name: str, folder: Path, layout: Layout, peft: str = "") -> Transport:
    """Returns the transport of this rank.

    folder: private, on a memory file system, for files and sockets. peft: an adapter's settings.
    """
    if dist.get_rank() != 0:
        return Silent()
    if name == "nccl":
        from algo.weights.transport_gpu import Nccl

        return Nccl(layout, folder)
    if name == "adapter":
        return Shm(folder, layout, peft)
    return Shm(folder, layout) if name == "shm" else Gloo(layout, folder)


def full_state(scorer: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns `named_weights` of this dtype with the constants that the model keeps beside them (Apertus).

    All are in host memory of rank 0 at once; the other ranks only help to gather.
    """
    kept = scorer.state_dict().keys()
    constants = ((name.removeprefix("model."), each) for name, each in scorer.named_buffers() if name in kept)
    weights = chain(named_weights(scorer), constants)
    return {name: weight.to("cpu", dtype).contiguous() for name, weight in weights if dist.get_rank() == 0}


@torch.no_grad()
def named_weights(scorer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields unsharded weights under the names of the checkpoint's files, adapters merged, without a tied head.

    Experts that the model holds together come one by one, as views (`algo.learner.model.names`), so no second copy of
    the model is held. It is a collective: every rank goes through all of them.
    """
    weights = merged(scorer, Gathered(scorer.parameters()))
    yield from by_file(scorer.get_submodule("model"), ((name.removeprefix("model."), each) for name, each in weights))


@torch.no_grad()
def named_adapters(scorer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields unsharded adapters under the names of peft's files. A collective, like `named_weights`."""
    trained = (weight for name, weight in scorer.named_parameters() if ".lora_" in name)
    for name, weight in adapters(scorer, Gathered(trained)):
        yield f"base_model.model.{name.removeprefix('model.')}", weight


class Gathered:
    """Gathers whole parameters: called with one after another, in about their order, it gathers ahead.

    Each is one collective of c10d. Two of the functional collectives, which DTensors use, corrupt the heap of a rank
    with gloo if they run at a time (PyTorch 2.13; after some thousand of them).
    """

    def __init__(self, parameters: Iterator[Tensor]) -> None:
        self._coming = parameters
        self._begun: dict[Tensor, tuple[dist.Work | None, Tensor]] = {}
        self._ahead_bytes = 0

    def __call__(self, parameter: Tensor) -> Tensor:
        while parameter not in self._begun or self._ahead_bytes < BUCKET_BYTES:
            if (following := next(self._coming, None)) is None:
                break
            self._begun[following] = _begin(following.detach())
            self._ahead_bytes += following.nbytes
        work, weight = self._begun.pop(parameter)
        self._ahead_bytes -= parameter.nbytes
        if work is not None:
            work.wait()
        return weight


def _begin(weight: Tensor) -> tuple[dist.Work | None, Tensor]:
    """Starts gathering a weight; returns what to wait for, if anything, and where the whole weight is then.

    FSDP shards the first dimension into equal parts, except the last ones, which may be shorter or empty. A weight is
    no DTensor while it is gathered after a forward pass.
    """
    if not isinstance(weight, DTensor):
        return None, weight
    mesh = sharding_mesh(weight)
    part, ranks = weight.to_local(), mesh.size()
    if ranks == 1:
        return None, part
    rows = -(-len(weight) // ranks)
    if len(part) < rows:
        part = torch.cat([part, part.new_empty(rows - len(part), *part.shape[1:])])
    whole = part.new_empty(ranks * rows, *part.shape[1:])
    work = dist.all_gather([*whole.split(rows)], part, group=mesh.get_group(), async_op=True)
    return work, whole[: len(weight)]
