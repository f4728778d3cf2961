"""Says at a run's start what the processor lacks for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})  # as Linux names them


def lacks(dtypes: Collection[str], cpuinfo: Path = CPUINFO) -> list[str]:
    """Returns a line if bfloat16 is computed on a processor that is known to have no instructions for it.

    dtypes: what replicas and learner compute in. cpuinfo: what Linux says of the processor. PyTorch's and vLLM's
    matrix products then convert to float32 and back.
    """
    if "bfloat16" not in dtypes or has_bfloat16(cpuinfo) is not False:
        return []
    return [
        "this processor has no instructions for bfloat16 (AVX512-BF16 or AMX), so matrix products take several times "
        "as long as in float32. Fix: dtype=float32, unless bfloat16's rounding is what you want to see"
    ]


def has_bfloat16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Returns whether the processor has instructions for bfloat16; None if the file does not say, as on ARM."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return None if flags is None else not BFLOAT16_FLAGS.isdisjoint(flags)
