"""Chooses the cores that a fleet's engines are pinned to on the CPU, beside those of other nodes on the machine.

Invariant: two fleets that start at the same moment get different cores if there are enough. An engine is pinned seconds
after its core is chosen, so until then only the fleet's claim shows that the core is taken.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
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


@contextmanager
def claimed_cores(replicas: int, folder: Path = Path("/sys/devices/system/cpu")) -> Iterator[Sequence[int | None]]:
    """Yields a core for each replica: one that no other fleet has claimed, as long as there are any.

    Each is None if there are more replicas than cores: a replica pinned beside a busy one would wait while another core
    idles. A claim is a lock on the kernel's folder of the core: it ends with the process, also by kill -9, and leaves
    nothing behind.
    """
    cores = least_pinned()
    if replicas > len(cores):
        yield [None] * replicas
        return
    with ExitStack() as claims:
        claimed = list(islice((core for core in cores if _claim(folder / f"cpu{core}", claims)), replicas))
        others = [core for core in cores if core not in claimed]
        yield [*claimed, *others][:replicas]


def _claim(core: Path, claims: ExitStack) -> bool:
    """Claims a core until `claims` is closed. Returns False if another fleet has it, or if it cannot be claimed."""
    with ExitStack() as claim:
        try:
            descriptor = os.open(core, os.O_RDONLY)
            claim.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        claims.enter_context(claim.pop_all())
        return True
