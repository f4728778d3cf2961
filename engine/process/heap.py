"""Keeps the C heap of an engine or a learner on the CPU from growing: it returns free memory to the system.

oneDNN makes kernels for each number of rows that a step has. They are allocated and freed between the buffers of the
steps, so that what the buffers leave free is soon in pieces too small for the next ones. With prompts of many lengths,
the heap of a small model's engine grew by more than a gigabyte in a thousand steps, and that of a learner of 135M
parameters by 7 GB in 40. All of that was free memory.

It needs Linux with glibc, and does nothing elsewhere.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

GROWTH = 1.5  # a step's buffers are a third of a process; returning those would cost page faults in each step
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_libc = ctypes.CDLL(None)


class Heap:
    """The learner calls `trim` after each step. An engine calls `keep` once, then `trim` after each weight update."""

    _held = 0  # bytes after the last trim

    def keep(self) -> None:
        """Keeps freed memory in the process. Else its pages would be faulted in again at every weight update."""
        if hasattr(_libc, "mallopt"):
            _libc.mallopt(_M_MMAP_MAX, 0)
            _libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)

    def trim(self) -> None:
        """Returns free pages to the system if the process has grown to GROWTH times its size after the last trim."""
        if hasattr(_libc, "malloc_trim") and anonymous_bytes() > GROWTH * self._held:
            _libc.malloc_trim(0)
            self._held = anonymous_bytes()


def anonymous_bytes() -> int:
    """Returns how much memory of this process no file backs."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
