"""Measures what distillation needs until the student is nearly its teacher, beside what made the teacher.

    python recipes/tiny/distilled.py seeds=5    # five quick starts, and a distillation of each into the cold start

Promises
- The teacher of a seed is the agent that the quick start (GRPO-RoC) has trained with that seed; both runs begin with
  the same agent and see the same problems.
- What counts is the first evaluation that reaches `share` of the teacher's held-out accuracy: the tokens sampled for
  training until then, and the seconds of training. Evaluations take no part in either, the teacher's own work does.
- A run that never reaches it has no figure, and neither has the median of its method.
- Finished runs are used again, and an unfinished one is resumed (recipes/tiny/arms.py).

Writes distilled.md (what it prints), distilled.json and distilled.png into the folder, beside the runs and their logs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from engine.console.options import parse
from engine.metric_names import EVAL_ACCURACY, TIME_TRAIN_TOTAL_S, TOKENS_GENERATED
from recipes.tiny.arms import QUICKSTART, Arm, Runs, in_a_process, run_as_program
from recipes.tiny.curves import COLOURS, rows_of
from recipes.tiny.task import METHODS
from sandbox.require import at_least, require, require_fields, within

DISTILL = QUICKSTART.parent / "distill.py"


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: Annotated[int, "pairs of runs: seeds 0, 1, ..."] = 5
    steps: Annotated[int, "steps of a quick start, which makes a teacher"] = 40
    distill_steps: Annotated[int, "steps of a distillation"] = 30
    eval_every: Annotated[int, "steps between evaluations"] = 2
    eval_problems: Annotated[int, "held-out problems, one sample each"] = 512
    share: Annotated[float, "of the teacher's accuracy, which is to be reached"] = 0.95
    folder: Annotated[Path, "where runs and results are written"] = Path("runs/tiny_distilled")

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "seeds", "steps", "distill_steps", "eval_every", "eval_problems")
        require("share", self.share, within("(0, 1]"))

    @property
    def runs(self) -> Runs:
        """Returns the runs of the teacher's method, then the student's."""
        evaluated = {"eval_every": self.eval_every, "eval_problems": self.eval_problems}
        teacher = {"algorithm": "roc", "steps": self.steps, **evaluated}
        student = {"teacher": "{roc}/checkpoint", "steps": self.distill_steps, **evaluated}
        arms = {
            "roc": Arm(title=METHODS["roc"], options=teacher),
            "distill": Arm(title=METHODS["distill"], options=student, program=DISTILL),
        }
        return Runs(folder=self.folder, arms=arms, seeds=range(self.seeds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """The first evaluation of a run that was good enough: after so many steps, tokens and seconds."""

    step: int
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The runs of one seed. curves: for each method (tokens so far, accuracy) at each evaluation."""

    seed: int
    teacher: float
    student: float
    reached: dict[str, Reached | None]
    curves: dict[str, list[tuple[int, float]]]


def main(config: Config) -> None:
    config.runs.make(in_a_process, print)
    pairs = [pair(config, seed) for seed in range(config.seeds)]
    text = markdown(config, pairs)
    (config.folder / "distilled.md").write_text(text + "\n")
    (config.folder / "distilled.json").write_text(json.dumps(as_json(config, pairs), indent=2) + "\n")
    plot(config, config.folder / "distilled.png", pairs)
    print(f"\n{text}\n\nwritten: {config.folder}/distilled.md, distilled.json, distilled.png")


def pair(config: Config, seed: int) -> Pair:
    """Reads the two runs of a seed. Raises ValueError for one without an evaluation."""
    runs = config.runs
    rows = {name: rows_of(runs, name, seed) for name in runs.arms}
    curves = {name: evaluated(of_run) for name, of_run in rows.items()}
    for name, curve in curves.items():
        if not curve:
            raise ValueError(f"{runs.path(name, seed)} has no evaluation; remove it to make the run again")
    teacher = curves["roc"][-1][1]
    return Pair(
        seed=seed,
        teacher=teacher,
        student=curves["distill"][-1][1],
        reached={name: reached(of_run, config.share * teacher) for name, of_run in rows.items()},
        curves=curves,
    )


def evaluated(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Returns (tokens sampled for training so far, held-out accuracy) of each evaluation of a run.

    >>> evaluated([{"eval/accuracy": 0.3}, {"tokens/generated": 90}, {"tokens/generated": 60, "eval/accuracy": 0.5}])
    [(0, 0.3), (150, 0.5)]
    """
    tokens, curve = 0, []
    for row in rows:
        tokens += int(row.get(TOKENS_GENERATED, 0))
        if EVAL_ACCURACY in row:
            curve.append((tokens, row[EVAL_ACCURACY]))
    return curve


def reached(rows: Sequence[dict[str, Any]], accuracy: float) -> Reached | None:
    """Returns the first evaluation with this held-out accuracy or more; None if there is none."""
    tokens = 0
    for row in rows:
        tokens += int(row.get(TOKENS_GENERATED, 0))
        if row.get(EVAL_ACCURACY, -1.0) >= accuracy:
            return Reached(step=int(row["step"]), tokens=tokens, seconds=row.get(TIME_TRAIN_TOTAL_S, 0.0))
    return None


def middle(pairs: Sequence[Pair], name: str, field: str) -> float | None:
    """Returns the median of a figure over the seeds; None if a run has none."""
    figures = [it.reached[name] for it in pairs]
    return None if None in figures else median(float(getattr(each, field)) for each in figures)


def markdown(config: Config, pairs: Sequence[Pair]) -> str:
    """Returns the table, and what made it."""
    first, second = (arm.title for arm in config.runs.arms.values())
    lines = [
        f"| seed | teacher | student | {first}: steps, tokens, s | {second}: steps, tokens, s | ratio of tokens |",
        "|---" * 6 + "|",
    ]
    for it in pairs:
        cells = [_cell(it.reached[name]) for name in config.runs.arms]
        lines.append(f"| {it.seed} | {it.teacher:.3f} | {it.student:.3f} | {' | '.join(cells)} | {_ratio([it])} |")
    lines.append(
        f"\nUntil {config.share:g} of the teacher's held-out accuracy ({config.eval_problems} problems, evaluated "
        f"every {config.eval_every} steps). Median over {len(pairs)} seeds: {first} samples {_ratio(pairs)} times as "
        "many tokens."
    )
    return "\n".join(lines)


def _cell(first: Reached | None) -> str:
    return "not reached" if first is None else f"{first.step}, {first.tokens:,}, {first.seconds:.1f}"


def _ratio(pairs: Sequence[Pair]) -> str:
    ours, theirs = middle(pairs, "distill", "tokens"), middle(pairs, "roc", "tokens")
    return "none" if not ours or theirs is None else f"{theirs / ours:.1f}"


def as_json(config: Config, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Returns every figure of every seed, the medians, and the versions of what made them."""
    summary = json.loads((config.runs.path("distill", 0) / "summary.json").read_text())
    return {
        "config": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()},
        "pairs": [asdict(it) for it in pairs],
        "median": {
            name: {field: middle(pairs, name, field) for field in ("step", "tokens", "seconds")}
            for name in config.runs.arms
        },
        "versions": summary["versions"],
    }


def plot(config: Config, path: Path, pairs: Sequence[Pair]) -> None:
    """Draws the accuracy of each run over the tokens that were sampled for its training, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    for colour, name in zip(COLOURS, config.runs.arms, strict=False):
        for at, it in enumerate(pairs):
            tokens, accuracies = zip(*it.curves[name][1:], strict=True)  # the first one has sampled no token
            axes.plot(tokens, accuracies, color=colour, lw=1.2, label=METHODS[name] if at == 0 else None)
    level = median(it.teacher for it in pairs)
    axes.axhline(level, color="0.4", lw=0.8, ls="--", label="teachers (median)")
    axes.set(xscale="log", xlabel="tokens sampled for training", ylabel="held-out accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.spines[["right", "top"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    run_as_program(lambda: main(parse(Config, sys.argv[1:], description=__doc__)), "tiny_distilled")
