"""Measures how the run's GPUs run: their use, clock, power and memory, and what processes of others hold there.

NVIDIA's are asked by NVML (`nvidia-ml-py`), AMD's by AMD SMI (`amdsmi`, a part of ROCm). Every LOOK_S another thread
asks each GPU once. What a GPU does not tell is left out. The part for AMD is written against AMD SMI's documentation
and was not run on a GPU yet.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from engine import metric_names as metric
from engine.telemetry.gpus import amd_handles, library_of_gpus, nvidia_handles
from engine.telemetry.others import family, sees_all

LOOK_S = 5.0

Figures = dict[str, float]  # by family of metrics


class GpuMeter:
    """Measures while `run` runs as a task; `read` returns a step's figures. Without devices it does nothing.

    devices: numbers of GPUs among those that this process may see. say: told once why nothing is measured.
    """

    def __init__(self, devices: Sequence[int], *, say: Callable[[str], None] = lambda line: None) -> None:
        self._devices, self._say = devices, say
        self._looks: dict[str, list[float]] = defaultdict(list)  # by metric, since the last `read`

    async def run(self) -> None:
        """Measures until it is cancelled, or until it is known that nothing can be measured."""
        if not self._devices:
            return
        try:
            looks = await asyncio.to_thread(opened, self._devices)
            while True:
                for device, look in looks.items():
                    for name, value in (await asyncio.to_thread(look)).items():
                        self._looks[metric.member(name, str(device))].append(value)
                await asyncio.sleep(LOOK_S)
        except Exception as error:  # the libraries' own errors are of many kinds, and none may end a run
            self._say(f"use and clocks of the GPUs are not measured: {type(error).__name__}: {error}")

    def read(self) -> dict[str, float]:
        """Returns the means since the last call, by metric."""
        means = {name: sum(values) / len(values) for name, values in self._looks.items()}
        self._looks.clear()
        return means


def opened(devices: Sequence[int], environment: Mapping[str, str] = os.environ) -> dict[int, Callable[[], Figures]]:
    """Returns for each device a function that looks at it. Raises ImportError if neither library is there."""
    vendor, library = library_of_gpus()
    look = _nvidia if vendor == "nvidia" else _amd
    return look(library, devices, environment)


def _nvidia(nvml: Any, devices: Sequence[int], environment: Mapping[str, str]) -> dict[int, Callable[[], Figures]]:
    def look_at(gpu: Any) -> Callable[[], Figures]:
        def look() -> Figures:
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
            figures = {
                metric.GPU_USE: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
                metric.GPU_MEMORY: memory.used / memory.total,
            }
            with suppress(nvml.NVMLError):  # a virtual GPU does not tell them
                now, most = (
                    ask(gpu, nvml.NVML_CLOCK_SM)
                    for ask in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
                )
                figures[metric.GPU_CLOCK] = now / most
            with suppress(nvml.NVMLError):
                figures[metric.GPU_POWER_W] = nvml.nvmlDeviceGetPowerUsage(gpu) / 1000
            if sees_all():  # in a container the driver tells the PIDs of the machine
                with suppress(nvml.NVMLError):
                    running = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
                    figures[metric.GPU_OTHERS_BYTES] = _of_others((one.pid, one.usedGpuMemory) for one in running)
            return figures

        return look

    handles = nvidia_handles(nvml, devices, environment)
    return {device: look_at(handle) for device, handle in handles.items()}


def _amd(smi: Any, devices: Sequence[int], environment: Mapping[str, str]) -> dict[int, Callable[[], Figures]]:
    def look_at(gpu: Any) -> Callable[[], Figures]:
        def look() -> Figures:
            activity, memory = smi.amdsmi_get_gpu_activity(gpu), smi.amdsmi_get_gpu_vram_usage(gpu)
            clock, power = smi.amdsmi_get_clock_info(gpu, smi.AmdSmiClkType.GFX), smi.amdsmi_get_power_info(gpu)
            drawn = power.get("current_socket_power"), power.get("average_socket_power")
            told = {
                metric.GPU_USE: _ratio(activity.get("gfx_activity"), 100),
                metric.GPU_MEMORY: _ratio(memory.get("vram_used"), memory.get("vram_total")),
                metric.GPU_CLOCK: _ratio(clock.get("clk", clock.get("cur_clk")), clock.get("max_clk")),
                metric.GPU_POWER_W: next((ratio for watts in drawn if (ratio := _ratio(watts, 1)) is not None), None),
            }
            return {name: value for name, value in told.items() if value is not None}

        return look

    handles = amd_handles(smi, devices, environment)
    return {device: look_at(handle) for device, handle in handles.items()}


def _ratio(value: Any, whole: Any) -> float | None:
    """Returns a ratio; None if one of the two is not told, which AMD SMI writes as "N/A"."""
    if isinstance(value, int | float) and isinstance(whole, int | float) and whole:
        return value / whole
    return None


def _of_others(processes: Any) -> float:
    own = {process.pid for process in family(os.getpid())}
    return float(sum(used or 0 for pid, used in processes if pid not in own))
