"""What rocstar does on one GPU, part after part: one table in the names of NeMo-RL and xtuner, and a file of each part.

    python -m bench gpu                      all parts; those that have a result are passed over
    python -m bench gpu --parts learner,sleep    those whose names begin so
    python -m bench gpu --again              also those that have a result
    python -m bench gpu --rehearse           every part on the CPU with small sizes, to the last line of the table

Each part is a process of its own with a limit, so that one that fails costs its row. No part begins that cannot end
within `--minutes`: the same command goes on where it stopped. Columns: rollout_tgs and training_tgs are xtuner's tokens
per GPU and second, refit is NeMo-RL's word for the weight update, generation and policy training are its phases.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.benches.gpu.parts import Figures, Part, figures, parts
from bench.measuring.report import environment, finish, interruptible, number, say

COLUMNS = ("rollout_tgs", "training_tgs", "generation s", "policy training s", "refit s", "e2e step s", "MFU", "remark")
REHEARSAL_S = 180.0  # limit of a part on the CPU


@dataclass(kw_only=True, slots=True)
class Row:
    """A part and what became of it: figures, or why there are none."""

    part: str
    seconds: float = 0.0
    found: Figures = field(default_factory=dict)
    failed: str = ""

    def cells(self) -> list[str]:
        shown = [self.found.get(column, "") for column in COLUMNS]
        if self.failed:
            shown[-1] = f"failed: {self.failed}"
        return [self.part, f"{self.seconds:.0f}", *(_shown(cell) for cell in shown)]


def _shown(cell: float | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


def measure(options: argparse.Namespace, wanted: Sequence[Part], rows: list[Row]) -> None:
    """Adds a row for each part that was run or has a result."""
    until = time.monotonic() + 60 * options.minutes
    for part in wanted:
        file = options.into / f"{part.name}.json"
        if file.exists() and not options.again:
            rows.append(_read(part, file, Row(part=part.name)))
            continue
        limit_s = min(part.limit_s, REHEARSAL_S) if options.rehearse else part.limit_s
        if time.monotonic() + limit_s > until:  # its limit counts, not what it will take
            say(f"{part.name}: not begun, {options.minutes:g} minutes are over. Fix: the same command again")
            continue
        say(f"{part.name}: at most {limit_s:.0f} s")
        rows.append(run(part, file, limit_s=limit_s, rehearse=options.rehearse))
        say(f"{part.name}: {rows[-1].failed or 'done'}, {rows[-1].seconds:.0f} s")


def run(part: Part, file: Path, *, limit_s: float, rehearse: bool) -> Row:
    """Runs a part in a session of its own, which is ended with all that it began."""
    row, began = Row(part=part.name), time.monotonic()
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with file.with_suffix(".log").open("w") as log:
        words = part.command(fresh, rehearse=rehearse)
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit_s)
            row.failed = f"exit code {code}, {_last_line(Path(log.name))}" if code else ""
        except subprocess.TimeoutExpired:
            row.failed = f"not done after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    row.seconds = time.monotonic() - began
    if row.failed:
        return row
    row = _read(part, fresh, row)
    if not row.failed:
        fresh.replace(file)
    return row


def _read(part: Part, file: Path, row: Row) -> Row:
    try:
        row.found = figures(part, file)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        row.failed = f"its result cannot be read: {error!r}"
    return row


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:160]} ({log})" if lines else f"without a word ({log})"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="", help="names or their beginnings, with commas; none: all")
    parser.add_argument("--again", action="store_true", help="also parts that have a result")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--minutes", type=number(0.1), default=25.0, help="in which parts begin and end")
    parser.add_argument("--into", type=Path, help="folder of the results; default: runs/gpu, runs/gpu-rehearsal")
    options = parser.parse_args(given)
    options.into = (options.into or ROOT / "runs" / ("gpu-rehearsal" if options.rehearse else "gpu")).resolve()
    options.wanted = [part for part in parts() if part.name.startswith(tuple(options.parts.split(",")))]
    if not options.wanted:
        parser.error(f"argument --parts: {options.parts!r} names none of {', '.join(part.name for part in parts())}")
    return options


def main() -> None:
    options = arguments()
    options.into.mkdir(parents=True, exist_ok=True)
    machine: dict[str, Any] = environment() | {"device": device()}
    rows: list[Row] = []

    def show() -> None:
        config = {name: value for name, value in vars(options).items() if name != "wanted"}
        metrics = {row.part: {"seconds": row.seconds, "failed": row.failed, **row.found} for row in rows}
        title = f"One GPU: {machine['device']}" if not options.rehearse else "Rehearsal on the CPU: nothing is measured"
        header = ("part", "took s", *COLUMNS)
        finish("gpu", title, header, [row.cells() for row in rows], config=config, metrics=metrics, environment=machine)

    interruptible(lambda: measure(options, options.wanted, rows), show, rows)
    if failed := [row.part for row in rows if row.failed]:
        sys.exit(f"{len(failed)} of {len(rows)} parts failed: {', '.join(failed)}")


def device() -> str:
    """Name and memory of the GPU as its driver tells them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


if __name__ == "__main__":
    main()
