"""Runs programs for a bench, and reads their CPU seconds by the part to which each process belongs."""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence

import psutil

from engine.telemetry.others import family

STOP_S = 30.0  # a quick start that is told to end stops its processes and writes its files first
ROLES = {  # a process has the role of the first text that its command line holds
    "EngineCore": "replicas",
    "engine.learner.launch": "launcher",
    "algo.learner": "learner",
    "sandbox.host": "sandbox host",
    "sandbox.inside.zygote": "tool calls",
    "quickstart.py": "node",
}


def cpu_seconds(root: int) -> Counter[str]:
    """Returns the CPU seconds so far by role. Ended children count for tool calls only."""
    seconds: Counter[str] = Counter()
    for process in family(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            times = process.cpu_times()
            role = next((role for mark, role in ROLES.items() if mark in command), "other")
            seconds[role] += times.user + times.system
            if role == "tool calls":
                seconds[role] += times.children_user + times.children_system
    return seconds


@contextlib.contextmanager
def child(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program without showing its output. If the block ends first, the program is told to end within STOP_S."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:  # also on Ctrl-C, which the program gets too
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
