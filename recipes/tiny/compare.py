"""Compares algorithms on the quick start's task over several seeds: accuracy and tool errors.

    python recipes/tiny/compare.py seeds=5    # GRPO-RoC against GRPO: ten runs of the quick start, one after another
    python recipes/tiny/compare.py algorithms=roc,grpo,random

Promises
- Runs of one seed see the same problems in the same order; what is compared are held-out figures, paired by seed.
- An interval is Student's over the seeds, at 95 %: it says how another seed would do, not how other problems would.
- A finished run in the folder is used again and an unfinished one is gone on with, so an interrupted comparison is
  continued by the same command. A run that was made with other options, or that another process still writes, is
  refused, never mixed in.

Writes compare.md (what it prints), compare.json and compare.png into the folder, beside the runs and their logs.

Shape legend: S seeds.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Protocol

from algo.eval_stats import Interval, mean_of_runs
from engine.console.options import parse
from engine.metric_names import EVAL_ACCURACY, EVAL_TOOL_ERROR_SHARE_CORRECT
from engine.run.identity import Identity, describe
from recipes.tiny.task import METHODS
from sandbox.require import at_least, require

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.py"
METRICS = {
    EVAL_ACCURACY: "held-out accuracy",
    EVAL_TOOL_ERROR_SHARE_CORRECT: "tool errors in correct trajectories",
}
STOP_S = 30.0  # a quick start that is told to end stops its processes and writes its files first
COLOURS = ("#08519c", "#cb181d", "#238b45")

Curves = dict[str, dict[int, list[float]]]  # algorithm -> step -> values_S


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: Annotated[int, "runs of each algorithm: seeds 0, 1, ..."] = 5
    algorithms: Annotated[tuple[Literal["roc", "grpo", "random"], ...], "the first is compared with each other one"] = (
        "roc",
        "grpo",
    )
    steps: Annotated[int, "steps of each run"] = 40
    eval_every: Annotated[int, "steps between evaluations"] = 8
    eval_problems: Annotated[int, "held-out problems, one sample each"] = 512
    folder: Annotated[Path, "where runs and results are written"] = Path("runs/tiny_compare")

    def __post_init__(self) -> None:
        require("seeds", self.seeds, at_least(2))
        if len(set(self.algorithms)) != len(self.algorithms) or len(self.algorithms) < 2:
            raise ValueError(f"algorithms must be two or more different ones, got {','.join(self.algorithms)!r}")

    def options(self, algorithm: str, seed: int) -> dict[str, Any]:
        """Returns the fields of the quick start that make this run."""
        return {
            "algorithm": algorithm,
            "seed": seed,
            "steps": self.steps,
            "eval_every": self.eval_every,
            "eval_problems": self.eval_problems,
        }


def main(config: Config) -> None:
    run_all(config, quickstart, print)
    result = compare(config)
    text = markdown(config, result)
    (config.folder / "compare.md").write_text(text + "\n")
    (config.folder / "compare.json").write_text(json.dumps(as_json(config, result), indent=2) + "\n")
    plot(config.folder / "compare.png", result)
    print(f"\n{text}\n\nwritten: {config.folder}/compare.md, compare.json, compare.png")


class Runs(Protocol):
    """Runs of several methods and seeds, in one folder."""

    @property
    def seeds(self) -> int: ...

    @property
    def algorithms(self) -> Sequence[str]: ...

    @property
    def folder(self) -> Path: ...

    def options(self, algorithm: str, seed: int) -> dict[str, Any]:
        """Returns the options that make a run."""
        ...


def run_all(config: Runs, launch: Callable[[Path, dict[str, Any]], None], say: Callable[[str], None]) -> None:
    """Makes the missing runs, seed by seed, so that an early end leaves pairs. launch(folder, options) makes one."""
    todo = [(algorithm, seed) for seed in range(config.seeds) for algorithm in config.algorithms]
    seconds: list[float] = []
    for number, (algorithm, seed) in enumerate(todo, 1):
        folder = config.folder / f"{algorithm}-{seed}"
        head = f"[{number}/{len(todo)}] {METHODS[algorithm]}, seed {seed}:"
        if finished(folder, config.options(algorithm, seed)):
            say(f"{head} finished before, {_end(folder)}")
            continue
        if not (folder / "checkpoints").is_dir():  # nothing to resume
            shutil.rmtree(folder, ignore_errors=True)
        remaining = f", about {fmean(seconds) * (len(todo) - number + 1) / 60:.0f} min to go" if seconds else ""
        say(f"{head} running{remaining}")
        started = time.monotonic()
        launch(folder, config.options(algorithm, seed))
        if not finished(folder, config.options(algorithm, seed)):
            raise ValueError(f"{folder} has no summary.json after its run; remove it to begin it again")
        seconds.append(time.monotonic() - started)
        say(f"{head} {seconds[-1]:.0f} s, {_end(folder)}")


def finished(folder: Path, options: dict[str, Any]) -> bool:
    """Returns whether the folder holds the whole run.

    Raises ValueError when it holds another one, or one that is under way.
    """
    if (folder / "config.json").is_file():
        made = json.loads((folder / "config.json").read_text())
        if differences := Identity(options).differences(made):
            raise ValueError(f"{folder} differs in {describe(differences)}. Fix: give another folder=")
    if (folder / "summary.json").is_file():
        return True
    if _under_way(folder):  # by another comparison, or one that was killed
        raise ValueError(f"{folder} is written by another process. Fix: wait for its end, or end it")
    return False


def _under_way(folder: Path) -> bool:
    """Returns whether a quick start holds its folder's lock."""
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _end(folder: Path) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    accuracy, errors = summary["accuracy_final"], summary["tool_error_share_final"]
    return f"accuracy {accuracy:.3f}, tool errors {errors:.3f}"


def quickstart(folder: Path, options: dict[str, Any]) -> None:
    """Makes one run of the quick start (`in_process`)."""
    in_process(QUICKSTART, folder, options)


def in_process(program: Path, folder: Path, options: dict[str, Any]) -> None:
    """Makes one run in a process of its own, which prints to <folder>.log. Ends this program when it fails."""
    arguments = [f"{name}={value}" for name, value in options.items()]
    command = [sys.executable, str(program), f"runs={folder.parent}", f"name={folder.name}", *arguments]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            code = process.wait()
        finally:  # also on Ctrl-C, which the run gets too, and on SIGTERM, which it does not
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
    if code:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        sys.exit(f"{folder} failed (exit code {code}): {last}\nThe whole output: {log}. The same command goes on here.")


# What the runs say


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """curves[metric][algorithm][step] are the values of all seeds; seconds[algorithm]: mean wall time of a run."""

    curves: dict[str, Curves]
    seconds: dict[str, float]
    versions: dict[str, str]


def compare(config: Config) -> Comparison:
    """Reads the finished runs. Raises ValueError when one lacks an evaluation that another one has."""
    curves: dict[str, Curves] = {metric: {} for metric in METRICS}
    seconds: dict[str, float] = {}
    for name in config.algorithms:
        folders = [config.folder / f"{name}-{seed}" for seed in range(config.seeds)]
        rows = [row for folder in folders for row in rows_of_run(folder)]
        for metric in METRICS:
            curves[metric][name] = _by_step(rows, metric)
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        seconds[name] = fmean(summary["total_wall_s"] for summary in summaries)
    for metric, by_name in curves.items():
        steps = {tuple(sorted(curve)) for curve in by_name.values()}
        counts = {len(values_S) for curve in by_name.values() for values_S in curve.values()}
        if len(steps) != 1 or counts != {config.seeds}:
            raise ValueError(f"{config.folder}: the runs do not have the same evaluations of {metric}")
    return Comparison(curves=curves, seconds=seconds, versions=summaries[0]["versions"])


def rows_of_run(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _by_step(rows: Sequence[dict[str, Any]], metric: str) -> dict[int, list[float]]:
    """Returns the values of a metric by step, in the order of the rows."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if metric in row:
            values.setdefault(int(row["step"]), []).append(row[metric])
    return values


def difference(ours_S: Sequence[float], theirs_S: Sequence[float]) -> Interval:
    """Returns the mean of ours - theirs, paired by seed."""
    return mean_of_runs([ours - theirs for ours, theirs in zip(ours_S, theirs_S, strict=True)])


def rows_of(curves: Curves) -> list[dict[str, Any]]:
    """Yields a row per step: an interval for each algorithm, and for the first one's difference to each other one."""
    first, *others = curves
    return [
        {
            "step": step,
            **{name: mean_of_runs(curve[step]) for name, curve in curves.items()},
            **{f"{first} - {other}": difference(curves[first][step], curves[other][step]) for other in others},
        }
        for step in sorted(curves[first])
    ]


def markdown(config: Config, result: Comparison) -> str:
    """Returns a table per metric, and what made them."""
    blocks = []
    for metric, title in METRICS.items():
        rows = rows_of(result.curves[metric])
        names = [name for name in rows[0] if name != "step"]
        heads = [" - ".join(METHODS[part] for part in name.split(" - ")) for name in names]
        lines = [f"**{title[0].upper()}{title[1:]}**", "", f"| step | {' | '.join(heads)} |"]
        lines.append("|---" * (1 + len(heads)) + "|")
        lines += [
            f"| {row['step']} | {' | '.join(_cell(row[name], ' - ' in name) for name in names)} |" for row in rows
        ]
        blocks.append("\n".join(lines))
    wall = ", ".join(f"{METHODS[name]} {seconds:.0f} s" for name, seconds in result.seconds.items())
    blocks.append(
        f"Mean over {config.seeds} seeds [95 % interval, Student's t over the seeds; differences paired by seed], "
        f"{config.eval_problems} held-out problems, one sample each. A run took: {wall}."
    )
    return "\n\n".join(blocks)


def _cell(interval: Interval, signed: bool) -> str:
    sign = "+" if signed else ""
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def as_json(config: Config, result: Comparison) -> dict[str, Any]:
    """Returns the table with every value of every seed."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    table = {
        metric: [
            {name: asdict(cell) if isinstance(cell, Interval) else cell for name, cell in row.items()}
            for row in rows_of(curves)
        ]
        for metric, curves in result.curves.items()
    }
    return {
        "config": values,
        "table": table,
        "seeds": result.curves,
        "seconds": result.seconds,
        "versions": result.versions,
    }


def plot(path: Path, result: Comparison) -> None:
    """Draws both metrics over the steps, with the band of the interval, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        for colour, (name, curve) in zip(COLOURS, result.curves[metric].items(), strict=False):
            steps = sorted(curve)
            intervals = [mean_of_runs(curve[step]) for step in steps]
            low, high = [each.low for each in intervals], [each.high for each in intervals]
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
            means = [each.mean for each in intervals]
            axes.plot(steps, means, color=colour, marker="o", ms=4, label=METHODS[name], clip_on=False)
        top = min(1.02, axes.get_ylim()[1])
        axes.set(xlabel="step", title=title, xlim=(min(steps), max(steps)), xticks=steps, ylim=(0, top))
        axes.grid(alpha=0.25)
        axes.spines[["right", "top"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(f"Mean and 95 % interval over {len(curve[0])} seeds")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main(parse(Config, sys.argv[1:], description=__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"tiny_compare: {error}")
    except KeyboardInterrupt:
        print("tiny_compare: interrupted; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
