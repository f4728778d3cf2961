"""`rocstar bench list`: the benches, the question that each answers, and how long it took.

The seconds are those of the committed results: of bench/results for a whole bench, of bench/results/quick for its short
form. "-" is a bench that has no such result, or one from before the time was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.catalogue import CATALOGUE
from bench.measuring.page import QUICK, RESULTS
from bench.measuring.result import Result
from bench.measuring.terminal import table


def main(argv: Sequence[str]) -> int:
    rows = [[name, took(QUICK, name), took(RESULTS, name), entry.question] for name, entry in CATALOGUE.items()]
    table("", ["bench", "quick=true", "whole", "question"], rows)
    machines = sorted({Result.read(path).machine for folder in (QUICK, RESULTS) for path in folder.glob("*.json")})
    print(f"times on {', '.join(machines)}; -: not measured")
    return 0


def took(folder: Path, name: str) -> str:
    """Returns how long the result of a bench in this folder took, in words.

    >>> took(Path("nowhere"), "step")
    '-'
    """
    path = folder / f"{name}.json"
    wall_s = Result.read(path).wall_s if path.is_file() else None
    if wall_s is None:
        return "-"
    return f"{wall_s:.0f} s" if wall_s < 120 else f"{wall_s / 60:.0f} min"
