"""Chooses the cores that a fleet's engines are pinned to on the CPU, beside those of other nodes on the machine."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_ONE_CORE = re.compile(rb"^Cpus_allowed_list:\s*(\d+)$", re.MULTILINE)


def least_pinned(processes: Path = Path("/proc")) -> list[int]:
    """Returns the cores that this process may use. Those that fewer processes are pinned to come first."""
    pinned: Counter[int] = Counter()
    for status in processes.glob("[0-9]*/status"):
        try:
            status_text = status.read_bytes()
        except OSError:  # the process has ended
            continue
        match = _ONE_CORE.search(status_text)
        if match and b"\nVmSize:" in status_text:  # the kernel's own threads have none
            pinned[int(match[1])] += 1
    return sorted(os.sched_getaffinity(0), key=lambda core: (pinned[core], core))


def core_of(index: int, replicas: int, cores: Sequence[int]) -> int | None:
    """Returns the core for a replica, or None for any core if there are more replicas than cores: a replica pinned
    beside a busy one would wait while another core idles.
    """
    return cores[index] if replicas <= len(cores) else None
