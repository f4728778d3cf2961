"""Compares algorithms on the quick start's task over several seeds: accuracy and tool errors.

    python recipes/tiny/compare.py seeds=5    # GRPO-RoC against GRPO: ten runs of the quick start, one after another
    python recipes/tiny/compare.py algorithms=roc,grpo,random

Promises
- Runs of one seed see the same problems in the same order; what is compared are held-out figures, paired by seed.
- An interrupted comparison is continued by the same command, and nothing is mixed in (arms.py).

Writes compare.md (what it prints), compare.json and compare.png into the folder, beside the runs and their logs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from engine.console.options import parse
from recipes.tiny.arms import Arm, Runs, in_a_process, run_as_program
from recipes.tiny.curves import Comparison, as_json, compare, markdown, plot
from recipes.tiny.task import METHODS
from sandbox.require import at_least, require


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

    @property
    def runs(self) -> Runs:
        """The runs of the quick start that are compared: an arm for each algorithm."""
        shared = {"steps": self.steps, "eval_every": self.eval_every, "eval_problems": self.eval_problems}
        arms: dict[str, Arm] = {
            name: Arm(title=METHODS[name], options={"algorithm": name, **shared}) for name in self.algorithms
        }
        return Runs(folder=self.folder, arms=arms, seeds=range(self.seeds))


def main(config: Config) -> None:
    config.runs.make(in_a_process, print)
    result = compare(config.runs, config.algorithms)
    text = page(config, result)
    (config.folder / "compare.md").write_text(text + "\n")
    values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    content: dict[str, Any] = {"config": values, **as_json(result)}
    (config.folder / "compare.json").write_text(json.dumps(content, indent=2) + "\n")
    plot(config.folder / "compare.png", result)
    print(f"\n{text}\n\nwritten: {config.folder}/compare.md, compare.json, compare.png")


def page(config: Config, result: Comparison) -> str:
    """Returns the tables, and what made them."""
    return (
        f"{markdown(result)}\n\n"
        f"Mean over {config.seeds} seeds [95 % interval, Student's t over the seeds; differences paired by seed], "
        f"{config.eval_problems} held-out problems, one sample each."
    )


if __name__ == "__main__":
    run_as_program(lambda: main(parse(Config, sys.argv[1:], description=__doc__)), "tiny_compare")
