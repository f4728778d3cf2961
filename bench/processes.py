"""CPU seconds of a run by the part it belongs to, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
ROLES = {  # by what the command line holds, first match wins
    "EngineCore": "replicas",
    "torch.distributed.run": "launcher",
    "algo.learner": "learner",
    "sandbox.host": "sandbox host",
    "sandbox.zygote": "tool calls",
    "quickstart.py": "node",
}


def family(pid: int) -> list[int]:
    """A process and everything below it; one that ends meanwhile has nothing below it."""
    children: list[str] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            children += task.read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


def cpu_seconds(root: int) -> Counter[str]:
    """CPU seconds so far by role, ended children included for tool calls; a process that ends meanwhile is left out."""
    seconds: Counter[str] = Counter()
    for pid in family(root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        role = next((role for mark, role in ROLES.items() if mark in command), "other")
        own, ended = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
        seconds[role] += (own + (ended if role == "tool calls" else 0)) / TICK
    return seconds
