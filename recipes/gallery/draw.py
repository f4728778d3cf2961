"""Draws the pictures of the gallery in recipes/README.md from runs.json, the figures of one run of each recipe.

python recipes/gallery/draw.py                                    # all pictures anew
python recipes/gallery/draw.py run=runs/mixture metrics=reward/arithmetic,reward/chain_sum     # of another run
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from engine import metric_names as metric
from engine.errors import BadInput
from engine.programs.job import run_job

HERE = Path(__file__).resolve().parent
COLOURS = ("#08519c", "#cb181d", "#238b45", "#6a51a3")


@dataclass(frozen=True, kw_only=True)
class Config:
    run: Annotated[Path | None, "folder of a run; none: draw what runs.json holds"] = None
    metrics: Annotated[tuple[str, ...], "what is drawn of it, over the steps"] = (metric.REWARD, metric.EVAL_ACCURACY)
    folder: Annotated[Path, "where runs.json and the pictures are"] = HERE


async def draw(config: Config) -> None:
    """Adds the figures of the run to runs.json, if one is given, and draws all pictures. Raises BadInput."""
    path = config.folder / "runs.json"
    drawn: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if config.run is not None:
        drawn |= figures(config.run, config.metrics)
        lines = [f"{json.dumps(name)}: {json.dumps(content)}" for name, content in sorted(drawn.items())]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name, content in drawn.items():
        plot(config.folder / f"{name}.png", content["series"])


def figures(run: Path, metrics: tuple[str, ...]) -> dict[str, Any]:
    """Returns {recipe's file name: its options, and the metrics as [step, value] pairs}."""
    try:
        made = json.loads((run / "config.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        raise BadInput(f"run={run} is no folder of a run: {error}") from error
    series = {name: [[row["step"], round(row[name], 4)] for row in rows if name in row] for name in metrics}
    if missing := [name for name, values in series.items() if not values]:
        raise BadInput(f"{run} has no metric {', '.join(missing)}. Fix: metrics= of its metrics.jsonl")
    recipe = Path(made["recipe"])
    return {recipe.stem: {"recipe": str(recipe), "options": made["options"], "series": series}}


def plot(path: Path, series: dict[str, list[list[float]]]) -> None:
    """Draws each metric over the steps, as a small PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    canvas = Figure(figsize=(5.2, 1.9), layout="constrained")
    axes = canvas.subplots()
    for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=colour, marker="o", ms=3, label=name)
    axes.set(xlabel="step", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["right", "top"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    canvas.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(run_job(Config, draw, resumes=False))
