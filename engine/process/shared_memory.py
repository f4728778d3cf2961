"""Takes the names of shared memory away once every process that needs it has it open.

The memory then goes with the last of these processes, however they end: kill -9 leaves none of it behind.
"""

from __future__ import annotations

from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

FOLDER = "/dev/shm/"
PREFIXES = ("psm_", "vllm_dist_")  # Python's own, by which vLLM's processes talk; that of vLLM's kernels for CPUs

_unlink = SharedMemory.unlink


def unlink_mapped() -> None:
    """Takes away the names of the shared memory that this process has open.

    Every process that is to open the memory by its name must have done so.
    """
    SharedMemory.unlink = _unlink_if_named  # type: ignore[method-assign]  # its maker does it too, when it ends
    for name in _mapped():
        with suppress(FileNotFoundError):  # another process was faster
            Path(FOLDER, name).unlink()
            if name.startswith("psm_"):
                resource_tracker.unregister(f"/{name}", "shared_memory")


def _unlink_if_named(self: SharedMemory) -> None:
    with suppress(FileNotFoundError):
        _unlink(self)


def _mapped() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line[line.index(FOLDER) :] for line in lines if FOLDER in line]
    names = {path.removeprefix(FOLDER) for path in paths if not path.endswith(" (deleted)")}
    return {name for name in names if name.startswith(PREFIXES)}
