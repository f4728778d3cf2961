"""Writes the timeline of a recorded run for ui.perfetto.dev, of all steps that it has, or of some.

python -m engine.programs.trace runs/quickstart --steps 11-12
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.atomic_files import CannotWrite
from engine.errors import BadInput
from engine.recording.files import check_files
from engine.recording.reader import RecordedRun
from engine.recording.trace import write_trace
from sandbox.printable import printable

PROGRAM = "python -m engine.programs.trace"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--steps", metavar="FIRST-LAST", help="12, or 10-12 (default: all whose timeline is there)")
    parser.add_argument("--output", type=Path, help="the file (default: timeline-10-12.json in the run's folder)")
    options = parser.parse_args(argv)
    try:
        path = _write(options.run, options.steps, options.output)
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except CannotWrite as error:
        print(printable(f"{PROGRAM}: {error}"), file=sys.stderr)
        return 1
    print(printable(f"{path}: open it at ui.perfetto.dev"))
    return 0


def _write(folder: Path, steps: str | None, output: Path | None) -> Path:
    check_files(folder)
    run = RecordedRun(folder)
    there = run.timeline_steps
    if not there:
        raise BadInput(f"{folder} has no recorded timeline. Fix: the folder of a run that was recorded (record.max_mb)")
    first, last = (there[0], there[-1]) if steps is None else _range(steps, there)
    path = output or folder / f"timeline-{first}-{last}.json"
    write_trace(path, list(run.timeline(first, last)))
    return path


def _range(steps: str, there: Sequence[int]) -> tuple[int, int]:
    """Raises BadInput unless the run has the timeline of one of them."""
    parts = steps.split("-")
    if not all(part.isdecimal() for part in parts) or len(parts) > 2:
        raise BadInput(f"--steps must be a step or FIRST-LAST, got {steps!r}. Fix: --steps {there[-1]}")
    first, last = int(parts[0]), int(parts[-1])
    if not any(first <= step <= last for step in there):
        raise BadInput(f"--steps: no timeline of {steps} (steps {there[0]} to {there[-1]}). Fix: one of these")
    return first, last


if __name__ == "__main__":
    sys.exit(main())
