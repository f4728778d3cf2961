"""Where does a training step's time go? Wall seconds by phase and CPU seconds by process, of the quick start.

    python -m bench.split [--quick] [field=value ...]      (fields of recipes/quickstart.py)

The run is the ordinary one, in a process of its own; its processes are read from /proc while it trains. CPU seconds of
tool calls include their ended children. The floor of a step is its CPU seconds over the number of cores: what is above
it is waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.report import environment, finish

ROOT = Path(__file__).resolve().parents[1]
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
    """CPU seconds so far by role, ended children included; a process that ends meanwhile is left out."""
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


def rows_of(path: Path) -> list[dict]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["step"]] if path.exists() else []


def measure(fields: list[str], steps: int, skip: int) -> tuple[list[dict], Counter[str]]:
    """The steps after the first `skip`, and the CPU seconds spent in them by role."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"runs={folder}", f"steps={steps}", f"eval_every={steps}", "eval_problems=16", *fields]
        command = [sys.executable, str(ROOT / "recipes" / "quickstart.py"), *options]
        metrics = Path(folder) / "quickstart" / "metrics.jsonl"
        samples: dict[int, Counter[str]] = {}  # CPU seconds when so many steps were done
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                done = len(rows_of(metrics))
                if done >= skip and done not in samples:
                    samples[done] = cpu_seconds(process.pid)
                time.sleep(0.05)
        if process.returncode:
            sys.exit(f"the run ended with exit code {process.returncode}")
        rows = rows_of(metrics)
    first, last = min(samples), max(done for done in samples if done < steps)
    spent = samples[last]
    spent.subtract(samples[first])
    return rows[first:last], spent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.split", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 steps instead of 40")
    options, fields = parser.parse_known_args()
    machine = environment()
    steps = 8 if options.quick else 40
    rows, cpu = measure(fields, steps, skip=2)
    count = len(rows)
    wall = {name: sum(row[f"time/{name}_s"] for row in rows) / count for name in ("step", "rollout", "learn", "sync")}
    cpu_per_step = {role: seconds / count for role, seconds in cpu.most_common() if seconds / count >= 0.005}
    floor = sum(cpu_per_step.values()) / machine["cores"]
    table = [[f"wall: {name}", f"{seconds:.3f}"] for name, seconds in wall.items()]
    table += [[f"CPU: {role}", f"{seconds:.3f}"] for role, seconds in cpu_per_step.items()]
    table += [["floor: CPU / cores", f"{floor:.3f}"], ["wall / floor", f"{wall['step'] / floor:.2f}"]]
    metrics = {
        "wall_s": wall,
        "cpu_s": cpu_per_step,
        "floor_s": floor,
        "floor_ratio": wall["step"] / floor,
        "tool_latency_p50_ms": sum(row["tool_latency_p50_ms"] for row in rows) / count,
        "tool_calls": sum(row["tool_calls"] for row in rows) / count,
        "tokens": sum(row["tokens_generated"] for row in rows) / count,
    }
    config = {"steps": steps, "measured_steps": count, "fields": fields}
    header = ("seconds per step", f"mean of {count}")
    finish("split", "Where a step goes", header, table, config=config, metrics=metrics, environment=machine)


if __name__ == "__main__":
    main()
