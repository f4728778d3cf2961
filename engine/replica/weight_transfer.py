"""The replica's half of weight transfer: backends for vLLM's API, and what the node calls in the engine.

It runs inside the engine process. This file holds what the backends share, and "shm": the learner publishes a
safetensors file on a memory file system, and each replica maps it and loads it by name. The learner's half is
`algo.weights.transport`; gloo is in `engine.replica.weight_transfer_gloo`, nccl in
`engine.replica.weight_transfer_gpu`.

Invariants
- An update is complete when `finish_weight_update` returns: afterwards the model reads nothing of what was published.
- Weights that were overwritten while they were read are not served: the update fails.
- gpt-oss: vLLM 0.32 would leave experts and sinks as they were, since its model copies them past its own reload. So
  each expert is loaded alone, and sinks are copied afterwards.
- Tied embeddings: the packed copy of lm_head that the CPU kernels keep is renewed (vLLM leaves it stale). So are the
  packed experts of a mixture.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import vllm
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from engine.process.forks import die_with, leave_terminal
from engine.process.heap import Heap
from engine.process.shared_memory import unlink_mapped
from engine.replica import grammar_mass
from engine.replica.cpu_weight_loader import Direct, fits
from engine.replica.routes.capture import report_routes

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names
# gpt-oss has one tensor for all experts of a layer. These are vLLM's names for the part of one expert.
STACKED = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
_heap = Heap()  # the heap of this engine process


@dataclass
class NoRendezvous(WeightTransferInitInfo):
    """Nothing is arranged at the start, since a replica may die and join again at any time."""


@dataclass
class Published(WeightTransferUpdateInfo):
    """path: the file or address that the learner gave; reader: names this engine process among all."""

    path: str
    version: int
    reader: str


class HostWeightTransfer(WeightTransferEngine[NoRendezvous, Published]):
    """A backend without its `receive_weights`, which passes what it received to `load`."""

    init_info_cls = NoRendezvous
    update_info_cls = Published
    trainer_send_weights = None  # vLLM 0.26 demands it, but that half is `algo.weights.transport`
    _direct: Direct | None

    def init_transfer_engine(self, init_info: NoRendezvous) -> None:
        return None

    def start_weight_update(self) -> None:
        self._direct = None
        self._sinks: dict[str, Tensor] | None = {} if type(self.model).__name__ == "GptOssForCausalLM" else None
        if self._sinks is not None and not hasattr(self.model.model, "_try_load_streamed_expert"):
            raise RuntimeError(
                f"vLLM {vllm.__version__} takes no new weights of gpt-oss's experts. Fix: install vLLM 0.32 or later"
            )
        if fits(self.model, self.device, processes=self.parallel_config.world_size):
            self._direct = Direct(self.model, self.model_config.dtype)
        else:
            initialize_layerwise_reload(self.model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._direct:
            self._direct.load(weights)
        elif self._sinks is None:
            self.model.load_weights(weights)
        else:
            self.model.load_weights(each_expert(weights, self._sinks))

    def finish_weight_update(self) -> None:
        if self._direct:
            self._direct.finish()
        else:
            finalize_layerwise_reload(self.model, self.model_config)
            if self._sinks is not None:
                copy_sinks(self.model, self._sinks)
            repack_heads(self.model)
            if self.device.type == "cpu":
                repack_experts(self.model)
        _heap.trim()

    def shutdown(self) -> None: ...


class ShmWeightTransfer(HostWeightTransfer):
    """Backend "shm". Any safetensors file with every parameter under its Hugging Face name will do."""

    _mapped: tuple[tuple[tuple[int, int], dict[str, Tensor]], ...] = ()  # keyed by (device, inode), the older first

    def receive_weights(self, update_info: Published) -> None:
        path = Path(update_info.path)
        self.load((name, weight.to(self.device)) for name, weight in self._map(path).items())
        if not path.exists():
            raise RuntimeError(f"{path} was overwritten while it was read")

    def _map(self, path: Path) -> dict[str, Tensor]:
        """Returns the weights in the file. The learner's two files stay mapped, so that updates fault no pages in.

        A file that is written again has the same weights at the same places.
        """
        status = path.stat()
        file = status.st_dev, status.st_ino
        weights = dict(self._mapped).get(file) or mapped(path)
        others = [entry for entry in self._mapped if entry[0] != file]
        self._mapped = (*others[-1:], (file, weights))
        return weights


def mapped(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name, in one memory, so that `Direct` can join neighbours.

    safetensors' own `load_file` gives each tensor a storage of its own.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    memory = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[8 + length :]
    return {
        name: memory[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]]).view(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def each_expert(weights: Iterable[tuple[str, Tensor]], sinks: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields gpt-oss's weights under the names by which vLLM loads the experts of a layer one by one.

    sinks: those that come are put into it instead, copied and by vLLM's names.
    """
    for name, weight in weights:
        place, _, kind = name.rpartition(".")
        if kind == "sinks":
            sinks[name.replace(".self_attn.", ".attn.")] = weight.clone()
        elif place.endswith(".mlp.experts"):
            for number, expert in enumerate(weight):
                yield f"{place}.{number}.{STACKED[kind]}", expert
        else:
            yield name, weight


def copy_sinks(model: nn.Module, sinks: Mapping[str, Tensor]) -> None:
    """Copies sinks into the model, of which a process of several has some heads alone. Raises RuntimeError for others
    than it has."""
    own = {name: weight for name, weight in model.named_parameters() if name.endswith(".sinks")}
    if own.keys() != sinks.keys():
        raise RuntimeError(f"the model has {len(own)} layers with sinks, and {len(sinks)} came")
    for name, weight in own.items():
        heads = weight.shape[0]
        weight.data.copy_(sinks[name].narrow(0, get_tensor_model_parallel_rank() * heads, heads))


def repack_heads(model: nn.Module) -> None:
    """Renews the packed weights of lm_head on the CPU.

    A head that is tied to the embedding gets no tensor of its own, so vLLM forgets it.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def repack_experts(model: nn.Module) -> None:
    """Packs the experts of a mixture for the CPU's kernels.

    vLLM 0.32 packs those that it reads at its start, but leaves an update's as they are in the file.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and type(method).__name__ == "UnquantizedFusedMoEMethod":
            kernel.fused_experts.process_weights_after_loading(module)


def _yield_cores(niceness: int) -> None:
    """Gives the node and tool calls, whose work is short, priority over the engine on the CPU.

    Otherwise a tool call takes half a second instead of 30 ms, and meanwhile the engine steps with little to do.
    """
    os.nice(niceness)
    with contextlib.suppress(OSError):  # a kernel that schedules by session heeds niceness only within a session
        Path("/proc/self/autogroup").write_text(str(niceness))


class WorkerExtension:
    """Methods that the node calls in the engine process (`worker_extension_cls`)."""

    def adopt(self, niceness: int) -> None:
        """Leaves the terminal's process group (the node handles Ctrl-C) and dies with the node, also when spawned. What
        the processes of one engine share has no name afterwards; all of them have opened it by now.

        A fork shares the wake-up socket of the node's event loop, where a signal to this process would be seen.
        """
        signal.set_wakeup_fd(-1)
        leave_terminal()
        if niceness:
            _yield_cores(niceness)
        die_with(os.getppid())
        unlink_mapped()
        _heap.keep()

    def measure_grammars(self) -> bool:
        """Measures what grammars rule out from now on; returns whether that is possible here."""
        return grammar_mass.install(self.model_runner)  # type: ignore[attr-defined]  # of vLLM's worker

    def report_routes(self, on_cpu: bool) -> tuple[list[int], int]:
        """Keeps the routes of the tokens from now on (`engine.replica.routes.capture`)."""
        return report_routes(self.model_runner, on_cpu=on_cpu)  # type: ignore[attr-defined]


def register() -> None:
    """Registers the backends, at import and so before the fork. They have a prefix since vLLM has an "nccl" too."""
    factory = WeightTransferEngineFactory
    if "rocstar-shm" not in factory._registry:
        factory.register_engine("rocstar-shm", ShmWeightTransfer)
        factory.register_engine("rocstar-gloo", "engine.replica.weight_transfer_gloo", "GlooWeightTransfer")
        factory.register_engine("rocstar-nccl", "engine.replica.weight_transfer_gpu", "NcclWeightTransfer")


register()
