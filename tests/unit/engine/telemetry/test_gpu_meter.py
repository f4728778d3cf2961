"""GPUs are asked through a library that answers as NVML or AMD SMI do: no GPU is needed."""

import asyncio
import os
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from engine.telemetry import gpu_meter
from engine.telemetry.gpu_meter import GpuMeter, opened


class NvmlError(Exception):
    pass


def nvml(*, virtual=False):
    def clock(mhz):
        def ask(gpu, kind):
            if virtual:
                raise NvmlError("not supported")
            return mhz * int(gpu)

        return ask

    processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=7), SimpleNamespace(pid=2**30, usedGpuMemory=5)]
    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid.removeprefix("GPU-"),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=60, total=80),
        nvmlDeviceGetClockInfo=clock(300),
        nvmlDeviceGetMaxClockInfo=clock(1200),
        nvmlDeviceGetPowerUsage=lambda gpu: 350_000,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: processes,
    )


@pytest.fixture
def nvidia(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.setattr(gpu_meter, "sees_all", lambda: True)


async def read_after_a_look(meter):
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):  # the next look is LOOK_S later
            await meter.run()
    return meter.read()


async def test_a_step_has_the_means_of_each_gpu(nvidia):
    assert await read_after_a_look(GpuMeter([3])) == {
        "gpu/use/3": 0.5,
        "gpu/memory/3": 0.75,
        "gpu/clock/3": 0.25,
        "gpu/power_w/3": 350.0,
        "gpu/others_bytes/3": 5.0,
    }


def test_devices_are_numbered_among_those_that_are_visible(monkeypatch):
    asked = []
    library = nvml()
    library.nvmlDeviceGetHandleByIndex = library.nvmlDeviceGetHandleByUUID = asked.append
    monkeypatch.setitem(sys.modules, "pynvml", library)
    opened([0, 1], {"CUDA_VISIBLE_DEVICES": "4, GPU-77"})
    assert asked == [4, "GPU-77"]


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(virtual=True))
    monkeypatch.setattr(gpu_meter, "sees_all", lambda: False)
    [look] = opened([0], {}).values()
    assert set(look()) == {"gpu/use/*", "gpu/memory/*", "gpu/power_w/*"}


def test_gpus_of_amd_are_asked_by_amd_smi(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    library = SimpleNamespace(
        AmdSmiClkType=SimpleNamespace(GFX=0),
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["first", "second"],
        amdsmi_get_gpu_activity=lambda gpu: {"gfx_activity": 40},
        amdsmi_get_gpu_vram_usage=lambda gpu: {"vram_used": 48, "vram_total": 192},
        amdsmi_get_clock_info=lambda gpu, kind: {"clk": 1050, "max_clk": 2100},
        amdsmi_get_power_info=lambda gpu: {"current_socket_power": "N/A", "average_socket_power": 600},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    [look] = opened([0], {"HIP_VISIBLE_DEVICES": "1"}).values()
    assert look() == {"gpu/use/*": 0.4, "gpu/memory/*": 0.25, "gpu/clock/*": 0.5, "gpu/power_w/*": 600}


async def test_a_library_that_is_missing_or_fails_is_told_once_and_ends_no_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    said = []
    await GpuMeter([0], say=said.append).run()
    assert "Fix: pip install nvidia-ml-py" in said[0]
    broken = nvml()
    broken.nvmlInit = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    await GpuMeter([0], say=said.append).run()
    assert "ZeroDivisionError" in said[1]
    assert len(said) == 2


async def test_without_gpus_nothing_is_asked():
    await GpuMeter([]).run()
