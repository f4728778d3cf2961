"""Says which GPUs a run has: their kinds, their memory, how they are linked, and which other process means the same.

NVIDIA's are asked by NVML (`nvidia-ml-py`), AMD's by AMD SMI (`amdsmi`, a part of ROCm). What a GPU does not tell is
None. The part for AMD is written against AMD SMI's documentation and was not run on a GPU yet.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

Link = Literal["fast", "pcie", "host"]  # NVLink or Infinity Fabric; peer to peer over PCIe; through the host's memory

_NVML_NVLINK, _NVML_PCI = 2, 4  # NVML_P2P_CAPS_INDEX_*; some versions of pynvml have a tuple under the first name
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Describes a GPU. device: its number among those that this process may see. capability: CUDA's, None for AMD's."""

    device: int
    name: str
    vendor: Literal["nvidia", "amd"]
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"GPU {self.device} ({self.name}, {self.total_bytes / _GIB:.0f} GiB)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """Describes the GPUs of a run. links: by pair of devices, the smaller number first, where the library knows it."""

    each: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], Link]

    def only(self, devices: Sequence[int]) -> Gpus:
        """Returns some of them, with the links between these."""
        chosen = tuple(gpu for gpu in self.each if gpu.device in devices)
        links = {pair: link for pair, link in self.links.items() if set(pair) <= set(devices)}
        return Gpus(each=chosen, links=links)


def seen(devices: Sequence[int] | None, environment: Mapping[str, str] = os.environ) -> Gpus:
    """Asks the GPUs once, all that are visible if devices is None.

    Raises ImportError if neither library is there, otherwise the errors of that library.
    """
    vendor, library = library_of_gpus()
    look = _nvidia if vendor == "nvidia" else _amd
    return look(library, devices, environment)


def gpu_ids(devices: Sequence[int], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns an identity for each device, the same in containers that number the GPUs anew.

    Without a library a GPU has a name that only processes of the same container, or outside of any, share.

    >>> gpu_ids([2], {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == gpu_ids([7], {})
    True
    """
    with suppress(Exception):  # the libraries' own errors are of many kinds
        vendor, library = library_of_gpus()
        if vendor == "nvidia":
            uuids = map(library.nvmlDeviceGetUUID, nvidia_handles(library, devices, environment).values())
        else:
            uuids = map(library.amdsmi_get_gpu_device_uuid, amd_handles(library, devices, environment).values())
        return [uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in uuids]
    visible = _visible_amd(environment)
    names = [visible[device] if device < len(visible) else str(device) for device in devices]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [f"{boot[:8]}-{os.stat('/proc/self/ns/pid').st_ino}:{name}" for name in names]


def library_of_gpus() -> tuple[Literal["nvidia", "amd"], Any]:
    """Returns the library that asks the GPUs here, and whose they are. Raises ImportError if there is none."""
    with suppress(ModuleNotFoundError):
        return "nvidia", importlib.import_module("pynvml")
    with suppress(ModuleNotFoundError):
        return "amd", importlib.import_module("amdsmi")
    raise ImportError("neither pynvml nor amdsmi is installed. Fix: pip install nvidia-ml-py, or ROCm's amdsmi")


def nvidia_handles(nvml: Any, devices: Sequence[int] | None, environment: Mapping[str, str]) -> dict[int, Any]:
    """Returns NVML's handle for each device."""
    nvml.nvmlInit()
    visible = _visible(environment, "CUDA_VISIBLE_DEVICES")
    if devices is None:
        devices = range(len(visible) or nvml.nvmlDeviceGetCount())

    def handle(device: int) -> Any:
        name = visible[device] if visible else str(device)
        return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)

    return {device: handle(device) for device in devices}


def amd_handles(smi: Any, devices: Sequence[int] | None, environment: Mapping[str, str]) -> dict[int, Any]:
    """Returns AMD SMI's handle for each device."""
    smi.amdsmi_init()
    handles = smi.amdsmi_get_processor_handles()
    visible, roots = _visible_amd(environment), _visible(environment, "ROCR_VISIBLE_DEVICES")
    if devices is None:
        devices = range(len(visible) or len(roots) or len(handles))

    def handle(device: int) -> Any:
        number = int(visible[device]) if visible else device
        return handles[int(roots[number]) if roots else number]

    return {device: handle(device) for device in devices}


def _nvidia(nvml: Any, devices: Sequence[int] | None, environment: Mapping[str, str]) -> Gpus:
    handles = nvidia_handles(nvml, devices, environment)

    def gpu(device: int, handle: Any) -> Gpu:
        name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
        return Gpu(
            device=device,
            name=name.decode() if isinstance(name, bytes) else name,
            vendor="nvidia",
            total_bytes=memory.total,
            free_bytes=memory.total - memory.used,
            capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        )

    def link(one: Any, other: Any) -> Link:
        for index, kind in ((_NVML_NVLINK, "fast"), (_NVML_PCI, "pcie")):
            if nvml.nvmlDeviceGetP2PStatus(one, other, index) == 0:  # NVML_P2P_STATUS_OK
                return kind  # type: ignore[return-value]
        return "host"

    return _all(handles, gpu, link, nvml.NVMLError)


def _amd(smi: Any, devices: Sequence[int] | None, environment: Mapping[str, str]) -> Gpus:
    handles = amd_handles(smi, devices, environment)

    def gpu(device: int, handle: Any) -> Gpu:
        memory = smi.amdsmi_get_gpu_vram_usage(handle)  # MiB
        return Gpu(
            device=device,
            name=smi.amdsmi_get_gpu_asic_info(handle)["market_name"],
            vendor="amd",
            total_bytes=memory["vram_total"] << 20,
            free_bytes=(memory["vram_total"] - memory["vram_used"]) << 20,
        )

    def link(one: Any, other: Any) -> Link:
        if smi.amdsmi_topo_get_link_type(one, other)["type"] == smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI:
            return "fast"
        return "pcie" if smi.amdsmi_is_P2P_accessible(one, other) else "host"

    return _all(handles, gpu, link, smi.AmdSmiException)


def _all(
    handles: Mapping[int, Any],
    gpu: Callable[[int, Any], Gpu],
    link: Callable[[Any, Any], Link],
    untold: type[Exception],
) -> Gpus:
    links = {}
    for one, other in combinations(sorted(handles), 2):
        with suppress(untold):
            links[one, other] = link(handles[one], handles[other])
    return Gpus(each=tuple(gpu(device, handle) for device, handle in handles.items()), links=links)


def _visible_amd(environment: Mapping[str, str]) -> list[str]:
    return _visible(environment, "HIP_VISIBLE_DEVICES") or _visible(environment, "CUDA_VISIBLE_DEVICES")


def _visible(environment: Mapping[str, str], name: str) -> list[str]:
    return [each.strip() for each in environment.get(name, "").split(",") if each.strip()]
