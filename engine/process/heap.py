"""The C heap of an engine or a learner on the CPU: freed memory that is much goes back to the system.

oneDNN makes kernels for each number of rows that a step has. They come and go between the buffers of the steps, and
what these leave free is soon in pieces too small for them: with prompts of many lengths the heap of a small model's
engine grew by more than a gigabyte in a thousand steps, that of a learner of 135M parameters by 7 GB in 40, all of it
free.

Linux with glibc; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

GROWTH = 1.5  # the buffers of a step come to a third of a process, and are not worth the pages' faults
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_libc = ctypes.CDLL(None)


class Heap:
    """`trim` after each step of the learner. In an engine: `keep` once, then `trim` after each weight update."""

    _held = 0  # bytes after the last trim

    def keep(self) -> None:
        """Freed memory stays: its pages would be faulted in again at every weight update."""
        if hasattr(_libc, "mallopt"):
            _libc.mallopt(_M_MMAP_MAX, 0)
            _libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)

    def trim(self) -> None:
        """Gives free pages back when the process has grown to GROWTH times what it was after the last time."""
        if hasattr(_libc, "malloc_trim") and anonymous_bytes() > GROWTH * self._held:
            _libc.malloc_trim(0)
            self._held = anonymous_bytes()


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
