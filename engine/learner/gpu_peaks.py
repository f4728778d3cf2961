"""Knows what GPUs promise at most, by which MFU is measured."""

from __future__ import annotations

# Dense bf16 with sums in float32, from datasheets. The first name that occurs in a device's own name applies.
PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("H20", 148e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
    ("RTX 5090", 210e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


def peak_of(device_name: str) -> float | None:
    """Returns the operations per second that a GPU promises in bf16; None for one that is not known."""
    return next((peak for name, peak in PEAKS if name in device_name), None)
