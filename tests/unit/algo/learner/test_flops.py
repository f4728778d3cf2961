"""The peak of a GPU, from the name that its driver gives."""

import pytest

from engine.learner.gpu_peaks import peak_of


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
