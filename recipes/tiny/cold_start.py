"""Makes the tiny agent from nothing: a tokenizer, a 0.5 M-parameter Qwen3, and two phases of supervised fine-tuning.

    python recipes/tiny/cold_start.py    # writes runs/tiny_cold_start; minutes on two cores
    python recipes/tiny/cold_start.py output=recipes/tiny threads=1    # how the shipped one was made
    python recipes/tiny/cold_start.py experts=8    # a mixture of experts of 1.1 M parameters

Phase A teaches the craft: translate a problem into a Python call, copy the result into the answer. Copying emerges
late and suddenly, so it takes many small steps on demonstrations that use the tool. Phase B is short and teaches bad
manners: mostly guessing, and mostly a failed call first. That leaves reinforcement learning something to find: held-out
accuracy is about 0.3, of which sampling shows all and greedy decoding almost nothing.

The result is a Hugging Face checkpoint (bfloat16, tied embeddings) and `cold_start.json` with what made it and its
figures, which are those of the quick start's rollouts: a vLLM replica, jailed tool calls, the same reward.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from algo.eval_stats import avg_at_k
from algo.learner.config import LearnerConfig
from algo.loss.policy_losses import CrossEntropy
from algo.reward.math_reward import MathReward
from algo.sft import batches, examples
from engine.assembly.config import ServingConfig
from engine.assembly.serving import serving
from engine.console.options import parse
from engine.console.progress import Bar
from engine.learner.messages import Configure
from engine.learner.process import LearnerDied, LearnerProcess, LearnerProcessConfig
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import ReplicaDied
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig
from engine.run.run_folder import versions
from engine.run.workspace import workspace
from engine.stages.evaluate import Evaluation
from engine.telemetry import metrics as measure
from engine.telemetry.watchdog import exit_process
from engine.types import StopReason, Trajectory
from recipes.tiny.task import (
    LIMITS,
    MAX_TOKENS,
    MAX_TOOL_CALLS,
    SHIPPED,
    Message,
    Mix,
    demonstrations,
    prompts,
    python_tool,
)
from recipes.tiny.tokenizer import PAD, TURN_END, train_tokenizer
from sandbox import TIERS, SandboxConfig, SandboxUnavailable
from sandbox.printable import printable
from sandbox.require import Rule, at_least, require

EVERYTHING = Mix(head=0.3, clean=0.4, err=0.3)  # the tokenizer learns its merges from it


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    output: Annotated[Path, "folder to write the checkpoint to"] = Path("runs/tiny_cold_start")
    tokenizer: Annotated[Literal["shipped", "train"], "'train' makes new merges, which no older checkpoint fits"] = (
        "shipped"
    )
    seed: Annotated[int, "seed of the weights and of the demonstrations"] = 1
    craft_steps: Annotated[int, "phase A: steps of 16 demonstrations at learning rate 3e-3"] = 1600
    manners_steps: Annotated[int, "phase B: steps of 32 demonstrations at learning rate 1e-3"] = 100
    eval_problems: Annotated[int, "held-out problems for the figures"] = 512
    threads: Annotated[int, "CPU threads of the learner"] = 2
    experts: Annotated[int, "experts of each layer, of which a token takes two (0: a dense model)"] = 0

    def __post_init__(self) -> None:
        for name, least in {"craft_steps": 1, "manners_steps": 1, "eval_problems": 1, "threads": 1, "seed": 0}.items():
            require(name, getattr(self, name), at_least(least))
        check_output(self.output)
        require("experts", self.experts, Rule("0 or at least 2", lambda count: count == 0 or count >= 2))


def check_output(folder: Path) -> None:
    """Raises ValueError for a folder that is a file, or that holds other things than a checkpoint."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output must be a folder, got {str(folder)!r}, which is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ValueError(f"output must be a new folder or that of a checkpoint, got {str(folder)!r}. Fix: another one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One run of the learner on demonstrations."""

    title: str
    conversations: Iterator[list[Message]]
    batch_size: int
    learner: LearnerConfig


def craft(config: Config) -> Phase:
    return Phase(
        title="A: craft",
        conversations=demonstrations(Mix(head=0.05, clean=0.75, err=0.20), config.seed),
        batch_size=16,
        learner=learner(config.threads, steps=config.craft_steps, lr=3e-3, warmup_steps=50, loss=CrossEntropy()),
    )


def manners(config: Config) -> Phase:
    """Returns the second phase. Its loss is divided by a constant, the learnt tokens of a typical demonstration.

    With the mean of each batch, short guesses would win over tool calls.
    """
    return Phase(
        title="B: manners",
        conversations=demonstrations(Mix(head=0.55, clean=0.18, err=0.27), config.seed),
        batch_size=32,
        learner=learner(
            config.threads, steps=config.manners_steps, lr=1e-3, warmup_steps=20, loss=CrossEntropy(aggregate=38)
        ),
    )


def learner(threads: int, *, steps: int, lr: float, warmup_steps: int, loss: CrossEntropy) -> LearnerConfig:
    """Returns a phase's learner: a learning rate that is constant for six tenths of the steps, then falls to 0."""
    return LearnerConfig(
        loss=loss,
        steps=steps,
        lr=lr,
        betas=(0.9, 0.98),
        warmup_steps=warmup_steps,
        schedule="linear",
        decay_from=0.6,
        minibatches=1,
        threads=threads,
    )


async def make(config: Config) -> dict[str, Any]:
    """Writes the checkpoint and returns its figures. Raises OSError, LearnerDied, ReplicaDied or SandboxUnavailable."""
    config.output.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=config.output).close()  # a folder that takes no file is told now, not after minutes
    if config.tokenizer == "train":
        tokenizer = train_tokenizer(list(itertools.islice(demonstrations(EVERYTHING, 0), 8000)))
    else:
        tokenizer = AutoTokenizer.from_pretrained(SHIPPED, trust_remote_code=False)
    chat = ChatTemplate(tokenizer)
    model = new_model(config.seed, tokenizer, config.experts)
    figures: dict[str, Any] = {"parameters": sum(weight.numel() for weight in model.parameters())}
    with workspace() as folder:
        start = folder / "start"
        crafted = folder / "crafted"
        mannered = folder / "mannered"
        model.save_pretrained(start)
        figures["loss_craft"] = await train(craft(config), config.seed, chat, start, crafted)
        [figures["after_craft"]] = await evaluate(crafted, chat, config.eval_problems, [1.0])
        figures["loss_manners"] = await train(manners(config), config.seed, chat, crafted, mannered)
        model = AutoModelForCausalLM.from_pretrained(mannered, trust_remote_code=False, dtype=torch.float32).bfloat16()
        tokenizer.save_pretrained(config.output, save_jinja_files=False)
        model.save_pretrained(config.output)
        figures["sampled"], figures["greedy"] = await evaluate(config.output, chat, config.eval_problems, [1.0, 0.0])
    return figures


def new_model(seed: int, tokenizer: Any, experts: int = 0) -> PreTrainedModel:
    """Returns a random Qwen3 in fp32, or a mixture of experts, a Qwen3-MoE. With the shipped tokenizer the first has
    508,992 parameters, the second with 8 experts 1,101,888.

    experts: of each layer. The MLP of each has 96 hidden units and a token takes two; the dense one has 256.
    """
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
        "eos_token_id": tokenizer.convert_tokens_to_ids(TURN_END),
        "bos_token_id": None,
    }
    if not experts:
        return AutoModelForCausalLM.from_config(Qwen3Config(**fields))
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**fields, **mixture))


async def train(phase: Phase, seed: int, chat: ChatTemplate, source: Path, target: Path) -> list[float]:
    """Trains the model in source into target, and returns the mean loss per token of every tenth of the steps.

    Raises LearnerDied.
    """
    steps = phase.learner.steps
    losses: list[float] = []
    stream = examples(phase.conversations, chat.conversation)
    with workspace() as folder, _progress() as progress:
        task = progress.add_task(phase.title, total=steps, loss=float("nan"))
        async with LearnerProcess(LearnerProcessConfig(module="algo.learner"), folder, folder / "log") as learner:
            await learner.configure(
                Configure(
                    checkpoint=str(source),
                    learner=asdict(phase.learner),
                    canary=[],
                    weights_dir=str(folder),
                    seed=seed,
                )
            )
            for batch in itertools.islice(batches(stream, batch_size=phase.batch_size, seed=seed), steps):
                trained, _ = await learner.train(batch, version=0)
                losses.append(trained.metrics["nll"])
                progress.update(task, completed=batch.step, loss=losses[-1])
            await learner.save(target)
    width = max(1, len(losses) // 10)
    return [round(fmean(losses[at : at + width]), 4) for at in range(0, len(losses), width)]


def _progress() -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )


async def evaluate(
    checkpoint: Path, chat: ChatTemplate, problems: int, temperatures: Sequence[float]
) -> list[dict[str, float]]:
    """Returns what `shares` says of held-out problems at each temperature (0: greedy), one trajectory each.

    Raises ReplicaDied or SandboxUnavailable.
    """
    budgets = [
        RolloutConfig(
            max_tokens=MAX_TOKENS,
            max_turns=MAX_TOOL_CALLS + 1,
            temperature=temperature,
            deadline_s=3600.0,  # a busy machine shall not change the figures
        )
        for temperature in temperatures
    ]
    config = ServingConfig(
        checkpoint=checkpoint,
        rollout=budgets[0],
        replica=ReplicaConfig(checkpoint=str(checkpoint), max_model_len=MAX_TOKENS + 32, kv_blocks=2048),
        replicas=1,
        sandbox=SandboxConfig(slots=4, limits=LIMITS, tiers=TIERS[:1]),
    )
    held_out = list(itertools.islice(prompts("test", 0), problems))
    figures = []
    async with serving(config, chat=chat) as served:
        rollouts = served.rollouts([python_tool(served.sandbox)])
        reward = MathReward(integers_only=True)
        for budget in budgets:
            evaluation = Evaluation(held_out, 1, rollouts.with_config(budget), reward, avg_at_k, served.timeline)
            _, trajectories = await evaluation.run(-1)  # the version of weights that the engine has read itself
            figures.append(shares(trajectories))
    return figures


def shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the number of trajectories without an error of ours, n, and shares of them.

    correct: by the reward. tool: at least one call. error_in_correct: failed calls per call within correct ones.
    correct_given_tool: of those with a call. truncated: out of tokens or turns.
    """
    graded = [trajectory for trajectory in trajectories if trajectory.error is None]
    with_tool = [trajectory for trajectory in graded if trajectory.tool_uses]
    right = measure.correct(graded)
    counted = {
        "correct": len(right) / len(graded),
        "tool": len(with_tool) / len(graded),
        "error_in_correct": measure.tool_error_share(right),
        "correct_given_tool": len(measure.correct(with_tool)) / max(1, len(with_tool)),
        "truncated": sum(trajectory.stop is not StopReason.ANSWER for trajectory in graded) / len(graded),
    }
    return {"n": len(graded), **{name: round(share, 4) for name, share in counted.items()}}


def _cpu_s() -> float:
    """Returns the CPU seconds of this process and of those that it has waited for, learner and engine among them."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main(argv: Sequence[str]) -> int:
    config = parse(Config, argv, description=__doc__)
    prepare_environment()
    started, cpu_started = time.monotonic(), _cpu_s()
    transformers.utils.logging.disable_progress_bar()
    try:
        figures = asyncio.run(make(config))
        figures |= {"wall_s": round(time.monotonic() - started, 1), "cpu_s": round(_cpu_s() - cpu_started, 1)}
        command = shlex.join(["python", "recipes/tiny/cold_start.py", *argv])
        made = {"command": command, "config": asdict(config), "figures": figures, "versions": versions()}
        (config.output / "cold_start.json").write_text(json.dumps(made, indent=2, default=str) + "\n")
    except (OSError, LearnerDied, ReplicaDied, SandboxUnavailable) as error:
        print(printable(f"tiny_cold_start: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tiny_cold_start: interrupted", file=sys.stderr)
        return 130
    print(json.dumps(figures, indent=2))
    print(f"checkpoint: {config.output}")
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
