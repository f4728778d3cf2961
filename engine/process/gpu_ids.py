"""Names GPUs so that two processes know whether they mean the same one, also in containers that number them anew.

NVIDIA's and AMD's libraries tell the identity of a GPU. Without either, a GPU has a name that only processes of the
same container, or outside of any, share. The part for AMD is written against AMD SMI's documentation; neither part was
run on a GPU yet.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def gpu_ids(devices: Sequence[int], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns an identity for each device. devices: numbers among the GPUs that this process may see.

    >>> gpu_ids([2], {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == gpu_ids([7], {})
    True
    """
    visible = next(filter(None, (environment.get(name, "") for name in _VISIBLE)), "").split(",")
    names = [visible[device].strip() if visible[0] and device < len(visible) else str(device) for device in devices]
    for ask in (_nvidia, _amd):
        with suppress(Exception):  # the libraries' own errors are of many kinds; the next way is tried then
            return [ask(name) for name in names]
    return [f"{_here()}:{name}" for name in names]


def _nvidia(name: str) -> str:
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    by_index = name.isdecimal()
    gpu = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
    uuid = nvml.nvmlDeviceGetUUID(gpu)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def _amd(name: str) -> str:
    smi: Any = importlib.import_module("amdsmi")
    smi.amdsmi_init()
    return str(smi.amdsmi_get_gpu_device_uuid(smi.amdsmi_get_processor_handles()[int(name)]))


def _here() -> str:
    """Returns a name that the processes of this machine share, in the same container if they are in one."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot[:8]}-{os.stat('/proc/self/ns/pid').st_ino}"
