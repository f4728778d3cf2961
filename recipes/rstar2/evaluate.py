"""Evaluates a checkpoint on sets of problems, without a trainer: avg@k, pass@k, lengths and tool use of each set.

    python recipes/rstar2/evaluate.py model=runs/rstar2/stage-3/checkpoint sets=aime24.parquet,math500.jsonl
    python recipes/rstar2/evaluate.py url=http://localhost:8000 model=NAME sets=aime24.parquet        any server

`protocol` decides how the model is asked, and by default with how many samples and which budgets: the report's
evaluation has 16 samples at temperature 0.6, 30 K tokens and 30 turns; the release's is greedy with 5 turns. Writes
evaluation.json and the rows of each set into `output`. The same command resumes an evaluation that was
interrupted, and shows one that is complete.

With `url` an OpenAI-compatible server has the model, and Python runs here; with `server_tools` the server runs it too
(`rocstar gateway CHECKPOINT tools=true`). The server's key is taken from the environment (OPENAI_API_KEY).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from algo.eval_stats import avg_at_k, pass_at_k
from algo.reward.math_reward import MathReward
from engine.assembly.config import ServingConfig
from engine.assembly.serving import serving
from engine.atomic_files import write_whole
from engine.console.options import flat
from engine.console.shown import shown
from engine.errors import BadInput
from engine.programs.job import run_job
from engine.rollout.rollout import RolloutConfig
from engine.run.identity import Identity
from engine.run.run_folder import versions
from engine.telemetry.timeline import Timeline
from engine.telemetry.watchdog import exit_process
from engine.types import Prompt, StopReason
from recipes.rstar2.parts.sampling.endpoint import EndpointFailed, OnEndpoint, check_url, connect, model_of
from recipes.rstar2.parts.sampling.options import (
    ReplicaOptions,
    SandboxOptions,
    check_exists,
    named_sets,
)
from recipes.rstar2.parts.sampling.output import fingerprint, open_output, sha256
from recipes.rstar2.parts.sampling.problems import Samples, problems_bar, sample_problems
from recipes.rstar2.parts.sampling.protocol import DEADLINE_S, PROTOCOLS, ProtocolName
from recipes.rstar2.parts.sampling.remote import RemoteRollouts, schemas
from recipes.rstar2.parts.sampling.rows import Row, RowFile
from sandbox import Sandbox
from sandbox.require import at_least, none_or, require_fields

# Options that change no figure: they say where and how fast it is computed.
NOT_COMPARED = {
    *("model", "url", "server_tools", "sets", "problems", "output", "in_flight"),
    *("replicas", "devices", "tensor_parallel", "sandbox.slots", "replica.kv_blocks", "replica.max_num_seqs"),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[Path, "Hugging Face folder; with url: the server's name for the model"] = Path("model")
    url: Annotated[str, "address of an OpenAI-compatible server that has the model; none: it is served here"] = ""
    server_tools: Annotated[bool, "the server behind url runs the calls, within its own budgets"] = False
    sets: Annotated[tuple[Path, ...], "JSONL, parquet or datasets folders, named by their files"]
    output: Annotated[Path, "folder of the results; the same command goes on there"] = Path("runs/evaluation")
    protocol: Annotated[ProtocolName, "how the model is asked; none: its own template, and a tool named python"] = (
        "report"
    )
    stateful: Annotated[bool, "calls of a rollout share their variables"] = False
    samples: Annotated[int | None, "samples of each problem; none: the protocol's"] = None
    temperature: Annotated[float | None, "0 is greedy; none: the protocol's"] = None
    max_tokens: Annotated[int | None, "tokens of prompt and response together; none: the protocol's"] = None
    turns: Annotated[int | None, "turns of a rollout (T); none: the protocol's"] = None
    problems: Annotated[int | None, "problems of each set, the first ones; none: all"] = None
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
        if not self.sets:
            raise ValueError("sets: none given. Fix: sets=aime24.parquet,math500.jsonl")
        check_exists("sets", *self.sets)
        require_fields(self, none_or(at_least(1)), "samples", "turns", "problems", "in_flight")
        if self.server_tools and not self.url:
            raise ValueError("server_tools: true without a server. Fix: give url=, or leave it out")
        if self.url:
            check_url(self.url)
            self.budget()
            self.sandbox.config()
        else:
            self.serving()  # the parts' own checks, before anything starts

    @property
    def k(self) -> int:
        """The number of samples of each problem."""
        return self.samples or PROTOCOLS[self.protocol].eval_samples

    def budget(self) -> RolloutConfig:
        return PROTOCOLS[self.protocol].eval_budget(
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

    def identity(self, data: Mapping[str, str]) -> Identity:
        """Returns what decides the figures. data: the hash of each set."""
        budget = self.budget()
        effective = {
            "samples": self.k,
            "temperature": budget.temperature,
            "max_tokens": budget.max_tokens,
            "turns": budget.max_turns,
        }
        given = Identity({**flat(self), **effective}, free=NOT_COMPARED)
        return Identity({**given.values, **self._of_model(), "data": data})

    def _of_model(self) -> dict[str, Any]:
        """Returns what tells this model from others: its weights, or the server's address and name for it."""
        if self.url:
            return {"url": self.url, "served_model": str(self.model), "server_tools": self.server_tools}
        return {"weights": fingerprint(self.model)}


async def evaluate(config: Config, console: Console | None = None) -> dict[str, Any]:
    """Samples all sets, writes evaluation.json, shows a table, and returns the figures of each set.

    Raises BadInput, EndpointFailed, or one of `engine.assembly.expected.EXPECTED`.
    """
    console = console or Console()
    started = time.monotonic()
    sets = named_sets(config.sets, config.problems)
    hashes = {name: sha256(path) for name, path in zip(sets, config.sets, strict=True)}
    identity = config.identity(hashes)
    if config.url and not config.output.exists():  # a server that is not there leaves no folder
        async with connect(config.url) as client:
            await model_of(client, str(config.model))
    open_output(config.output, identity)
    failed = await _sample(config, sets, console)
    figures = {}
    for name, prompts in sets.items():
        first_error = next(iter(failed[name].values()), None)
        rows = _rows(config.output, name, prompts)
        if not rows:
            raise BadInput(f"{name}: no problem could be sampled; the first error: {first_error}")
        figures[name] = figures_of(rows) | {"problems_failed": len(failed[name]), "first_error": first_error}
    result = {
        "model": str(config.model),
        "sets": figures,
        "config": {**identity.values, "model": config.model, "sets": config.sets},
        "versions": versions(),
        "command": sys.argv,
        "wall_s": round(time.monotonic() - started, 1),
    }
    path = config.output / "evaluation.json"
    write_whole(path, [msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=2), b"\n"])
    console.print(table_of(figures, f"{config.model}, protocol={config.protocol}"))
    console.print(f"  {path}", highlight=False, soft_wrap=True)
    return result


async def _sample(config: Config, sets: Mapping[str, Sequence[Prompt]], console: Console) -> dict[str, dict[str, str]]:
    """Samples the problems that have no row yet. Returns for each set those that failed, with their errors."""
    failed: dict[str, dict[str, str]] = {name: {} for name in sets}
    if all(len(_rows(config.output, name, prompts)) == len(prompts) for name, prompts in sets.items()):
        return failed
    async with _sampler(config, console) as sampler:
        reward = MathReward(runner=sampler.sandbox)
        for name, prompts in sets.items():
            with (
                RowFile(rows_path(config.output, name)) as file,
                problems_bar(name, len(prompts), _done(file, prompts), console) as advance,
            ):
                failed[name] = await sample_problems(
                    prompts,
                    file,
                    samples=config.k,
                    rollouts=sampler.rollouts,
                    reward=reward,
                    timeline=sampler.timeline,
                    in_flight=config.in_flight,
                    on_done=advance,
                )
    return failed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sampler:
    rollouts: Samples
    sandbox: Sandbox
    timeline: Timeline


@asynccontextmanager
async def _sampler(config: Config, console: Console) -> AsyncIterator[_Sampler]:
    """Starts the model here, or connects to its server, with a sandbox for its calls and for grading."""
    if config.url:
        async with _remote(config) as sampler:
            yield sampler
        return
    console.print(f"starting {config.replicas} vLLM engines and the sandbox", highlight=False, soft_wrap=True)
    async with serving(config.serving()) as served:
        rollouts = served.rollouts([PROTOCOLS[config.protocol].tool(served.sandbox, stateful=config.stateful)])
        yield _Sampler(rollouts=rollouts, sandbox=served.sandbox, timeline=served.timeline)


@asynccontextmanager
async def _remote(config: Config) -> AsyncIterator[_Sampler]:
    """Connects to the server. Raises EndpointFailed where it does not answer or has no such model."""
    budget, timeline = config.budget(), Timeline()
    async with connect(config.url) as client:
        model = await model_of(client, str(config.model))
        async with Sandbox(config.sandbox.config()) as sandbox:
            tool = None if config.server_tools else PROTOCOLS[config.protocol].tool(sandbox, stateful=config.stateful)
            speaker = partial(
                OnEndpoint,
                client=client.with_options(timeout=config.deadline_s),
                model=model,
                tools=schemas(tool),
                temperature=budget.temperature,
                max_tokens=budget.max_response_tokens or budget.max_tokens,
                stream=False,
            )
            rollouts = RemoteRollouts(lambda seed: speaker(seed=seed), tool, budget, timeline, config.seed)
            yield _Sampler(rollouts=rollouts, sandbox=sandbox, timeline=timeline)


def rows_path(output: Path, name: str) -> Path:
    return output / f"{name}.samples.jsonl"


def _done(file: RowFile, prompts: Sequence[Prompt]) -> int:
    return sum(prompt.id in file.done for prompt in prompts)


def _rows(output: Path, name: str, prompts: Sequence[Prompt]) -> list[Row]:
    """Returns the rows of these prompts, in the prompts' order."""
    with RowFile(rows_path(output, name)) as file:
        rows = {row.id: row for row in file.rows()}
    return [rows[prompt.id] for prompt in prompts if prompt.id in rows]


def figures_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Computes the figures of a set. Shares are shares of its rollouts, `tool_error_share` of its calls.

    rows: one or more. accuracy: avg@k with its 95 % interval. pass_at_k: unbiased, for 1, 2, 4, ... and all samples.
    """
    samples = rows[0].samples
    accuracy = avg_at_k(np.asarray([[reward > 0 for reward in row.rewards] for row in rows], np.float64))
    ks = sorted({*(2**power for power in range(int(math.log2(samples)) + 1)), samples})
    stops = [stop for row in rows for stop in row.stops]
    tokens = [count for row in rows for count in row.tokens]
    calls = sum(count for row in rows for count in row.calls)
    return {
        "problems": len(rows),
        "samples": samples,
        "accuracy": accuracy.mean,
        "accuracy_low": accuracy.low,
        "accuracy_high": accuracy.high,
        "pass_at_k": {str(k): fmean(pass_at_k(samples, row.solved, k) for row in rows) for k in ks},
        "tokens_per_rollout": fmean(tokens),
        "turns_per_rollout": fmean(count for row in rows for count in row.turns),
        "tool_calls_per_rollout": calls / len(stops),
        "tool_error_share": sum(count for row in rows for count in row.failed_calls) / max(1, calls),
        "truncated_share": stops.count(StopReason.LENGTH) / len(stops),
        "out_of_turns_share": stops.count(StopReason.TURNS) / len(stops),
        "out_of_time_share": stops.count(StopReason.DEADLINE) / len(stops),
        "no_answer_share": sum(answer is None for row in rows for answer in row.answers) / len(stops),
    }


def table_of(figures: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """Returns a table with a column for each set."""
    table = Table("", title=shown(title))
    for name in figures:
        table.add_column(shown(name), justify="right")
    lines: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
        ("problems x samples", lambda row: f"{row['problems']} x {row['samples']}"),
        ("avg@k", lambda row: f"{row['accuracy']:.3f}"),
        ("95 % interval", lambda row: shown(f"[{row['accuracy_low']:.3f}, {row['accuracy_high']:.3f}]")),
        ("pass@k", lambda row: f"{row['pass_at_k'][str(row['samples'])]:.3f}"),
        ("tokens per rollout", lambda row: f"{row['tokens_per_rollout']:.0f}"),
        ("tool calls per rollout", lambda row: f"{row['tool_calls_per_rollout']:.2f}"),
        ("failed share of tool calls", lambda row: f"{row['tool_error_share']:.3f}"),
        ("truncated", lambda row: f"{row['truncated_share']:.3f}"),
        ("out of turns", lambda row: f"{row['out_of_turns_share']:.3f}"),
        ("without an answer", lambda row: f"{row['no_answer_share']:.3f}"),
        ("problems that failed", lambda row: str(row["problems_failed"])),
    )
    for label, show in lines:
        table.add_row(label, *(show(row) for row in figures.values()))
    return table


if __name__ == "__main__":
    exit_process(run_job(Config, evaluate, expected=(EndpointFailed,)))
