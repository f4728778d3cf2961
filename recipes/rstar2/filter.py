"""Filters problems by what a model does with them: samples each some times, and keeps those that can be learnt from.

    python recipes/rstar2/filter.py model=runs/rstar2/stage-2/checkpoint data=train.parquet keep=unsolved
    python recipes/rstar2/filter.py model=models/Qwen3-32B data=raw.jsonl keep=agree k=2 n=16 protocol=none

keep=unsolved drops what all n samples solve (the report's third stage trains on what is not solved 8 of 8).
keep=agree drops what fewer than k of n samples answer as the reference does: where nobody agrees, the reference is
wrong, or the problem too hard. Writes samples.jsonl, a row for each problem as soon as it is sampled, then
filtered.jsonl, the rows of the data that are kept, as they were, and filter.json. The same command resumes a job
that was interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from rich.console import Console

from algo.reward.math_reward import MathReward
from engine.assembly.config import ServingConfig
from engine.assembly.serving import serving
from engine.atomic_files import write_whole
from engine.console.options import flat
from engine.data.prompts import Prompts
from engine.data.tables import open_table
from engine.programs.job import run_job
from engine.rollout.rollout import RolloutConfig
from engine.run.identity import Identity
from engine.run.run_folder import versions
from engine.telemetry.watchdog import exit_process
from recipes.rstar2.parts.sampling.options import (
    ReplicaOptions,
    SandboxOptions,
    check_exists,
    open_data,
)
from recipes.rstar2.parts.sampling.output import fingerprint, open_output, sha256
from recipes.rstar2.parts.sampling.problems import problems_bar, sample_problems
from recipes.rstar2.parts.sampling.protocol import DEADLINE_S, PROTOCOLS, ProtocolName
from recipes.rstar2.parts.sampling.rows import RowFile
from sandbox.require import at_least, none_or, require_fields

SAMPLES = {"unsolved": 8, "agree": 16}  # the report's, of each problem
# Options that change no row: they say where and how fast it is computed, and which rows are kept.
NOT_COMPARED = {
    *("model", "data", "output", "keep", "k", "in_flight"),
    *("replicas", "devices", "tensor_parallel", "sandbox.slots", "replica.kv_blocks", "replica.max_num_seqs"),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[Path, "Hugging Face folder"] = Path("model")
    data: Annotated[Path, "JSONL, parquet or a datasets folder"] = Path("data/rstar2/train.parquet")
    output: Annotated[Path, "folder of the results; the same command goes on there"] = Path("runs/filter")
    keep: Annotated[
        Literal["unsolved", "agree"], "unsolved: not solved n of n; agree: at least k of n agree with the reference"
    ] = "unsolved"
    k: Annotated[int, "samples that must agree, for keep=agree"] = 2
    n: Annotated[int | None, "samples of each problem; none: the report's 8 for unsolved, 16 for agree"] = None
    protocol: Annotated[ProtocolName, "how the model is asked; none: its own template, and a tool named python"] = (
        "report"
    )
    stateful: Annotated[bool, "calls of a rollout share their variables"] = False
    temperature: Annotated[float, "sampling temperature; training has 1"] = 1.0
    response_tokens: Annotated[int, "sampled and tool tokens; stage 2 trains with 12 K"] = 12 * 1024
    max_tokens: Annotated[int | None, "tokens of prompt and response together, in place of response_tokens"] = None
    turns: Annotated[int, "turns of a rollout (T); stage 2 trains with 10"] = 10
    deadline_s: Annotated[float, "wall time of a rollout"] = DEADLINE_S
    in_flight: Annotated[int, "rollouts under way at once"] = 512
    replicas: Annotated[int, "vLLM engines"] = 2
    devices: Annotated[tuple[int, ...], "GPUs, tensor_parallel for each replica; none: the CPU"] = ()
    tensor_parallel: Annotated[int, "GPUs of a replica"] = 1
    seed: Annotated[int, "seed of sampling"] = 0
    dtype: Annotated[Literal["float32", "bfloat16"], "precision of replicas on the CPU; on GPUs bfloat16"] = "float32"
    replica: ReplicaOptions = ReplicaOptions()  # noqa: RUF009  frozen
    sandbox: SandboxOptions = SandboxOptions()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        check_exists("data", self.data)
        require_fields(self, none_or(at_least(1)), "n", "k", "turns", "in_flight")
        if self.keep == "agree" and self.k > self.samples:
            raise ValueError(f"k must be at most n={self.samples}, got {self.k}")
        self.serving()  # the parts' own checks, before anything starts

    @property
    def samples(self) -> int:
        """The number of samples of each problem."""
        return self.n or SAMPLES[self.keep]

    def budget(self) -> RolloutConfig:
        return PROTOCOLS[self.protocol].budget(
            response_tokens=self.response_tokens,
            turns=self.turns,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            deadline_s=self.deadline_s,
        )

    def serving(self) -> ServingConfig:
        budget = self.budget()
        return ServingConfig(
            checkpoint=self.model,
            rollout=budget,
            replica=self.replica.config(self.model, budget.max_tokens, self.devices, self.dtype),
            replicas=self.replicas,
            devices=self.devices,
            tensor_parallel=self.tensor_parallel,
            chat=PROTOCOLS[self.protocol].chat(),
            sandbox=self.sandbox.config(),
            seed=self.seed,
        )

    def identity(self) -> Identity:
        """Returns what decides the rows."""
        values = {**flat(self), "n": self.samples, "weights": fingerprint(self.model), "data_sha256": sha256(self.data)}
        return Identity(values, free=NOT_COMPARED)


def is_kept(config: Config, solved: int) -> bool:
    """Returns whether a problem is kept of which so many samples are right.

    Pure, given the configuration: `keep=unsolved` keeps 7 of 8 and not 8 of 8; `keep=agree k=2` keeps 2 of 16.
    """
    return solved < config.samples if config.keep == "unsolved" else solved >= config.k


async def filter_data(config: Config, console: Console | None = None) -> Path:
    """Samples all problems, writes those that are kept, and returns the path of the file.

    Raises BadInput, or one of `engine.assembly.expected.EXPECTED`.
    """
    console = console or Console()
    started = time.monotonic()
    prompts = open_data(config.data)
    identity = config.identity()
    open_output(config.output, identity)
    with RowFile(config.output / "samples.jsonl") as file:
        failed = await _sample(config, prompts, file, console)
        solved = {row.id: row.solved for row in file.rows()}
    counts: Counter[str] = Counter()
    path = config.output / "filtered.jsonl"
    write_whole(
        path,
        kept_rows(config.data, prompts.name, lambda problem: _verdict(config, solved.get(problem)), counts),
    )
    result = {
        "rows_in": counts.total(),
        **{name: counts[name] for name in ("kept", "solved", "disagree", "failed")},
        "first_error": next(iter(failed.values()), None),
        "filtered_sha256": sha256(path),
        "config": {**identity.values, "keep": config.keep, "k": config.k, "model": config.model},
        "versions": versions(),
        "command": sys.argv,
        "wall_s": round(time.monotonic() - started, 1),
    }
    report = msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=2)
    write_whole(config.output / "filter.json", [report, b"\n"])
    dropped = ", ".join(f"{counts[name]} {name}" for name in ("solved", "disagree", "failed") if counts[name])
    told = f"{counts['kept']} of {counts.total()} problems are kept in {path}" + (f" ({dropped})" if dropped else "")
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    return path


async def _sample(config: Config, prompts: Prompts, file: RowFile, console: Console) -> dict[str, str]:
    """Samples the problems that have no row yet. Returns those that failed, with their errors."""
    total = len(prompts.rows)
    if len(file.done) == total:
        return {}
    console.print(f"starting {config.replicas} vLLM engines and the sandbox", highlight=False, soft_wrap=True)
    async with serving(config.serving()) as served:
        with problems_bar(f"filter {prompts.name}", total, len(file.done), console) as advance:
            return await sample_problems(
                prompts,
                file,
                samples=config.samples,
                rollouts=served.rollouts([PROTOCOLS[config.protocol].tool(served.sandbox, stateful=config.stateful)]),
                reward=MathReward(runner=served.sandbox),
                timeline=served.timeline,
                in_flight=config.in_flight,
                on_done=advance,
            )


def _verdict(config: Config, solved: int | None) -> str:
    """Returns "kept", or why a problem is dropped. solved: None where it could not be sampled."""
    if solved is None:
        return "failed"
    if is_kept(config, solved):
        return "kept"
    return "solved" if config.keep == "unsolved" else "disagree"


def kept_rows(data: Path, name: str, verdict: Callable[[str], str], counts: Counter[str]) -> Iterator[bytes]:
    """Yields the rows of the data that are kept, as lines of JSON.

    name: the first part of all ids. counts: is filled with the number of problems of each verdict.
    """
    table = open_table(data)
    for number in range(len(table)):
        fate = verdict(f"{name}-{number}")
        counts[fate] += 1
        if fate == "kept":
            yield json.dumps(table.row(number), default=str).encode() + b"\n"


if __name__ == "__main__":
    exit_process(run_job(Config, filter_data))
