"""Makes the tiny agent from nothing: a tokenizer, a 0.5 M-parameter Qwen3, and two phases of supervised fine-tuning.

    python recipes/tiny_cold_start.py    # writes runs/tiny_cold_start; minutes on two cores
    python recipes/tiny_cold_start.py tokenizer=train output=recipes/tiny    # made the shipped one

Phase A teaches the craft: translate a problem into a Python call, copy the result into the answer. Copying emerges
late and suddenly, so it takes many small steps on demonstrations that use the tool. Phase B is short and teaches bad
manners: mostly guessing, and mostly a failed call first. That leaves reinforcement learning something to find: held-out
accuracy is about 0.3, of which sampling shows all and greedy decoding almost nothing.

The result is a Hugging Face checkpoint (bfloat16, tied embeddings) and `cold_start.json` with what made it and the
figures of the rounded weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run in place: the packages lie in the repository root

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from algo.learner import LearnerConfig
from algo.losses import CrossEntropy
from algo.sft import batches, examples
from engine.chat import Chat
from engine.link import Configure, LearnerDied, LearnerProcess, LearnerProcessConfig
from engine.types import Prompt
from engine.workspace import workspace
from recipes.options import parse
from recipes.tiny_task import MAX_TOKENS, MAX_TOOL_CALLS, Mix, demonstrations, format_error, prompts
from recipes.tiny_tokenizer import PAD, TURN_END, VOCABULARY, train_tokenizer

SHIPPED = Path(__file__).resolve().parent / "tiny"
EVERYTHING = Mix(head=0.3, clean=0.4, err=0.3)  # what the tokenizer learns its merges from


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    output: Annotated[Path, "folder to write the checkpoint to"] = Path("runs/tiny_cold_start")
    tokenizer: Annotated[Literal["shipped", "train"], "'train' makes new merges, which no older checkpoint fits"] = (
        "shipped"
    )
    seed: Annotated[int, "seed of the weights and of the demonstrations"] = 1
    craft_steps: Annotated[int, "phase A: steps of 16 demonstrations at learning rate 3e-3"] = 1600
    manners_steps: Annotated[int, "phase B: steps of 32 demonstrations at learning rate 1e-3"] = 100
    eval_problems: Annotated[int, "held-out problems for the final figures"] = 512
    threads: Annotated[int, "CPU threads of torch"] = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One run of the learner on demonstrations of a mix."""

    title: str
    mix: Mix
    batch_size: int
    learner: LearnerConfig


def craft(config: Config) -> Phase:
    learner = _learner(config, steps=config.craft_steps, lr=3e-3, warmup_steps=50, loss=CrossEntropy())
    return Phase(title="A: craft", mix=Mix(head=0.05, clean=0.75, err=0.20), batch_size=16, learner=learner)


def manners(config: Config) -> Phase:
    """The constant normaliser keeps the asked mix: with the per-batch mean, short guesses would win over tool calls.

    38: learnt tokens of a typical demonstration.
    """
    loss = CrossEntropy(aggregate=38)
    learner = _learner(config, steps=config.manners_steps, lr=1e-3, warmup_steps=20, loss=loss)
    return Phase(title="B: manners", mix=Mix(head=0.55, clean=0.18, err=0.27), batch_size=32, learner=learner)


def _learner(config: Config, **fields: Any) -> LearnerConfig:
    common = {"minibatches": 1, "betas": (0.9, 0.98), "threads": config.threads}
    return LearnerConfig(micro_batch_tokens=4096, **common, **fields)


def main(config: Config) -> None:
    started, cpu_started = time.monotonic(), _cpu_s()
    torch.set_num_threads(config.threads)
    transformers.utils.logging.disable_progress_bar()
    if config.tokenizer == "train":
        tokenizer = train_tokenizer(EVERYTHING, conversations=8000, seed=0)
    else:
        tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = new_model(config.seed, tokenizer)
    figures: dict[str, Any] = {"parameters": sum(weight.numel() for weight in model.parameters())}
    with _progress() as progress:
        model, figures["loss_craft"] = asyncio.run(_train(model, tokenizer, craft(config), config.seed, progress))
        figures["after_craft"] = evaluate(model, tokenizer, config.eval_problems, temperature=1.0)
        model, figures["loss_manners"] = asyncio.run(_train(model, tokenizer, manners(config), config.seed, progress))
    model = model.bfloat16()
    tokenizer.save_pretrained(config.output, save_jinja_files=False)
    model.save_pretrained(config.output)
    model = model.float()  # the shipped weights, rounded, are what the figures are about
    figures["sampled"] = evaluate(model, tokenizer, config.eval_problems, temperature=1.0)
    figures["greedy"] = evaluate(model, tokenizer, config.eval_problems, temperature=0.0)
    figures |= {"wall_s": round(time.monotonic() - started, 1), "cpu_s": round(_cpu_s() - cpu_started, 1)}
    record = {
        "command": shlex.join(["python", "recipes/tiny_cold_start.py", *_changed(config)]),
        "config": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()},
        "figures": figures,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (config.output / "cold_start.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    print(f"checkpoint: {config.output}")


def _cpu_s() -> float:
    """Of this process and of those that it has waited for, the learner's among them."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _changed(config: Config) -> list[str]:
    """The options that lead from the defaults to this configuration."""
    values = ((item.name, getattr(config, item.name), item.default) for item in fields(config))
    return [f"{name}={value}" for name, value, default in values if value != default]


def new_model(seed: int, tokenizer: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 of 508,992 parameters, fp32."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
            eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
            bos_token_id=None,
        )
    )


async def _train(model: Any, tokenizer: Any, phase: Phase, seed: int, progress: Progress) -> tuple[Any, list[float]]:
    """The trained model, and the mean loss per token of every tenth of the steps. Raises LearnerDied."""
    chat, steps = Chat(tokenizer), phase.learner.steps
    stream = examples(demonstrations(phase.mix, seed), chat.conversation)
    task = progress.add_task(phase.title, total=steps, loss=float("nan"))
    losses = []
    with workspace() as folder:
        model.save_pretrained(folder / "source")
        async with LearnerProcess(LearnerProcessConfig(module="algo.learner"), folder, folder / "log") as learner:
            fields = asdict(phase.learner)
            where = {"checkpoint": str(folder / "source"), "weights_dir": str(folder)}
            await learner.configure(Configure(**where, learner=fields, canary=[], seed=seed))
            for batch in itertools.islice(batches(stream, batch_size=phase.batch_size, seed=seed), steps):
                trained, _ = await learner.train(batch, version=0)
                losses.append(trained.metrics["nll"])
                progress.update(task, completed=batch.step, loss=losses[-1])
            await learner.save(folder / "trained")
        width = max(1, len(losses) // 10)
        means = [round(fmean(losses[at : at + width]), 4) for at in range(0, len(losses), width)]
        return AutoModelForCausalLM.from_pretrained(folder / "trained", dtype=torch.float32), means


def _progress() -> Progress:
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn())


# Evaluation: a small batched sampler. The tool runs in bare subprocesses, which is no isolation; it is enough here,
# where the model has only ever seen sums. The engine's rollouts use the jail.


def evaluate(model: Any, tokenizer: Any, n: int, temperature: float, seed: int = 0) -> dict[str, float]:
    """Shares over n held-out problems, one trajectory each.

    correct: the boxed answer equals the reference. tool: at least one call. error_in_correct: failed calls per call
    within correct trajectories. truncated: out of tokens or turns.
    """
    torch.manual_seed(seed)
    rollouts = [Rollout.of(tokenizer, prompt) for prompt in itertools.islice(prompts("test", seed), n)]
    for _ in range(MAX_TOOL_CALLS + 1):
        open_rollouts = [rollout for rollout in rollouts if rollout.open]
        if not open_rollouts:
            break
        _sample_turn(model, tokenizer, open_rollouts, temperature)
        _call_tools(tokenizer, open_rollouts)
    correct = [rollout for rollout in rollouts if rollout.answer == rollout.prompt.answer]
    calls = sum(rollout.calls for rollout in correct)
    return {
        "n": n,
        "correct": round(len(correct) / n, 4),
        "tool": round(sum(rollout.calls > 0 for rollout in rollouts) / n, 4),
        "error_in_correct": round(sum(rollout.failed for rollout in correct) / max(1, calls), 4),
        "correct_given_tool": round(
            sum(rollout.calls > 0 for rollout in correct) / max(1, sum(rollout.calls > 0 for rollout in rollouts)), 4
        ),
        "truncated": round(sum(rollout.open or rollout.truncated for rollout in rollouts) / n, 4),
    }


@dataclass(kw_only=True, slots=True)
class Rollout:
    """A trajectory in the making; `open` until a turn ends without a call."""

    prompt: Prompt
    ids_T: list[int]
    text: str = ""
    calls: int = 0
    failed: int = 0
    open: bool = True
    truncated: bool = False

    @classmethod
    def of(cls, tokenizer: Any, prompt: Prompt) -> Rollout:
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        return cls(prompt=prompt, ids_T=tokenizer.encode(text, add_special_tokens=False))

    @property
    def answer(self) -> str | None:
        found = re.search(r"<answer>.*?\\boxed\{(.*?)\}.*?</answer>", self.text, re.DOTALL)
        return found.group(1) if found else None


@torch.no_grad()
def _sample_turn(model: Any, tokenizer: Any, rollouts: Sequence[Rollout], temperature: float) -> None:
    """Continues every rollout to the end of its turn or of its token budget; `text` becomes the turn's text."""
    width = max(len(rollout.ids_T) for rollout in rollouts)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids_BT = torch.tensor([[pad] * (width - len(rollout.ids_T)) + rollout.ids_T for rollout in rollouts])
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    budget = MAX_TOKENS - min(len(rollout.ids_T) for rollout in rollouts)
    out_BT = model.generate(ids_BT, attention_mask=(ids_BT != pad).long(), max_new_tokens=budget, **choice)
    for rollout, sampled in zip(rollouts, out_BT[:, width:].tolist(), strict=True):
        sampled = sampled[: MAX_TOKENS - len(rollout.ids_T)]
        rollout.truncated = end not in sampled
        turn = sampled if rollout.truncated else sampled[: sampled.index(end) + 1]
        rollout.ids_T += turn
        rollout.text = tokenizer.decode(turn)


def _call_tools(tokenizer: Any, rollouts: Sequence[Rollout]) -> None:
    """Runs the calls of each rollout's last turn and appends the replies, or closes the rollout."""
    replies: dict[str, tuple[bool, str]] = {}
    for rollout in rollouts:
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", rollout.text, re.DOTALL)
        rollout.open = bool(calls) and not rollout.truncated and rollout.calls < MAX_TOOL_CALLS
        if not rollout.open:
            continue
        for call in calls:
            replies[call] = replies.get(call) or _run_call(call)
        rollout.calls += len(calls)
        rollout.failed += sum(not replies[call][0] for call in calls)
        messages = [{"role": "tool", "content": replies[call][1]} for call in calls]
        text = "\n" + tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        rollout.ids_T += tokenizer.encode(text, add_special_tokens=False)
        if len(rollout.ids_T) >= MAX_TOKENS:
            rollout.open, rollout.truncated = False, True


def _run_call(call: str) -> tuple[bool, str]:
    """Whether a call succeeded, and what the model reads."""
    try:
        code = json.loads(call)["arguments"]["code"]
    except json.JSONDecodeError as error:
        return False, format_error(error)
    except (KeyError, TypeError):
        return False, 'FormatError: expected {"name", "arguments": {"code"}}'
    command = [sys.executable, "-I", "-S", "-c", str(code)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
    except subprocess.TimeoutExpired:
        return False, "TimeoutError: 2 s"
    if done.returncode:
        return False, (done.stderr.strip().splitlines() or ["killed"])[-1]
    return True, done.stdout.strip()


if __name__ == "__main__":
    try:
        main(parse(Config, sys.argv[1:]))
    except LearnerDied as error:
        sys.exit(f"tiny_cold_start: {error}")
