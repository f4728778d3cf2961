"""What every bench does the same way: options, progress, Ctrl-C, and at its end a table and one JSON line.

Invariants
- No ratio is printed of a run in which others used the machine, or which has too few rounds; the line of JSON says why
  under "disturbed".
- A bench adds whole rounds to its results. Ctrl-C ends it with what they give, if anything, and exit code 130.
- What was given on the command line is what is measured: `--quick` only changes what was not given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from bench import ROOT
from bench.measuring.disturbance import ROUNDS, Surroundings, reason
from engine.telemetry.watchdog import exit_process

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What every bench takes beside its own options. most: a share; negative where a smaller figure is worse."""

    json: Path | None = None
    baseline: Path | None = None
    metric: str = ""
    most: float = 0.05


def own_options(words: Sequence[str]) -> tuple[Gate, list[str]]:
    """These, and the words that are left for the bench. Raises ValueError for what cannot be."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--metric", default="")
    parser.add_argument("--gate", default="5%")
    try:
        given, further = parser.parse_known_args(list(words))
        most = float(given.gate.removesuffix("%")) / 100
    except (argparse.ArgumentError, ValueError) as error:
        raise ValueError(f"{error}. Fix: --gate 5% (or -5% where smaller is worse)") from None
    if given.baseline is not None and not (given.metric and given.baseline.is_file()):
        raise ValueError("--baseline needs a file that is there, and --metric: which of its figures is judged")
    return Gate(json=given.json, baseline=given.baseline, metric=given.metric, most=most), further


class Run:
    """The bench that runs in this process. result: what it has found, once it has finished."""

    def __init__(self) -> None:
        self.begin("", [])

    def begin(self, name: str, words: Sequence[str], *, json: Path | None = None) -> None:
        self.name, self.words, self.json = name, list(words), json
        self.surroundings = Surroundings()
        self.result: dict[str, Any] | None = None
        self.rounds: int | None = None
        self.samples: dict[str, list[float]] = {}
        self.silent: list[Mapping[str, Any]] | None = None  # metrics of single rounds, while these are asked for

    def sample(self, show: Callable[[], None], whole: Sized) -> None:
        """What each round by itself gives, for a bench whose rounds are whole lists of figures."""
        if not isinstance(whole, list):
            return  # a bench without rounds
        self.rounds = len(whole)
        if len(whole) < 2 or not self.name:
            return
        rounds, self.silent = list(whole), []
        try:
            for one in rounds:
                whole[:] = [one]
                show()
        except (KeyError, ValueError, IndexError, ZeroDivisionError, statistics.StatisticsError):
            self.silent = []  # a round of this bench is no whole by itself
        finally:
            whole[:] = rounds
            found, self.silent = self.silent, None
        for metrics in found or ():
            self.add(metrics)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """The figures of a round."""
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.samples.setdefault(name, []).append(float(value))


RUN = Run()


def environment() -> dict[str, Any]:
    RUN.surroundings = Surroundings()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
        "commit": _commit() if RUN.name else "unknown",
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
            RUN.sample(show, whole)
            show()
        exit_process(130)
    RUN.sample(show, whole)
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
    simulated: bool = False,
) -> None:
    """Prints the table and one JSON line, and keeps both in `runs/bench` as `bench.measuring.figures` reads them.

    simulated: no figure depends on what else the machine does.
    """
    if RUN.silent is not None:
        RUN.silent.append(metrics)
        return
    if RUN.rounds == 1:
        RUN.add(metrics)
    others = RUN.surroundings.others()
    disturbed = None if simulated else reason(others, RUN.rounds)
    print(_block(bench, environment, others))
    table(title, header, _without_ratios(header, rows) if disturbed else rows)
    if disturbed:
        print(f"no ratio is shown: {disturbed}. Fix: run it alone, with --rounds {ROUNDS} or more")
    around = {**environment, "load_after": os.getloadavg()[0], "others": round(others, 3)}
    line = {"bench": bench, "environment": around, "config": config, "metrics": metrics}
    line |= {"disturbed": disturbed} if disturbed else {}
    print(json.dumps(line, default=os.fspath), flush=True)
    result = {
        **line,
        "machine": f"{environment.get('cores', '?')} cores of {environment.get('cpu', 'unknown')}",
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "bench", bench, *(RUN.words if RUN.name else sys.argv[1:])]),
        "samples": RUN.samples,
        "tables": [{"title": title, "header": header, "rows": rows}],
    }
    RUN.result = json.loads(json.dumps(result, default=os.fspath))
    for path in (Path("runs", "bench", f"{bench}.json"), RUN.json):
        if path is not None:
            drawn(path, lambda there: there.write_text(_pretty(result)))


def _block(bench: str, environment: Mapping[str, Any], others: float) -> str:
    """What every bench says first: what was measured where."""
    rounds = "" if RUN.rounds is None else f"   {RUN.rounds} rounds"
    machine = f"{environment.get('cores', '?')} cores of {environment.get('cpu', 'unknown')}"
    return (
        f"{bench}   {machine}, others used {100 * others:.0f} %{rounds}   commit {environment.get('commit', 'unknown')}"
    )


def _commit() -> str:
    """Of these sources; with a + where they are not as committed."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


_RATIO = re.compile(r"ratio|over |of bare|against|learner is|total / copy|saved| x\b|bound", re.IGNORECASE)


def _without_ratios(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    hidden = [bool(_RATIO.search(name)) for name in header]
    return [["-" if hide and cell else cell for hide, cell in zip(hidden, row, strict=True)] for row in rows]


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
