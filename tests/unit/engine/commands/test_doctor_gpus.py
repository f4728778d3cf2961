"""The doctor names each GPU, what it can, and how it is linked."""

import pytest

from engine.commands import doctor
from engine.commands.doctor import gpu_lines
from engine.telemetry.gpus import Gpu, Gpus

GIB = 1 << 30


def gpu(device, name, capability, vendor="nvidia"):
    return Gpu(
        device=device, name=name, vendor=vendor, total_bytes=80 * GIB, free_bytes=79 * GIB, capability=capability
    )


def test_each_gpu_and_each_kind_of_link_has_a_line(monkeypatch):
    each = (gpu(0, "NVIDIA H100", (9, 0)), gpu(1, "NVIDIA A10G", (8, 6)), gpu(2, "AMD Instinct MI300X", None, "amd"))
    links = {(0, 1): "pcie", (0, 2): "host", (1, 2): "host"}
    monkeypatch.setattr(doctor, "seen", lambda devices: Gpus(each=each, links=links))
    assert list(gpu_lines()) == [
        ("GPU 0", "NVIDIA H100, 79 of 80 GiB free; bfloat16, FP8; peak 989 TFLOP/s"),
        ("GPU 1", "NVIDIA A10G, 79 of 80 GiB free; bfloat16; no MFU: its peak is not known"),
        ("GPU 2", "AMD Instinct MI300X, 79 of 80 GiB free; peak 1307 TFLOP/s; nothing was tried on ROCm"),
        ("links", "PCIe: 0-1"),
        ("links", "the host's memory: 0-2 1-2"),
    ]


@pytest.mark.parametrize(("driver", "message"), [(True, "not known: no library"), (False, "none")])
def test_a_machine_without_a_driver_has_none(monkeypatch, tmp_path, driver, message):
    def none(devices):
        raise ImportError("no library")

    monkeypatch.setattr(doctor, "seen", none)
    monkeypatch.setattr(doctor, "DRIVERS", (tmp_path if driver else tmp_path / "nothing",))
    assert list(gpu_lines()) == [("GPUs", message)]
