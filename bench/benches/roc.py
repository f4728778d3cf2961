"""What does GRPO-RoC change against plain GRPO, on the quick start's task and the same prompts?

    rocstar bench roc [rounds=3] [steps=8] [field=value of the quick start ...]

A round is a seed, with a run of each. Plain GRPO has half the rollouts. The last evaluation of a run counts: 512
held-out problems, one sample each at temperature 1. `recipes/tiny/compare.py` draws the whole curves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bench.benches.quickstart import run_once
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import count, share
from bench.measuring.terminal import say
from engine.console.options import Rest
from sandbox.require import at_least, require_fields

ALGORITHMS = ("roc", "grpo")


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "seeds"] = 3
    seed: Annotated[int, "the first seed"] = 0
    steps: Annotated[int, "steps of a run"] = 8
    fields: Annotated[tuple[str, ...], Rest("options of the quick start")] = ()

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "steps")


METRICS = {
    "accuracy": count("accuracy", "held out, after the last step", form=".3f"),
    "tool_errors": share("tool errors", "in correct held-out trajectories, after the last step"),
}


def measure(options: Options, keep: Keep) -> None:
    for number in range(options.rounds):
        seed = options.seed + number
        figures = {}
        for algorithm in ALGORITHMS:
            say(f"round {number + 1} of {options.rounds}: {options.steps} steps of {algorithm} with seed {seed}")
            fields = [f"algorithm={algorithm}", f"steps={options.steps}", f"seed={seed}", f"eval_every={options.steps}"]
            figures[algorithm] = run_once([*fields, *options.fields]).evaluation(options.steps)
        keep(figures)


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("accuracy", "tool_errors"),
    quick={"rounds": "1", "steps": "4"},
)
