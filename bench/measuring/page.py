"""`rocstar bench page`: bench/README.md from bench/results/*.json, so that no figure in it is typed.

A result is what a bench leaves in runs/bench. The newest one of each bench that is worth quoting lies in bench/results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import ROOT
from bench.catalogue import CATALOGUE
from bench.measuring import questions
from bench.measuring.questions import Answer
from bench.measuring.result import Result, legend, tables

RESULTS = ROOT / "bench" / "results"
QUICK = RESULTS / "quick"  # of the short forms, for the time that they take
PAGE = ROOT / "bench" / "README.md"
HEAD = """# Benches

`rocstar bench page` makes this page from `bench/results`, a JSON file for each bench: do not edit it.
`rocstar bench NAME` runs one bench (`quick=true`: its short form, `make bench`: all of them in that form). It prints
tables and one line of JSON, and leaves the result in `runs/bench/NAME.json` (`NAME.quick.json`). Copy that file to
`bench/results` to show it here; that of the short form, as `NAME.json`, to `bench/results/quick`: then `rocstar bench
list` says how long it takes.

| command | what it does |
| --- | --- |
| `rocstar bench list` | lists the benches, the question that each answers, and how long it takes |
| `rocstar bench ask` | runs the commands that answer a researcher's questions (below) |
| `rocstar bench compare NAME other=DIR` | runs two checkouts in turns and says with intervals whether they differ |
| `rocstar bench compare A.json B.json` | compares two results of one machine and the same options |
| `rocstar bench NAME baseline=F metric=M gate=5` | ends with code 1 where a figure is surely worse by over 5 % |
| `rocstar bench sweep NAME over=FIELD:1,2,4` | runs a bench or a recipe with each value of an option |
| `rocstar bench profile RECIPE` | puts a real run under a sampling profiler |
| `rocstar bench stage my.py:stage feed=RUN` | feeds recorded groups to one stage of yours |
| `rocstar bench rivals RUN step=N` | simulates a recorded step under other placement policies, with its error |

A figure is the median over the rounds unless its legend says otherwise. Behind a ratio stands its 95 % interval, or
the range of its rounds where they are fewer than six. No ratio is shown of a run in which other processes used more
than a tenth of the machine, or which has fewer than three rounds. The JSON holds every round, the options, the machine
and its load.

A bench is a module below `bench/benches` with a `BENCH`: options, metrics, and a function that measures rounds
(`bench/measuring/bench.py`). Its name and question stand in `bench/catalogue.py`. Ideas that were tried and did not
help stand in [LOG.md](LOG.md).
"""


def main(argv: Sequence[str]) -> int:
    PAGE.write_text(page(load(RESULTS), questions.load(questions.ANSWERS)))
    return 0


def load(folder: Path) -> dict[str, Result]:
    """Returns the results of a folder by bench. Raises ValueError naming a file that is no result of its bench."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        result = Result.read(path)
        if result.bench not in CATALOGUE or path.stem != result.bench:
            raise ValueError(f"{path} must be named after a bench of the catalogue, its own: {result.bench!r}")
        results[result.bench] = result
    return results


def page(results: Mapping[str, Result], answers: Mapping[str, Answer]) -> str:
    sections = [_section(results[name]) for name in CATALOGUE if name in results]
    return "\n".join([HEAD, questions.section(answers), *sections])


def _section(result: Result) -> str:
    noted = f" No ratio is shown: {result.disturbed}." if result.disturbed else ""
    lines = [
        f"## {result.bench}",
        "",
        f"{CATALOGUE[result.bench].question} [JSON](results/{result.bench}.json)",
        "",
        f"`{result.command}`",
        "",
        f"{result.rounds} rounds on {result.machine}, {result.date}, commit {result.commit}.{noted}",
        "",
    ]
    for table in tables(result):
        lines += [_row(table.header), _row(["---"] * len(table.header)), *map(_row, table.rows), ""]
    lines += [f"- {title}: {doc}" for title, doc in legend(result)]
    return "\n".join([*lines, ""])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
