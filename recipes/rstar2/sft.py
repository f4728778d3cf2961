"""Supervised fine-tuning before reinforcement learning: teaches the form of answers and tool calls, without reasoning.

    python recipes/rstar2/template.py model=models/Qwen3-14B-Base output=models/rstar2-base
    python recipes/rstar2/sft.py model=models/rstar2-base data=data/sft.parquet devices=0,1,2,3,4,5,6,7

The values that are set below are those of the report (arXiv 2508.20722, section 4.1). parts/tuning/conversations.py
describes the form of a row. `model` must have the chat template already (template.py). In runs/sft, beside what every
run has:

    checkpoint/           the trained model, a Hugging Face folder that stands alone
    loss.png              loss of the batches and on held-out conversations
    format-before.jsonl   replies to held-out prompts that ask for a tool call, before and after training
    format-after.jsonl
    lengths.npy           tokens of each conversation, found out once

Promises
- A run that was killed goes on by the same command at the batch after its last checkpoint, and learns the same.
- Every row is read and rendered before training begins: a bad one is named by file, row and field at once.
- A conversation longer than max_tokens is left out and counted; none is cut.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from rich.console import Console

from algo.learner.config import LearnerConfig
from algo.loss.policy_losses import CrossEntropy
from algo.sft import to_batch
from engine import metric_names as metric
from engine.assembly import cpu_notes
from engine.assembly.config import config_fields
from engine.assembly.devices import DevicePlan
from engine.assembly.startup import seconds_since_start
from engine.atomic_files import write_whole
from engine.console.notes import say
from engine.learner.messages import Configure
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.run.checkpoints import CheckpointFolder, Unresumable, damage
from engine.run.run_folder import RunFolder, versions
from engine.run.workspace import workspace
from engine.telemetry.watchdog import exit_process
from engine.types import Batch
from recipes.rstar2.parts.tuning.conversations import Conversation, Conversations, Lengths, Plan, Renderer
from recipes.rstar2.parts.tuning.format_check import Question, Reply, check_format, names, shares
from recipes.rstar2.parts.tuning.sft_report import LossCurve, Meter, changes, model_card, plot
from sandbox.require import at_least, require, require_fields, within

# The report has 165 K conversations with calls (117 K of ToolACE, APIGen-MT and Glaive v2, 48 K of Magicoder), 30 K
# that follow instructions (Tulu 3) and 27 K of chat (Llama-Nemotron).
CONVERSATIONS = 222_000
EPOCHS = 3
BATCH_SIZE = 128
LEARNING_RATE = 5e-6
WARMUP = 0.04  # share of the steps; a cosine follows

MEASURED_AT_ONCE = 64  # conversations, between which an interruption is heard


def _learner() -> LearnerConfig:
    """Returns the report's values.

    `Config.learner_of` sets steps and warm-up when the number of conversations is known.
    """
    return LearnerConfig(
        lr=LEARNING_RATE,
        warmup_steps=0,
        schedule="cosine",
        decay_to=0.0,
        minibatches=1,
        micro_batch_tokens=8192,
        loss=CrossEntropy(),
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[Path, "Hugging Face folder with the chat template"] = Path("models/rstar2-base")
    data: Annotated[tuple[Path, ...], "files of conversations, JSONL or parquet, separated by commas"]
    held_out: Annotated[tuple[Path, ...], "files of conversations that are not trained; none: rows of data"] = ()
    held_out_rows: Annotated[int, "conversations for held-out loss and format check, at most; 0: none"] = 256
    max_tokens: Annotated[int, "tokens of a conversation; longer ones are left out"] = 8192
    epochs: Annotated[float, "passes over the data, where steps is none"] = EPOCHS
    steps: Annotated[int | None, "optimizer batches; none: as many as the epochs are"] = None
    batch_size: Annotated[int, "conversations per step"] = BATCH_SIZE
    warmup: Annotated[float, "share of the steps with a rising learning rate, where learner.warmup_steps is 0"] = WARMUP
    eval_every: Annotated[int, "steps between held-out losses"] = 100
    checkpoint_every: Annotated[int, "steps between checkpoints that a killed run goes on from"] = 100
    format_prompts: Annotated[int, "held-out prompts for the format check before and after; 0: none"] = 64
    format_tokens: Annotated[int, "longest reply of the format check"] = 512
    format_temperature: Annotated[float, "temperature at which its replies are sampled"] = 1.0
    devices: Annotated[tuple[int, ...], "GPUs, one for each rank; none: the CPU"] = ()
    learner_ranks: Annotated[int, "FSDP ranks on the CPU"] = 1
    seed: Annotated[int, "seed of the order, of what is held out, and of sampling"] = 0
    learner: LearnerConfig = field(default_factory=_learner)

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data: no file. Fix: data=FILE or data=FILE,FILE")
        for name in ("data", "held_out"):
            for path in getattr(self, name):
                if not path.exists():
                    raise ValueError(f"{name}: {str(path)!r} does not exist")
        described = config_fields(self.model, "model")
        require_fields(self, at_least(1), "max_tokens", "batch_size", "eval_every", "checkpoint_every", "format_tokens")
        if self.epochs <= 0 or (self.steps is not None and self.steps < 1):
            raise ValueError(f"epochs and steps must be positive, got {self.epochs} and {self.steps}")
        require("warmup", self.warmup, within("[0, 1)"))
        require_fields(self, at_least(0), "held_out_rows", "format_prompts", "format_temperature", "seed")
        if self.learner.steps is not None:
            raise ValueError(f"learner.steps is that of the run. Fix: steps={self.learner.steps} in its place")
        if self.learner.replay_routing:
            raise ValueError(
                f"learner.replay_routing must be false, got {self.learner.replay_routing}: no sampler has chosen "
                "experts for examples. Fix: leave it out"
            )
        self.learner.check_ranks(self.plan.learner_ranks)  # and the plan's own checks, before anything starts
        self.learner.check_model(described)

    @property
    def plan(self) -> DevicePlan:
        """Where the learner runs: on all GPUs. The format check uses the first of them while there is no learner."""
        ranks = len(self.devices) or self.learner_ranks
        return DevicePlan(devices=self.devices, learner_ranks=ranks, replicas=ranks)

    def learner_of(self, steps: int) -> LearnerConfig:
        fields = {**self.plan.learner_fields, "warmup_steps": self.learner.warmup_steps or round(self.warmup * steps)}
        if self.devices:
            fields["offload_optimizer"] = False  # nothing shares the devices meanwhile
        return replace(self.learner, **fields).for_run(steps)


async def train(config: Config, run: Run) -> dict[str, Any]:
    console = Console()
    folder, renderer = run.folder, Renderer(config.model)
    resumed = resume(folder)
    if folder.resumed:
        say(console, resumed.message)
        if config.steps is not None:
            folder.extend(config.steps)
    plan = await _plan(config, folder, renderer, console)
    steps = config.steps or plan.steps(config.epochs)
    say(
        console,
        f"{len(plan.trained)} conversations in {steps} batches of {config.batch_size} "
        f"({plan.epochs(steps):.2f} epochs); {plan.too_long} longer than {config.max_tokens} tokens are left out",
    )
    job = Sft(config, folder, console, renderer, plan, steps, resumed)
    try:
        return await job.run()
    finally:
        job.draw()


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """step: the last one that is trained. rows: the metrics up to it. message: for the user."""

    step: int
    rows: list[dict[str, float]]
    checkpoint: Path | None
    message: str


def resume(run: RunFolder) -> Resumed:
    """Returns what a run goes on from: its newest whole checkpoint that has its metrics, else its start."""
    checkpoints = CheckpointFolder(run.path / "checkpoints")
    faults, step = [], 0
    for candidate in reversed(checkpoints.steps()):
        fault = damage(checkpoints.of(candidate))
        try:
            run.rows(candidate)
        except Unresumable as error:
            fault = str(error)
        if fault is None:
            step = candidate
            break
        faults.append(f"checkpoint {checkpoints.of(candidate)} is not used: {fault}")
    checkpoints.clear_after(step)
    return Resumed(
        step=step,
        rows=run.resume(step) if run.resumed else [],
        checkpoint=checkpoints.of(step) if step else None,
        message="\n".join([*faults, f"resuming {run.path} at step {step}"]),
    )


async def _plan(config: Config, run: RunFolder, renderer: Renderer, console: Console) -> Plan:
    """Reads and renders all of the data once. Raises BadInput for the first row that is no conversation."""
    conversations = Conversations(config.data)
    known = Lengths(run.path / "lengths.npy", conversations, renderer, config.model)
    lengths = known.read()
    if lengths is None:
        count = len(conversations)
        with Meter(console, "reading the data", count, unit="conversations", lines=False) as meter:
            for first in range(0, count, MEASURED_AT_ONCE):
                rows = range(first, min(first + MEASURED_AT_ONCE, count))
                await asyncio.to_thread(known.measure, rows)
                meter.update(rows.stop)
        lengths = known.write()
    return Plan(
        conversations,
        lengths,
        max_tokens=config.max_tokens,
        batch_size=config.batch_size,
        held_out_rows=0 if config.held_out else config.held_out_rows,
        seed=config.seed,
    )


class Sft:
    """Carries out the run: a format check, the batches with held-out losses among them, and a format check."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        console: Console,
        renderer: Renderer,
        plan: Plan,
        steps: int,
        resumed: Resumed,
    ) -> None:
        self.config, self.run_folder, self.console = config, run, console
        self.renderer, self.plan, self.steps, self.resumed = renderer, plan, steps, resumed
        self.checkpoints = CheckpointFolder(run.path / "checkpoints")
        self.curve = LossCurve(resumed.rows)
        self.held_out = self._read_held_out()

    def _read_held_out(self) -> list[Conversation]:
        """Reads the first held-out conversations that fit, from files of their own or from rows of the data."""
        config, plan = self.config, self.plan
        if not config.held_out:
            return [plan.conversations[row] for row in plan.held_out.tolist()]
        others = Conversations(config.held_out)
        first = (others[row] for row in range(min(len(others), config.held_out_rows)))
        return [each for each in first if len(self.renderer.example(each).ids_T) <= config.max_tokens]

    async def run(self) -> dict[str, Any]:
        config, folder = self.config, self.run_folder.path
        begins = not self.resumed.rows  # a run that was killed in its first steps has measured what is before them
        before = await self._check_format(config.model, "format-before.jsonl") if begins else {}
        async with AsyncExitStack() as stack:
            learner = await self._start_learner(stack)
            if begins:
                self._record(0, {**before, **await self._held_out_loss(learner)})
            await self._train(learner)
            say(self.console, "saving the checkpoint")
            await learner.save(folder / "checkpoint")
        if after := await self._check_format(folder / "checkpoint", "format-after.jsonl"):
            self._record(self.steps, after)
        summary = self._summary()
        command = [sys.executable, *sys.argv]
        card = model_card(config.model, command, summary)
        write_whole(folder / "checkpoint" / "README.md", [card.encode()])
        self.draw()
        self.run_folder.json("summary.json", summary)  # the last file: what has it is not resumed
        for line in changes(summary):
            say(self.console, line)
        say(self.console, f"the trained model is in {folder / 'checkpoint'}, its curve in {folder / 'loss.png'}")
        return summary

    def draw(self) -> None:
        """Writes the curve, as far as there is one."""
        if self.curve.losses:
            with self.run_folder.writing("loss.png") as path:
                plot(path, self.curve)

    async def _start_learner(self, stack: AsyncExitStack) -> LearnerProcess:
        config, plan = self.config, self.config.plan
        folder = stack.enter_context(workspace())
        process = plan.learner(LearnerProcessConfig(module="algo.learner", step_deadline_s=3600.0))
        if not plan.devices:
            for line in cpu_notes.lacks([config.learner.dtype]):
                say(self.console, line)
        say(self.console, "starting the learner")
        learner = LearnerProcess(process, folder, self.run_folder.path / "learner.log")
        learner = await stack.enter_async_context(learner)
        resumed = self.resumed.checkpoint
        ready, _ = await learner.configure(
            Configure(
                checkpoint=str(config.model.resolve()),
                learner=asdict(config.learner_of(self.steps)),
                canary=[],
                weights_dir=str(folder),
                seed=config.seed,
                resume=str(resumed.resolve()) if resumed else None,
            )
        )
        with suppress(FileNotFoundError):  # on a GPU they are no file
            os.unlink(ready.weights)  # nobody samples with them
        return learner

    async def _train(self, learner: LearnerProcess) -> None:
        """Trains the batches. Each is made while the one before it is trained."""
        first = self.resumed.step + 1
        if first > self.steps:
            return
        batch = await asyncio.to_thread(self._batch, first)
        with Meter(self.console, "training", self.steps, unit="steps", begin=self.resumed.step) as meter:
            for step in range(first, self.steps + 1):
                started = time.monotonic()
                following = step + 1 if step < self.steps else None
                async with asyncio.TaskGroup() as tasks:
                    training = tasks.create_task(learner.train(batch, version=0), name="train")
                    if following is not None:
                        making = tasks.create_task(asyncio.to_thread(self._batch, following), name="make-batch")
                trained, _ = training.result()
                metrics = self._metrics(step, batch, trained.metrics, time.monotonic() - started)
                if step % self.config.eval_every == 0 or step == self.steps:
                    metrics |= await self._held_out_loss(learner)
                self._record(step, metrics)
                meter.update(step, metrics)
                if step % self.config.checkpoint_every == 0 or step == self.steps:
                    await asyncio.to_thread(self.run_folder.sync)
                    await learner.checkpoint(self.checkpoints.of(step), step)
                if following is not None:
                    batch = making.result()

    def _batch(self, step: int) -> Batch:
        rows = self.plan.rows(step)
        return to_batch(step, [self.renderer.example(self.plan.conversations[row]) for row in rows])

    def _metrics(self, step: int, batch: Batch, learnt: dict[str, float], step_s: float) -> dict[str, float]:
        train_s = self.curve.train_s + step_s
        return {
            "loss": learnt["nll"],
            "epoch": self.plan.epochs(step),
            "conversations": float(len(batch.lengths_B)),
            "tokens": float(batch.lengths_B.sum()),
            "tokens_learnt": learnt["tokens"],
            **{metric.member(metric.LEARNER, name): learnt[name] for name in LEARNER_METRICS if name in learnt},
            metric.TIME_STEP_S: step_s,
            metric.TIME_TRAIN_TOTAL_S: train_s,
        }

    async def _held_out_loss(self, learner: LearnerProcess) -> dict[str, float]:
        """Measures the mean -log p of the learnt tokens of held-out conversations, in all and by source."""
        nll: dict[str, float] = defaultdict(float)
        tokens: dict[str, int] = defaultdict(int)
        size = self.config.batch_size
        for first in range(0, len(self.held_out), size):
            part = self.held_out[first : first + size]
            batch = await asyncio.to_thread(self._to_batch, part)
            logprobs = await learner.score(batch)
            ends = np.cumsum(batch.lengths_B)
            for conversation, begin, end in zip(part, ends - batch.lengths_B, ends, strict=True):
                nll[conversation.source] -= float(logprobs[begin:end].sum(dtype=np.float64))
                tokens[conversation.source] += int(batch.sampled_N[begin:end].sum())
        if not tokens:
            return {}
        by_source = {f"held_out/loss/{source}": nll[source] / tokens[source] for source in sorted(tokens)}
        return {"held_out/loss": sum(nll.values()) / sum(tokens.values()), **by_source}

    def _to_batch(self, conversations: Sequence[Conversation]) -> Batch:
        return to_batch(0, list(map(self.renderer.example, conversations)))

    async def _check_format(self, checkpoint: Path, name: str) -> dict[str, float]:
        """Samples replies to held-out prompts whose answer begins with a call, and returns how many are well formed."""
        config = self.config
        asked = [conversation for conversation in self.held_out if conversation.begins_with_call]
        questions = [
            Question(
                id=f"{number}-{conversation.id}",
                prompt_ids=self.renderer.prompt(conversation),
                tools=names(conversation.tools),
            )
            for number, conversation in enumerate(asked[: config.format_prompts])
        ]
        if not questions:
            return {}
        say(self.console, f"sampling {len(questions)} replies of {checkpoint} to check their form")
        replies = await check_format(
            checkpoint,
            questions,
            self.renderer.problems,
            max_reply_tokens=config.format_tokens,
            temperature=config.format_temperature,
            seed=config.seed,
            device=config.devices[0] if config.devices else None,
        )
        write_whole(self.run_folder.path / name, _lines(replies))
        return shares(replies)

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self.curve.step(step, metrics)
        self.run_folder.step(step, metrics)

    def _summary(self) -> dict[str, Any]:
        return {
            **self.curve.summary(),
            "conversations": len(self.plan.trained),
            "conversations_too_long": self.plan.too_long,
            "conversations_held_out": len(self.held_out),
            "epochs": self.plan.epochs(self.steps),
            "total_wall_s": seconds_since_start(),
            "versions": versions(),
        }


LEARNER_METRICS = ("lr", "grad_norm", "entropy", "tokens_per_s", "train_s", "peak_bytes", "padding_waste", "mfu")


def _lines(replies: Iterable[Reply]) -> Iterable[bytes]:
    return (msgspec.json.encode(reply) + b"\n" for reply in replies)


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
