"""What a machine lacks for a run is said by name. Libraries that answer as NVML and AMD SMI do stand in for GPUs."""

import sys
from types import SimpleNamespace

import pytest

from engine.assembly import gpu_notes
from engine.assembly.gpu_notes import lacks, missing
from engine.errors import BadInput
from engine.replica.config import ReplicaConfig
from engine.telemetry.gpus import Gpu, Gpus, seen

GIB = 1 << 30
PLENTY = {"shm_bytes": 500 * GIB, "weights_bytes": 30 * GIB}
H100, A100, T4 = ("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0)), ("Tesla T4", (7, 5))
MI300X = ("AMD Instinct MI300X", None)


def gpus(*kinds, link="fast", free=80):
    each = tuple(
        Gpu(
            device=device,
            name=name,
            vendor="amd" if capability is None else "nvidia",
            total_bytes=80 * GIB,
            free_bytes=free * GIB,
            capability=capability,
        )
        for device, (name, capability) in enumerate(kinds)
    )
    links = {(one, other): link for one in range(len(each)) for other in range(one + 1, len(each))}
    return Gpus(each=each, links=links)


def replica(devices, **fields):
    return ReplicaConfig(checkpoint="model", devices=devices, dtype="bfloat16", **fields)


def test_eight_of_one_kind_with_nvlink_lack_nothing():
    config = replica((4, 5, 6, 7), weight_transfer="nccl")
    assert lacks(gpus(*[H100] * 8), config, (0, 1, 2, 3), **PLENTY) == []


def test_a_gpu_without_bfloat16_is_refused_by_name():
    with pytest.raises(BadInput, match=r"GPU 1 \(Tesla T4, 80 GiB\) has no bfloat16 \(compute capability 7.5\)"):
        lacks(gpus(H100, T4), replica((1,)), (0,), **PLENTY)


@pytest.mark.parametrize(
    ("has", "config", "learner", "room", "message"),
    [
        (gpus(MI300X), replica((0,)), (0,), PLENTY, "GPU 0 (AMD Instinct MI300X, 80 GiB): nothing was tried on ROCm"),
        (gpus(A100), replica((0,), quantization="fp8_per_block"), (), PLENTY, "no matrix products in FP8"),
        (gpus(("NVIDIA RTX 6000 Ada Generation", (8, 9))), replica((0,)), (), PLENTY, "no MFU for NVIDIA RTX 6000 Ada"),
        (gpus(H100, A100), replica((1,)), (0,), PLENTY, "the GPUs differ"),
        (gpus(H100, free=12), replica((0,)), (0,), PLENTY, "has 12 GiB free, and a replica takes 74 (0.92 of all)"),
        (
            gpus(H100, free=12),
            replica((0,), sleeps=True),
            (0,),
            PLENTY,
            "has 12 GiB free, and a replica takes 48 (0.6 of all)",
        ),
        (
            gpus(H100, H100, link="pcie"),
            replica((0, 1)),
            (0, 1),
            PLENTY,
            "the learner's gathers go over PCIe, not NVLink (GPUs 0 and 1)",
        ),
        (
            gpus(H100, H100, link="host"),
            replica((1,), weight_transfer="nccl"),
            (0,),
            PLENTY,
            "weight updates go through the host's memory",
        ),
        (
            gpus(H100, H100, link="pcie"),
            replica((0, 1), tensor_parallel=2),
            (),
            PLENTY,
            "the replicas' exchanges go over PCIe",
        ),
        (
            gpus(H100),
            replica((0,)),
            (0,),
            {"shm_bytes": GIB // 16, "weights_bytes": 30 * GIB},
            "/dev/shm has 0.1 GiB free, and this run needs about 60.0 GiB for two versions of the weights. "
            "Fix: in a container --shm-size=60g",
        ),
        (
            gpus(H100, H100),
            replica((1,), weight_transfer="nccl"),
            (0,),
            {"shm_bytes": GIB // 16, "weights_bytes": 30 * GIB},
            "needs about 1 GiB for NCCL. Fix: in a container --shm-size=1g",
        ),
    ],
)
def test_what_is_lacking_is_said(has, config, learner, room, message):
    [line] = lacks(has, config, learner, **room)
    assert message in line


def test_two_gpus_without_a_link_that_one_part_does_not_use_are_not_worth_a_line():
    assert lacks(gpus(H100, H100, link="pcie"), replica((0, 1)), (), **PLENTY) == []


class NvmlError(Exception):
    pass


def nvml(names, status):
    def p2p(one, other, index):
        if status is None:
            raise NvmlError("not supported")
        return status.get(index, 5)

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetName=lambda gpu: names[gpu].encode(),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=GIB, total=80 * GIB),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: (9, 0),
        nvmlDeviceGetP2PStatus=p2p,
    )


@pytest.mark.parametrize(
    ("status", "links"),
    [({2: 0, 4: 0}, {(0, 1): "fast"}), ({4: 0}, {(0, 1): "pcie"}), ({}, {(0, 1): "host"}), (None, {})],
)
def test_nvml_tells_kinds_and_links(monkeypatch, status, links):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(["NVIDIA H100", "NVIDIA H100"], status))
    told = seen(None, {})
    assert told.links == links
    assert str(told.each[1]) == "GPU 1 (NVIDIA H100, 80 GiB)"
    assert (told.each[1].capability, told.each[1].free_bytes) == ((9, 0), 79 * GIB)


@pytest.mark.parametrize(("kind", "link"), [(2, "fast"), (1, "pcie")])
def test_amd_smi_tells_kinds_and_links(monkeypatch, kind, link):
    library = SimpleNamespace(
        AmdSmiException=NvmlError,
        AmdSmiLinkType=SimpleNamespace(AMDSMI_LINK_TYPE_XGMI=2),
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [0, 1],
        amdsmi_get_gpu_vram_usage=lambda gpu: {"vram_total": 196_592, "vram_used": 592},
        amdsmi_get_gpu_asic_info=lambda gpu: {"market_name": "AMD Instinct MI300X"},
        amdsmi_topo_get_link_type=lambda one, other: {"hops": 1, "type": kind},
        amdsmi_is_P2P_accessible=lambda one, other: True,
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    told = seen(None, {})
    assert told.links == {(0, 1): link}
    assert (told.each[0].vendor, told.each[0].free_bytes, told.each[0].capability) == ("amd", 196_000 << 20, None)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(["NVIDIA H100"], {}))
    with pytest.raises(BadInput, match=r"devices must be GPUs that are here \(GPU 0 \(NVIDIA H100, 80 GiB\)\), got 3"):
        missing(replica((3,)), (0,))


def test_a_machine_that_tells_nothing_does_not_end_the_run(monkeypatch):
    library = nvml([], {})
    library.nvmlInit = lambda: (_ for _ in ()).throw(NvmlError("driver not loaded"))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert missing(replica((0,)), (0,)) == ["kinds and links of the GPUs are not known: NvmlError: driver not loaded"]
    assert missing(ReplicaConfig(checkpoint="model"), ()) == []


def test_weights_and_shared_memory_are_measured(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert gpu_notes.size_of_weights(tmp_path) == 5
    monkeypatch.setattr(gpu_notes, "SHM", tmp_path / "none")
    assert gpu_notes.free_shared_memory() == 0
