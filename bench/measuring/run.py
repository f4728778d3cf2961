"""Runs a bench: options, progress, Ctrl-C, and at its end tables, a plot and one line of JSON.

Invariants
- No ratio is shown of a run in which others used the machine, or which has too few rounds; the result says why under
  "disturbed".
- A gate that cannot judge says so with exit code 2, before the bench runs where that is known: 1 is for "worse" alone.
- Ctrl-C ends a bench with what its whole rounds give, if there are any, and exit code 130; an error with exit code 1.
- What is given on the command line is measured: `quick=true` changes only what is not given.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bench import ROOT
from bench.drawing.plot import draw
from bench.measuring import differences
from bench.measuring.bench import Bench, BenchFailed
from bench.measuring.comparable import options_that_differ
from bench.measuring.disturbance import ROUNDS, Surroundings, reason
from bench.measuring.result import Environment, Figures, Result, gathered, legend, summarised, tables
from bench.measuring.terminal import say, table, written
from engine.console.options import flat, parse_all

RESULTS = Path("runs", "bench")


@dataclass(frozen=True, kw_only=True)
class Shell:
    """What every bench takes beside its own options."""

    quick: Annotated[bool, "the bench's short form"] = False
    json: Annotated[Path | None, "another file that the result is kept in"] = None
    baseline: Annotated[Path | None, "a result: the exit code is 1 where `metric` is surely worse than there"] = None
    metric: Annotated[str, "the figure that `baseline` judges, CASE/METRIC"] = ""
    gate: Annotated[float, "per cent by which it may be worse; negative where smaller is worse"] = 5.0

    def __post_init__(self) -> None:
        if self.baseline is not None and not self.metric:
            raise ValueError("metric must be a figure where baseline is given, got ''")


def run(name: str, bench: Bench[Any], argv: Sequence[str], *, doc: str | None) -> int:
    """Runs a bench in this process and returns the exit code. doc: the first paragraph is shown by --help."""
    arguments = with_quick(argv, bench.quick)
    options, shell = parse_all([bench.options, Shell], arguments, program=f"rocstar bench {name}", description=doc)
    config = {field: _plain(value) for field, value in flat(options).items()}
    baseline = None if shell.baseline is None else differences.baseline(shell.baseline, shell.metric)
    if baseline is not None:
        _judgeable(baseline, name, bench, config)
    load_before, began = os.getloadavg()[0], time.monotonic()
    rounds: list[Figures] = []
    code = 0
    with Surroundings() as surroundings:
        try:
            bench.measure(options, rounds.append)
        except KeyboardInterrupt:
            code = 130
            say(f"interrupted: {'the finished rounds follow' if rounds else 'no round was finished'}")
        except BenchFailed as error:
            code = 1
            say(f"error: {error}")
        except Exception as error:  # a bug, or an engine that died: hours of finished rounds are not lost by it
            if isinstance(error, ValueError) and not rounds:
                raise  # a mistake of the user's, which is one line
            code = 1
            traceback.print_exc()
        others = surroundings.others()
    if not rounds:
        return code
    samples = gathered(rounds)
    fewest = min(len(values) for of in samples.values() for values in of.values())
    result = Result(
        bench=name,
        command=shlex.join(["rocstar", "bench", name, *(word for word in argv if not _is_of_shell(word))]),
        date=time.strftime("%Y-%m-%d"),
        commit=commit(),
        environment=environment(load_before=load_before, others=others),
        config=config,
        rounds=fewest,
        disturbed=None if bench.simulated else reason(others, fewest),
        metrics={name: metric for name, metric in bench.metrics.items() if any(name in of for of in samples.values())},
        figures=summarised(samples, bench.metrics),
        samples=samples,
        simulated=bench.simulated,
        wall_s=round(time.monotonic() - began, 1),
    )
    show(result)
    for path in (RESULTS / f"{name}{'.quick' if shell.quick else ''}.json", *([shell.json] if shell.json else [])):
        written(path, result.write)
    print(result.line().decode(), flush=True)
    if baseline is not None and not code:
        return differences.gate(baseline, result, metric=shell.metric, most=shell.gate / 100)
    return code


def _judgeable(before: Result, name: str, bench: Bench[Any], config: Mapping[str, Any]) -> None:
    """Raises ValueError where no run with these options can be judged by the baseline, before anything runs."""
    if before.bench != name:
        raise ValueError(f"the baseline is of bench {before.bench}. Fix: a result of {name}")
    here = environment(load_before=0.0, others=0.0).machine
    reasons = [
        *(
            [f"it ran on {before.machine}, and this is {here}"]
            if before.machine != here and not bench.simulated
            else []
        ),
        *([f"it was disturbed: {before.disturbed}"] if before.disturbed else []),
        *options_that_differ(before.config, config),
    ]
    rounds = config.get("rounds", differences.LEAST_ROUNDS)
    if rounds < differences.LEAST_ROUNDS:
        reasons.append(f"rounds is {rounds}, and {differences.LEAST_ROUNDS} are the least that show a spread")
    if reasons:
        raise ValueError(f"the gate cannot judge by this baseline (A): {'; '.join(reasons)}")


def show(result: Result) -> None:
    around = result.environment
    print(
        f"{result.bench}   {result.machine}, others used {100 * around.others:.0f} %   {result.rounds} rounds   "
        f"commit {result.commit}"
    )
    for each in tables(result):
        table("", each.header, each.rows)
    for title, doc in legend(result):
        print(f"{title}: {doc}")
    if result.disturbed:
        print(f"no ratio is shown: {result.disturbed}. Fix: run it alone, with rounds={ROUNDS} or more")
    print(f"plot: {written(RESULTS / f'{result.bench}.png', partial(draw, result))}")


def with_quick(argv: Sequence[str], quick: Mapping[str, str]) -> list[str]:
    """Adds the values of the short form, where it is asked for, that are not given otherwise.

    >>> with_quick(["quick=true", "rounds=5"], {"rounds": "1", "steps": "8"})
    ['steps=8', 'quick=true', 'rounds=5']
    """
    given = dict(word.partition("=")[::2] for word in argv)
    if given.get("quick") != "true":
        return list(argv)
    return [*(f"{name}={value}" for name, value in quick.items() if name not in given), *argv]


def commit() -> str:
    """Returns the commit of these sources, with a + where they are not as committed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def environment(*, load_before: float, others: float) -> Environment:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return Environment(
        cores=len(os.sched_getaffinity(0)),
        cpu=next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""),
        python=platform.python_version(),
        kernel=platform.release(),
        load_before=load_before,
        load_after=os.getloadavg()[0],
        others=round(others, 3),
    )


def _plain(value: Any) -> Any:
    """Returns an option's value as JSON has it; a path within the checkout without the checkout's own."""
    if isinstance(value, Path):
        return (value.relative_to(ROOT) if value.is_relative_to(ROOT) else value).as_posix()
    return list(value) if isinstance(value, tuple) else value


def _is_of_shell(word: str) -> bool:
    return word.partition("=")[0] in ("json", "baseline", "metric", "gate")
