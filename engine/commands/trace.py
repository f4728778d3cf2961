"""Writes the timeline of a recorded run for ui.perfetto.dev: `rocstar trace runs/quickstart steps=11-12`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine.atomic_files import CannotWrite
from engine.console.options import Positional, parse
from engine.errors import BadInput
from engine.recording.files import check_files
from engine.recording.reader import RecordedRun
from engine.recording.trace import write_trace
from sandbox.printable import printable

PROGRAM = "rocstar trace"


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, Positional("folder of the run")]
    steps: Annotated[str | None, "which steps, 12 or 10-12; none: all that have a timeline"] = None
    output: Annotated[Path | None, "the file; none: timeline-10-12.json in the run's folder"] = None


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 if the user has to change something, 1 if the file cannot be written."""
    options = parse(Options, argv, program=PROGRAM, description=__doc__)
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
    recorded = run.timeline_steps
    if not recorded:
        raise BadInput(f"{folder} has no recorded timeline. Fix: the folder of a run that was recorded (record.max_mb)")
    trained = max((row.step for row in run.rows()), default=recorded[-1])
    first, last = (recorded[0], recorded[-1]) if steps is None else _range(steps, recorded, trained)
    path = output or folder / f"timeline-{first}-{last}.json"
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise BadInput(f"output={path} is no place for a file. Fix: name a file in a folder that is there")
    write_trace(path, list(run.timeline(first, last)))
    return path


def _range(steps: str, recorded: Sequence[int], trained: int) -> tuple[int, int]:
    """Returns the first and the last step that are asked for and have a timeline; says so if others are asked for too.

    trained: the newest step; the timeline may go on after it, with the last evaluation. Raises BadInput unless one of
    the steps is recorded.
    """
    parts = steps.split("-")
    if not all(part.isdecimal() for part in parts) or len(parts) > 2:
        raise BadInput(f"steps must be a step or FIRST-LAST, got {steps!r}. Fix: steps={recorded[-1]}")
    first, last = int(parts[0]), int(parts[-1])
    asked = [step for step in recorded if first <= step <= last]
    end = min(trained, recorded[-1])
    after = f"; {recorded[-1]} is what came after the last step" if recorded[-1] > end else ""
    if not asked:
        raise BadInput(
            f"steps={steps}: the run has no timeline of them. Fix: steps between {recorded[0]} and {end}{after}"
        )
    if (asked[0], asked[-1]) != (first, last):
        print(
            f"steps={steps}: only {asked[0]} to {asked[-1]} have a timeline, and only these are written"
            + (after if asked[-1] > end else ""),
            file=sys.stderr,
        )
    return asked[0], asked[-1]
