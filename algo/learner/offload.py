"""The optimizer's state in host memory while replicas have the GPU. Not yet run on a GPU.

Invariant: after `onload` every tensor is where it was, with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Moved = list[tuple[dict[str, Any], str, torch.device]]


def offload(optimizer: torch.optim.Optimizer) -> Moved:
    """Moves every state tensor to the host; returns what `onload` needs."""
    moved: Moved = []
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                moved.append((state, name, value.device))
                state[name] = value.to("cpu")
    return moved


def onload(moved: Moved) -> None:
    """Moves back what `offload` moved, and forgets it."""
    for state, name, device in moved:
        state[name] = state[name].to(device)
    moved.clear()
