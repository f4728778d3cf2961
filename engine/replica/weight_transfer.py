"""The replica's half of weight transfer: backends for vLLM's API, and what the node calls in the engine.

Runs inside the engine process. Here are what the backends share and "shm": the learner publishes a
safetensors file on a memory file system, each replica maps it and loads it by name. The learner's half is
`algo.weights.transport`; gloo is in `engine.replica.weight_transfer_gloo`, nccl in
`engine.replica.weight_transfer_gpu`.

Invariants
- The update is complete when `finish_weight_update` returns: the model reads nothing of what was published afterwards.
- What was overwritten while it was read is not served: the update fails.
- Tied embeddings: the packed copy of lm_head that the CPU kernels keep is renewed (vLLM leaves it stale).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
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
from engine.replica import grammar_mass
from engine.replica.cpu_weight_loader import Direct, fits

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' names
_heap = Heap()  # of this engine process


@dataclass
class NoRendezvous(WeightTransferInitInfo):
    """A replica may die and join again at any time."""


@dataclass
class Published(WeightTransferUpdateInfo):
    """path: the file or address that the learner gave; reader: names this engine process among all."""

    path: str
    version: int
    reader: str


class HostWeightTransfer(WeightTransferEngine[NoRendezvous, Published]):
    """All of a backend but `receive_weights`, which gives what it received to `load`."""

    init_info_cls = NoRendezvous
    update_info_cls = Published
    trainer_send_weights = None  # which vLLM 0.26 asks for: that half is `algo.weights.transport`
    _direct: Direct | None

    def init_transfer_engine(self, init_info: NoRendezvous) -> None:
        return None

    def start_weight_update(self) -> None:
        self._direct = None
        if fits(self.model, self.device):
            self._direct = Direct(self.model, self.model_config.dtype)
        else:
            initialize_layerwise_reload(self.model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._direct:
            self._direct.load(weights)
        else:
            self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        if self._direct:
            self._direct.finish()
        else:
            finalize_layerwise_reload(self.model, self.model_config)
            repack_heads(self.model)
        _heap.trim()

    def shutdown(self) -> None: ...


class ShmWeightTransfer(HostWeightTransfer):
    """Backend "shm". Any safetensors file with every parameter under its Hugging Face name will do."""

    _mapped: tuple[tuple[tuple[int, int], dict[str, Tensor]], ...] = ()  # by device and inode, the older one first

    def receive_weights(self, update_info: Published) -> None:
        path = Path(update_info.path)
        self.load((name, weight.to(self.device)) for name, weight in self._map(path).items())
        if not path.exists():
            raise RuntimeError(f"{path} was overwritten while it was read")

    def _map(self, path: Path) -> dict[str, Tensor]:
        """The weights in the file. The learner's two files stay mapped, else each update would fault their pages in.

        A file that is written again has the same weights at the same places.
        """
        found = path.stat()
        file = found.st_dev, found.st_ino
        weights = dict(self._mapped).get(file) or mapped(path)
        others = [entry for entry in self._mapped if entry[0] != file]
        self._mapped = (*others[-1:], (file, weights))
        return weights


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name, as they lie there: neighbours are one memory (`Direct` wants that).

    safetensors' own `load_file` gives each a storage of its own.
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


def repack_heads(model: nn.Module) -> None:
    """Renews the packed weights of lm_head on the CPU: tied to the embedding it gets no tensor, so vLLM forgets it."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _yield_cores(niceness: int) -> None:
    """Lets the node and tool calls go before the engine, with which they compete on the CPU: they are short.

    Otherwise a tool call takes half a second instead of 30 ms, and meanwhile the engine steps with little to do.
    """
    os.nice(niceness)
    with contextlib.suppress(OSError):  # where the kernel schedules by session, niceness counts only inside of it
        Path("/proc/self/autogroup").write_text(str(niceness))


class WorkerExtension:
    """Methods that the node calls in the engine process (`worker_extension_cls`)."""

    def adopt(self, niceness: int) -> None:
        """Leave the terminal's process group (Ctrl-C is the node's to handle) and die with the node, also when spawned.

        The wake-up socket of the node's event loop came along with the fork: a signal here would be seen there.
        """
        signal.set_wakeup_fd(-1)
        leave_terminal()
        if niceness:
            _yield_cores(niceness)
        die_with(os.getppid())
        _heap.keep()

    def measure_grammars(self) -> bool:
        """Measures what grammars rule out from now on; returns whether that is possible here."""
        return grammar_mass.install(self.model_runner)  # type: ignore[attr-defined]  # of vLLM's worker


def register() -> None:
    """Called at import, which is before the fork. Names of their own: vLLM has an "nccl" too."""
    factory = WeightTransferEngineFactory
    if "rocstar-shm" not in factory._registry:
        factory.register_engine("rocstar-shm", ShmWeightTransfer)
        factory.register_engine("rocstar-gloo", "engine.replica.weight_transfer_gloo", "GlooWeightTransfer")
        factory.register_engine("rocstar-nccl", "engine.replica.weight_transfer_gpu", "NcclWeightTransfer")


register()
