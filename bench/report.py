"""What every bench prints at its end: a table, then one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def environment() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def finish(
    bench: str,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> None:
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    (Console() if sys.stdout.isatty() else Console(width=160)).print(table)
    print(json.dumps({"bench": bench, "environment": environment, "config": config, "metrics": metrics}))


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type for argparse: comma-separated names, each of them known."""

    def parse(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: it knows {', '.join(known)}")
        return text.split(",")

    return parse
