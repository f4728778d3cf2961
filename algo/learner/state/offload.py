"""Keeps the optimizer's state in host memory while replicas have the GPU. Not yet run on a GPU.

Invariants
- After `onload` every tensor is where it was, with the same bits.
- Host memory for a state is taken once and kept. It is pinned, so that copies run at the link's full speed and all at
  once; pinning takes longer than copying.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Away(NamedTuple):
    """A tensor that has left its device: `state[name]` is its copy in host memory."""

    state: dict[str, Any]
    name: str
    device: torch.device


class Offloader:
    """Moves an optimizer's state between its device and host memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._host: dict[tuple[int, str], Tensor] = {}  # state in host memory, by parameter and name
        self._away: list[Away] = []

    def offload(self) -> int:
        """Moves every state tensor that is on a device to the host; returns how many bytes were moved."""
        moved_bytes = 0
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.device.type == "cpu":
                    continue
                key = id(parameter), name
                if key in self._host:
                    _local(self._host[key]).copy_(_local(value), non_blocking=True)
                else:
                    self._host[key] = _pinned(value)
                state[name] = self._host[key]
                moved_bytes += value.nbytes
                self._away.append(Away(state, name, value.device))
        self._wait()
        return moved_bytes

    def onload(self) -> None:
        """Moves back what `offload` moved."""
        for state, name, device in self._away:
            state[name] = state[name].to(device, non_blocking=True)
        self._wait()
        self._away.clear()

    def _wait(self) -> None:
        for device in {away.device for away in self._away if away.device.type == "cuda"}:
            torch.cuda.synchronize(device)


@torch.no_grad()
def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _pinned(value: Tensor) -> Tensor:
    """Returns a copy in host memory. A sharded tensor stays sharded over its mesh, with its shard on the host."""
    host = value.to("cpu")
    if not torch.cuda.is_available():
        return host
    if isinstance(host, DTensor):
        host._local_tensor = host._local_tensor.pin_memory()
        return host
    return host.pin_memory()
