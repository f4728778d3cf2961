"""Recipes in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.paths import ROOT

QUICKSTART = [sys.executable, "-u", str(ROOT / "recipes" / "quickstart.py")]
SMALL = ["eval_problems=8", "prompts_per_step=4", "group_size=2"]

# What the machine decides; prefix_hit_rate: the prefix of a trajectory that goes on is computed again.
NOT_COMPARED = (
    *("time/", "nodes/", "stage/", "kv_peak/", "kv/", "host/", "gpu/", "replicas/"),
    *("tools/latency", "tools/queue", "tools/run_", "tools/overlap"),
    *("prefix_hit_rate", "peak_bytes", "trajectories_resumed", "distill/overlap"),
)


def command(runs: Path, *fields: str, recipe: Path = ROOT / "recipes" / "quickstart.py") -> list[str]:
    return [sys.executable, "-u", str(recipe), f"runs={runs}", *fields]


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without their checksums."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "crc32"} for row in rows]


def numbers(folder: Path) -> list[dict[str, float]]:
    """The rows without what the machine decides."""
    return [
        {
            name: value
            for name, value in row.items()
            if not (name.endswith("_s") or any(part in name for part in NOT_COMPARED))
        }
        for row in metrics(folder)
    ]


class Run:
    """A recipe under way, its output line by line, and every process it ever had below it."""

    def __init__(self, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.seen: dict[int, psutil.Process] = {}
        self.output: list[str] = []

    def until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if text in line:
                break
        else:
            raise AssertionError("".join(self.output))
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[child.pid] = child

    def end(self, within_s: float = 120) -> int:
        output, _ = self.process.communicate(timeout=within_s)
        self.output.append(output)
        return self.process.returncode

    def end_now(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def text(self) -> str:
        return "".join(self.output)

    def named(self, part: str) -> list[psutil.Process]:
        return [child for child in self.seen.values() if part in " ".join(child.cmdline())]

    def left(self) -> list[str]:
        """What is still alive of it, waiting a moment for the kernel to reap."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=10)
        return [f"{child.pid} {child.name()} {child.status()}" for child in alive if child.status() != "zombie"]
