"""Says at a run's start, by name, what its GPUs lack and what that costs.

The rules are read from the documentation of vLLM, PyTorch, NCCL and the GPUs. On one H200 the notes were asked for and
were none; no rule was seen to apply on a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.errors import BadInput
from engine.learner.gpu_peaks import peak_of
from engine.replica.config import MEMORY_SHARE, MEMORY_SHARE_BY_TURNS, ReplicaConfig
from engine.telemetry.gpus import Gpu, Gpus, seen

SHM = Path("/dev/shm")
NCCL_SHM_BYTES = 1 << 30  # for NCCL's and vLLM's own segments; Docker gives 64 MiB unless it is told
BFLOAT16_SINCE, FP8_SINCE = (8, 0), (8, 9)  # compute capabilities
_GIB = 1 << 30


def missing(config: ReplicaConfig, learner_devices: Sequence[int]) -> list[str]:
    """Asks this machine, and returns a line for each thing that it lacks for the replicas and the learner of a run.

    Without devices nothing is lacking. Raises BadInput if a GPU is not there, or cannot compute in bfloat16 at all.
    """
    devices = sorted({*learner_devices, *config.devices})
    if not devices:
        return []
    try:
        gpus = seen(None)
    except Exception as error:  # the libraries' own errors are of many kinds, and none may end a run
        return [f"kinds and links of the GPUs are not known: {type(error).__name__}: {error}"]
    if absent := sorted(set(devices) - {gpu.device for gpu in gpus.each}):
        there = ", ".join(map(str, gpus.each)) or "none"
        raise BadInput(f"devices must be GPUs that are here ({there}), got {', '.join(map(str, absent))}")
    shm_bytes, weights_bytes = free_shared_memory(), size_of_weights(Path(config.checkpoint))
    return lacks(gpus.only(devices), config, learner_devices, shm_bytes=shm_bytes, weights_bytes=weights_bytes)


def lacks(
    gpus: Gpus, config: ReplicaConfig, learner_devices: Sequence[int], *, shm_bytes: int, weights_bytes: int
) -> list[str]:
    """Returns a line for each thing that these GPUs lack.

    shm_bytes: free space of /dev/shm. weights_bytes: size of the checkpoint's weights. Raises BadInput if a GPU cannot
    compute in bfloat16 at all.
    """
    for gpu in gpus.each:
        if gpu.capability is not None and gpu.capability < BFLOAT16_SINCE:
            raise BadInput(
                f"{gpu} has no bfloat16 (compute capability {gpu.capability[0]}.{gpu.capability[1]}), in which learner "
                "and replicas compute. Fix: GPUs of compute capability 8.0 or newer (A100, L40S, H100, ...)"
            )
    return [
        *_kinds(gpus, config),
        *_memory(gpus, config),
        *_links(gpus, config, learner_devices),
        *_shared_memory(gpus, config, shm_bytes, weights_bytes),
    ]


def free_shared_memory() -> int:
    """Returns the free bytes of /dev/shm; 0 if it cannot be written to."""
    return shutil.disk_usage(SHM).free if os.access(SHM, os.W_OK) else 0


def size_of_weights(checkpoint: Path) -> int:
    """Returns the bytes of a checkpoint's safetensors files."""
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def _kinds(gpus: Gpus, config: ReplicaConfig) -> Iterator[str]:
    amd = [gpu for gpu in gpus.each if gpu.vendor == "amd"]
    if amd:
        yield (
            f"{_named(amd)}: nothing was tried on ROCm. Not known there: ragged attention of the learner, sleep of the "
            "replicas, and nccl (RCCL)"
        )
    without_fp8 = [gpu for gpu in gpus.each if gpu.capability is not None and gpu.capability < FP8_SINCE]
    if config.quantization is not None and without_fp8:
        yield (
            f"{_named(without_fp8)}: no matrix products in FP8 (compute capability 8.9 has them), so "
            f"quantization={config.quantization} saves memory and no time"
        )
    names = sorted({gpu.name for gpu in gpus.each})
    if unknown := [name for name in names if peak_of(name) is None]:
        yield (
            f"no MFU for {', '.join(unknown)}: what it promises at most in bf16 is not known. Fix: a line in "
            "engine/learner/gpu_peaks.py"
        )
    if len(names) > 1:
        yield f"the GPUs differ ({', '.join(names)}): each step of the learner takes as long as the slowest"


def _memory(gpus: Gpus, config: ReplicaConfig) -> Iterator[str]:
    share = config.memory_share or (MEMORY_SHARE_BY_TURNS if config.sleeps else MEMORY_SHARE)
    for gpu in gpus.each:
        if gpu.device in config.devices and gpu.free_bytes < share * gpu.total_bytes:
            yield (
                f"{gpu} has {gpu.free_bytes / _GIB:.0f} GiB free, and a replica takes "
                f"{share * gpu.total_bytes / _GIB:.0f} ({share:g} of all): it will not start. Fix: end the processes "
                "that hold the rest (nvidia-smi names them), or a smaller memory_share"
            )


def _links(gpus: Gpus, config: ReplicaConfig, learner_devices: Sequence[int]) -> Iterator[str]:
    """Yields a line for each kind of slow link between GPUs that send each other much: learner ranks gather weights,
    the GPUs of a replica exchange activations, and nccl carries weights from the learner to all replicas.
    """
    groups = {"the learner's gathers": [*learner_devices]}
    if config.weight_transfer == "nccl":
        groups["weight updates"] = [*learner_devices, *config.devices]
    if config.tensor_parallel > 1:
        groups["the replicas' exchanges"] = [*config.devices]
    for kind, means in (("pcie", "over PCIe, not NVLink"), ("host", "through the host's memory, not peer to peer")):
        pairs = [pair for pair, link in gpus.links.items() if link == kind]
        slow = [what for what, group in groups.items() if any(set(pair) <= set(group) for pair in pairs)]
        if slow:
            advice = (
                "Consumer cards have no peer access; if NCCL hangs there, set NCCL_P2P_DISABLE=1"
                if kind == "host"
                else "For a 14B gathers take longer than computing; LoRA, or fewer ranks by larger GPUs, avoids them"
            )
            listed = ", ".join(f"{one} and {other}" for one, other in pairs[:3]) + (", ..." if len(pairs) > 3 else "")
            yield f"{' and '.join(slow)} go {means} (GPUs {listed}). {advice}"


def _shared_memory(gpus: Gpus, config: ReplicaConfig, shm_bytes: int, weights_bytes: int) -> Iterator[str]:
    files = 2 * weights_bytes if config.weight_transfer == "shm" else 0
    nccl = NCCL_SHM_BYTES if len(gpus.each) > 1 else 0
    if shm_bytes < files + nccl:
        needs = [f"{files / _GIB:.1f} GiB for two versions of the weights"] * bool(files)
        needs += [f"{nccl / _GIB:.0f} GiB for NCCL"] * bool(nccl)
        yield (
            f"{SHM} has {shm_bytes / _GIB:.1f} GiB free, and this run needs about {' and '.join(needs)}. Fix: in a "
            f"container --shm-size={-(-(files + nccl) // _GIB)}g, in Kubernetes an emptyDir with medium Memory"
        )


def _named(gpus: Sequence[Gpu]) -> str:
    return ", ".join(map(str, gpus))
