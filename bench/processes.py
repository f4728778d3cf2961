"""Programs that a bench runs, and CPU seconds of them by the part they belong to, from /proc."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
STOP_S = 30.0  # a quick start that is told to end stops its processes and writes its files first
ROLES = {  # by what the command line holds, first match wins
    "EngineCore": "replicas",
    "torch.distributed.run": "launcher",
    "algo.learner": "learner",
    "sandbox.host": "sandbox host",
    "sandbox.inside.zygote": "tool calls",
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


@contextlib.contextmanager
def child(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program without output; if the block ends first, it is told to end and has STOP_S for that."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:  # also on Ctrl-C, which the program gets too
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
