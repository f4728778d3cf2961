"""Draws problems of the tiny task and drops those that an agent always solves, as before rStar2-Agent's last stage.

    python recipes/tiny/unsolved.py model=runs/quickstart/checkpoint
    python recipes/quickstart.py model=runs/quickstart/checkpoint data=runs/unsolved/unsolved.jsonl

Writes all.jsonl, what was drawn, and unsolved.jsonl, what is not solved in all samples, into the folder runs/name, with
samples.jsonl, a row for each problem, and summary.json. For data of your own there is rstar2/filter.py.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console

from algo.reward.math_reward import MathReward
from engine.assembly.config import ServingConfig
from engine.assembly.serving import serving
from engine.atomic_files import write_whole
from engine.console.options import flat
from engine.errors import BadInput
from engine.programs.job import run_job
from engine.replica.config import ReplicaConfig
from engine.rollout.rollout import RolloutConfig
from engine.run.identity import Identity
from engine.run.run_folder import versions
from engine.telemetry.watchdog import exit_process
from engine.types import Prompt
from recipes.rstar2.parts.sampling.output import open_output
from recipes.rstar2.parts.sampling.problems import problems_bar, sample_problems
from recipes.rstar2.parts.sampling.rows import RowFile
from recipes.tiny.task import LIMITS, MAX_TOKENS, MAX_TOOL_CALLS, SHIPPED, prompts, python_tool
from sandbox import TIERS, SandboxConfig
from sandbox.require import at_least, require_fields

POOL_SEED = 1_000_000  # is added to the seed, so that no run of a small seed trains on the problems drawn here
IN_FLIGHT = 256  # rollouts under way at once, as in a step of the quick start
FREE = ("runs", "name", "replicas")


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[Path, "the agent's checkpoint, a Hugging Face folder"] = SHIPPED
    problems: Annotated[int, "problems that are drawn"] = 640
    samples: Annotated[int, "samples of each problem; what is solved in all of them is dropped"] = 8
    replicas: Annotated[int, "vLLM engines"] = 2
    seed: Annotated[int, "seed of the problems and of sampling"] = 0
    runs: Annotated[Path, "where the folder is made"] = Path("runs")
    name: Annotated[str, "the folder's name"] = "unsolved"

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "problems", "samples", "replicas")
        self.serving()  # the parts' own checks, before anything starts

    def serving(self) -> ServingConfig:
        budget = RolloutConfig(max_tokens=MAX_TOKENS, max_turns=MAX_TOOL_CALLS + 1)
        return ServingConfig(
            checkpoint=self.model,
            rollout=budget,
            replica=ReplicaConfig(checkpoint=str(self.model), max_model_len=MAX_TOKENS + 32, kv_blocks=2048),
            replicas=self.replicas,
            sandbox=SandboxConfig(tiers=TIERS[:1], limits=LIMITS, slots=8, start_s=60),
            seed=self.seed,
        )


async def draw(config: Config) -> None:
    """Samples the problems that have no row yet and writes the files. Raises BadInput where none is left unsolved."""
    started = time.monotonic()
    folder, console = config.runs / config.name, Console()
    open_output(folder, Identity(flat(config), free=FREE))
    drawn = list(islice(prompts("train", POOL_SEED + config.seed), config.problems))
    with RowFile(folder / "samples.jsonl") as file:
        failed = await _sample(config, drawn, file, console)
        solved = {row.id for row in file.rows() if row.solved == row.samples}
        sampled = set(file.done)
    unsolved = [prompt for prompt in drawn if prompt.id in sampled - solved]
    if not unsolved:
        raise BadInput(f"all of the {len(solved)} problems are solved in {config.samples} samples. Fix: more problems=")
    for name, kept in (("all", drawn), ("unsolved", unsolved)):
        write_whole(folder / f"{name}.jsonl", map(_line, kept))
    summary = {
        "problems": len(drawn),
        "solved": len(solved),
        "unsolved": len(unsolved),
        "failed": len(failed),
        "versions": versions(),
        "wall_s": round(time.monotonic() - started, 1),
    }
    write_whole(folder / "summary.json", [msgspec.json.format(msgspec.json.encode(summary), indent=2), b"\n"])
    console.print(f"{len(unsolved)} of {len(drawn)} problems are unsolved: {folder}/unsolved.jsonl", highlight=False)


async def _sample(config: Config, drawn: list[Prompt], file: RowFile, console: Console) -> dict[str, str]:
    """Samples the problems that have no row yet. Returns those that failed, with their errors."""
    async with serving(config.serving()) as served:
        with problems_bar("sampling", len(drawn), len(file.done), console) as advance:
            return await sample_problems(
                drawn,
                file,
                samples=config.samples,
                rollouts=served.rollouts([python_tool(served.sandbox)]),
                reward=MathReward(integers_only=True),
                timeline=served.timeline,
                in_flight=IN_FLIGHT,
                on_done=advance,
            )


def _line(prompt: Prompt) -> bytes:
    return json.dumps({"question": prompt.messages[0]["content"], "answer": prompt.answer}).encode() + b"\n"


if __name__ == "__main__":
    exit_process(run_job(Config, draw))
