"""What the GPU kit carries and measures: versions that its vLLM takes, and a figure that outlives its contenders."""

import zipfile

import pytest
import torch

from algo.learner.measure.flops import peak_of
from bench.gpu import pack, parts
from bench.learner import Facts, figures, time_contender

METADATA = """Metadata-Version: 2.4
Name: vllm
Requires-Dist: apache-tvm-ffi==0.1.10
Requires-Dist: xgrammar<1.0.0,>=0.2.1; platform_machine == "x86_64"
Requires-Dist: Outlines_Core==0.2.14
Requires-Dist: setuptools<81; python_version > "3.13"
Requires-Dist: helion==1.1.0; extra == "helion"

Requires-Dist: nothing==0
"""


@pytest.fixture
def asked(tmp_path):
    wheel = tmp_path / "vllm-0.26.0-cp38-abi3-any.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("vllm-0.26.0.dist-info/METADATA", METADATA)
    return pack.required(wheel, "3.12")


def test_what_a_wheel_asks_for_is_read_as_pip_reads_it(asked):
    assert {name: str(takes) for name, takes in asked.items()} == {
        "apache-tvm-ffi": "==0.1.10",
        "xgrammar": "<1.0.0,>=0.2.1",
        "outlines-core": "==0.2.14",
    }


@pytest.mark.parametrize(
    ("package", "wanted"),
    [
        ("apache-tvm-ffi", "apache-tvm-ffi==0.1.10"),
        ("xgrammar", "xgrammar==0.2.8"),
        ("outlines_core", "outlines_core==0.2.14"),
        ("msgspec", "msgspec==0.22.0"),
        ("blake3", "blake3"),
    ],
)
def test_our_version_is_carried_where_that_vllm_takes_it(asked, package, wanted):
    pinned = {"apache-tvm-ffi": "0.1.15.post2", "xgrammar": "0.2.8", "msgspec": "0.22.0"}
    assert pack.chosen(package, pinned, asked) == wanted


class Clock:
    def __init__(self):
        self.seconds = {}

    def time(self, name, work):
        work()
        self.seconds[name] = 2.0


def test_a_contender_without_memory_costs_its_own_figure_and_not_the_learners():
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    work, clock = {"bare": full, "padded": lambda: None}, Clock()
    for name in list(work):
        time_contender(name, work, clock)
    assert list(work) == list(clock.seconds) == ["padded"]
    ours = {"plan": 0.1, "forward and backward": 1.0, "clip and optimizer": 0.1, "publish": 0.1}
    facts = Facts(tokens=10, rows=1, parameters=5, step_flops=1.0, peak_bytes=1)
    found = figures([(facts, {**ours, "bare": 2.0}), (facts, ours)], None)
    assert found["bare_fraction"] is None
    assert found["tokens_per_s"] == {"learner": 10.0}
    row = parts.learner({"metrics": found})
    assert row["training_tgs"] == 10.0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA T4", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_by_that_name(name, peak):
    assert peak_of(name) == peak
