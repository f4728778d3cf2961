"""The replica's half of weight transfer on one host: a shared-memory backend for vLLM's weight-transfer API.

Runs inside the engine process (with vLLM's own nccl and ipc backends this file is not used for the transfer). The
learner publishes a safetensors file on a memory file system; each replica maps it and loads it by name.

Invariants
- The update is complete when `finish_weight_update` returns: nothing of the published file is referenced afterwards.
- Tied embeddings: the packed copy of lm_head that the CPU kernels keep is renewed (vLLM leaves it stale).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

_PR_SET_PDEATHSIG = 1


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """No rendezvous: a replica may die and join again at any time."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """path: a safetensors file with every parameter under its Hugging Face name."""

    path: str


class ShmWeightTransfer(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Backend "shm"."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    _held: dict[str, torch.Tensor]  # mapped until the update is finished: layerwise reloading keeps references

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        return None

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        self._held = load_file(update_info.path, device=str(self.device))
        self.model.load_weights(self._held.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._held = {}
        repack_cpu_linears(self.model)

    def shutdown(self) -> None:
        self._held = {}


def _yield_cores(niceness: int) -> None:
    """On the CPU the engine competes with the node and with tool calls: those, being short, go first.

    Otherwise a tool call takes half a second instead of 30 ms, and meanwhile the engine steps with little to do.
    """
    os.nice(niceness)
    with contextlib.suppress(OSError):  # where the kernel schedules by session, niceness counts only inside of it
        Path("/proc/self/autogroup").write_text(str(niceness))


def repack_cpu_linears(model: torch.nn.Module) -> None:
    """Renews the packed weights of CPU linears: a tied lm_head gets no tensor of its own, so vLLM leaves it stale."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods that the node calls in the engine process (`worker_extension_cls`)."""

    def adopt(self, niceness: int) -> None:
        """Leave the terminal's process group (Ctrl-C is the node's to handle) and die with the node.

        The wake-up socket of the node's event loop came along with the fork: a signal here would be seen there.
        """
        signal.set_wakeup_fd(-1)
        os.setsid()
        if niceness:
            _yield_cores(niceness)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def register() -> None:
    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    if "shm" not in registry:
        WeightTransferEngineFactory.register_engine("shm", ShmWeightTransfer)


register()
