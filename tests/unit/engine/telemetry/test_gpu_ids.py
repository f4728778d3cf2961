"""GPUs are told apart by a library that answers as NVML does: no GPU is needed."""

import sys
from types import SimpleNamespace

import pytest

from engine.telemetry.gpus import gpu_ids


@pytest.fixture
def nvml(monkeypatch):
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUUID=lambda handle: handle,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)


def test_a_gpu_has_one_identity_however_a_process_numbers_it(nvml):
    assert gpu_ids([0, 2], {}) == ["GPU-0", "GPU-2"]
    assert gpu_ids([0, 1], {"CUDA_VISIBLE_DEVICES": "2,0"}) == ["GPU-2", "GPU-0"]
    assert gpu_ids([1], {"CUDA_VISIBLE_DEVICES": "GPU-7, MIG-8"}) == ["MIG-8"]


def test_without_a_library_processes_of_one_container_agree(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    [name] = gpu_ids([3], {})
    assert gpu_ids([1], {"CUDA_VISIBLE_DEVICES": "0,3"}) == [name]
    assert gpu_ids([3], {"HIP_VISIBLE_DEVICES": "0,1,2,3"}) == [name]
    assert gpu_ids([2, 3], {})[0] != name
    assert gpu_ids([], {}) == []


def test_amd_numbers_gpus_twice(monkeypatch):
    library = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: list("abcdefgh"),
        amdsmi_get_gpu_device_uuid=lambda handle: handle,
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    assert gpu_ids([1], {"ROCR_VISIBLE_DEVICES": "4,5,6,7"}) == ["f"]
    assert gpu_ids([0], {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "3"}) == ["h"]
