"""Says how the pace of run B differs from that of run A, and where the difference comes from.

    rocstar compare runs/quickstart runs/quickstart-2

The seconds of a step are split into parts that add up to them: sampling, and what idle replicas waited for. Each part
has a 95 % interval over the steps that both runs have; a part whose interval contains zero is not sure. The first step
warms up and is left out where there are others. It is said if the runs should not be compared (another machine, model
or batch), and in which other options they differ. The last line is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.table import Table

from engine.console.options import Positional, parse
from engine.diagnosis.comparison import Comparison, Part, compare
from engine.errors import BadInput
from engine.view.run_files import NotARun, RunFiles
from sandbox.printable import printable

PROGRAM = "rocstar compare"


@dataclass(frozen=True, kw_only=True)
class Options:
    a: Annotated[Path, Positional("folder of run A")]
    b: Annotated[Path, Positional("folder of run B")]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 if the user has to change something."""
    options = parse(Options, argv, program=PROGRAM, description=__doc__)
    try:
        a, b = RunFiles(options.a), RunFiles(options.b)
        compared = compare(a.rows, b.rows, a.config, b.config)
    except (BadInput, NotARun, ValueError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    print(printable(compared.sentence))
    Console().print(table(compared))
    for difference in compared.differs:
        print(printable(f"they differ in {difference}"))
    print(msgspec.json.encode(asdict(compared)).decode())
    return 0


def table(compared: Comparison) -> Table:
    """Returns a row for each part and one for the step."""
    shown = Table("part of a step", box=None, pad_edge=False)
    for name in ("B - A", "of a step of A", "95 % interval"):
        shown.add_column(name, justify="right")
    shown.add_column("")
    for part in (*compared.parts, compared.total):
        interval = "" if part.low is None or part.high is None else f"{part.low:+.3f} to {part.high:+.3f} s"
        share = f"{100 * part.seconds / compared.a_s:+.1f} %"
        shown.add_row(part.name, f"{part.seconds:+.3f} s", share, interval, _doubt(part))
    shown.caption = f"Means of {compared.basis}; a step took {compared.a_s:.2f} s in A and {compared.b_s:.2f} s in B"
    shown.caption_justify = "left"
    return shown


def _doubt(part: Part) -> str:
    if part.low is None:
        return "too few steps for an interval"
    return "" if part.is_sure else "not sure"
