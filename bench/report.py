"""What every bench does the same way: options, progress, Ctrl-C, and at its end a table and one JSON line.

Invariants
- A bench adds whole rounds to its results. Ctrl-C ends it with what they give, if anything, and exit code 130.
- What was given on the command line is what is measured: `--quick` only changes what was not given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from engine.telemetry.watchdog import exit_process

T = TypeVar("T")


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


def say(what: str) -> None:
    """Progress."""
    print(what, file=sys.stderr, flush=True)


def interruptible(measure: Callable[[], object], show: Callable[[], None] = lambda: None, whole: Sized = ()) -> None:
    """measure() adds whole rounds to `whole`, show() prints what they give; Ctrl-C ends measure()."""
    try:
        measure()
    except KeyboardInterrupt:
        say(f"interrupted: {'what follows is of the finished rounds' if whole else 'no round was finished'}")
        if whole:
            show()
        exit_process(130)
    show()


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    found = Table(*header, title=title)
    for row in rows:
        found.add_row(*row)
    (Console() if sys.stdout.isatty() else Console(width=160)).print(found)


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
    """Prints the table and one JSON line, and keeps both in `runs/bench` as `bench.figures` reads them."""
    table(title, header, rows)
    around = {**environment, "load_after": os.getloadavg()[0]}
    line = {"bench": bench, "environment": around, "config": config, "metrics": metrics}
    print(json.dumps(line, default=os.fspath), flush=True)
    result = {
        **line,
        "machine": f"{environment.get('cores', '?')} cores of {environment.get('cpu', 'unknown')}",
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", f"bench.{bench}", *sys.argv[1:]]),
        "tables": [{"title": title, "header": header, "rows": rows}],
    }
    drawn(Path("runs", "bench", f"{bench}.json"), lambda path: path.write_text(_pretty(result)))


def _pretty(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=1, ensure_ascii=False, default=os.fspath) + "\n"


def drawn(path: Path, draw: Callable[[Path], object]) -> str:
    """Where the plot is, or why there is none: a folder that cannot be written costs the plot, not the figures."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(path)
    except OSError as error:
        return f"none, {error}"
    return str(path)


def fill(options: argparse.Namespace, **presets: tuple[Any, Any]) -> None:
    """Options that were not given. presets: name=(with --quick, without)."""
    for name, (quick, full) in presets.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)


# Types for argparse, which names the option of a wrong value


def several(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values with commas between."""
    return lambda text: [one(part) for part in text.split(",")]


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Names with commas between, each of them known."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text}: it knows {', '.join(known)}")
        return text

    return several(parse)


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def number(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not least <= float(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {least}")
        return float(text)

    return parse


def writable(text: str) -> Path:
    """A file that can be written; what it holds is kept."""
    try:
        Path(text).parent.mkdir(parents=True, exist_ok=True)
        Path(text).open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def existing(inside: str = "") -> Callable[[str], Path]:
    """The path of a file; with `inside` that of a folder that holds a file of this name."""

    def parse(text: str) -> Path:
        if not (Path(text) / inside).is_file():
            raise argparse.ArgumentTypeError(f"there is no file {Path(text) / inside}")
        return Path(text)

    return parse


if __name__ == "__main__":
    from bench.figures import main

    main()
