"""How far is the learner from the bare forward and backward pass of its model, and what does each part cost?

    python -m bench learner [--quick] [--model tiny|30m|135m|qwen3-1.7b|qwen3-4b] [--device cuda --context 16384]
    python -m bench learner --long [--quick]      (what long rows and a large vocabulary take)

In one process, in shuffled rounds, over the same trajectories: *learner* (packed rows, policy loss, entropy and
statistics, FSDP2 on one rank); *bare*: the same Hugging Face model on the same rows with the same attention, logits at
the targets only, cross-entropy; *bare, dense mask*: the same with transformers' own attention ("sdpa"); *padded*: what
is usual without packing: random order, padded on the right to a pass's longest row, with an attention mask.

`bare_fraction`: tokens/s of the learner over those of bare; `padded_speedup`: over those of padded. `mfu`: share of the
device's peak that the learner's necessary operations (`measure/flops.py`) are; the peak is the datasheet's on a known
GPU, on the CPU that of a matrix product in this run. `peak_bytes`: most memory of two steps of the learner, before the
others are made. Tokens are real inputs; medians over rounds. Weights are random, except for the tiny model.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.hosts import listen_on
from algo.learner.learner import keep_freed_memory
from algo.learner.measure.flops import peak_of
from algo.learner.model.attention import PACKED, bounds
from algo.learner.pack import MicroBatch, MiniBatch, plan
from algo.learner.trainer import Trainer
from bench import ROOT
from bench.benches.learner.long_rows import run as run_long_rows
from bench.measuring.report import at_least, environment, fill, finish, interruptible, say
from engine.types import Batch

TINY = ROOT / "recipes" / "tiny" / "agent"
NAMES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
SHAPES = {
    "135m": (576, 30, 9, 3, 64, 1536, 49152),  # as SmolLM2-135M
    "30m": (512, 8, 8, 4, 64, 1536, 4096),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151936),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151936),
}
PARTS = ("plan", "forward and backward", "clip and optimizer", "publish")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The same trajectories, packed as the learner packs them."""

    batch: Batch
    packed: MiniBatch
    tokens: int

    @property
    def micros(self) -> Sequence[MicroBatch]:
        return self.packed.ranks[0]


def trajectories(options: argparse.Namespace, vocabulary: int) -> Batch:
    """Lengths like the quick start's (log-normal around 100), or all of the context; half of the tokens sampled."""
    rng = np.random.default_rng(0)
    lengths_B = np.clip(rng.lognormal(4.6, 0.35, options.trajectories), 50, 230).astype(np.int32)
    if options.context:
        lengths_B = np.full(options.trajectories, options.context, np.int32)
    total = int(lengths_B.sum())
    sampled_N = np.arange(total) // 16 % 2 == 1
    return Batch(
        step=0,
        token_ids_N=rng.integers(0, vocabulary, total).astype(np.int32),
        sampled_N=sampled_N,
        logprobs_N=np.where(sampled_N, -np.log(vocabulary), 0.0).astype(np.float32),
        versions_N=np.where(sampled_N, 0, -1).astype(np.int32),
        lengths_B=lengths_B,
        advantages_B=rng.normal(size=len(lengths_B)).astype(np.float32),
    )


def write_model(model: str, device: str, folder: str) -> None:
    """Writes a random checkpoint. In a process of its own: its memory is not the learner's."""
    torch.manual_seed(0)
    sizes = dict(zip(NAMES.split(), SHAPES[model], strict=True))
    with torch.device(device):
        written = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True, max_position_embeddings=32768))
    written.to(torch.bfloat16).save_pretrained(folder)


def model_of(options: argparse.Namespace, folder: Path) -> Path:
    if options.model == "tiny":
        return TINY
    given = (options.model, options.device, str(folder))
    code = f"from bench.benches.learner.learner import write_model; write_model{given}"
    subprocess.run([sys.executable, "-c", code], check=True)
    return folder


def bare_model(source: Path, options: argparse.Namespace, attention: str) -> nn.Module:
    """As the learner's in dtype, checkpointing and what is trained."""
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attention)
    if options.lora:
        from algo.learner.model.lora import add_adapters

        add_adapters(model, LearnerConfig(lora_rank=options.lora))
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(options.device).train()


def bare(model: nn.Module, load: Load, device: str, attention: str) -> None:
    for micro in load.micros:
        arrays = (micro.token_ids_RL, micro.position_ids_RL, micro.positions_M, micro.targets_M)
        ids_RL, position_ids_RL, positions_M, targets_M = (torch.from_numpy(array).to(device) for array in arrays)
        inputs = {"input_ids": ids_RL, "position_ids": position_ids_RL, "logits_to_keep": positions_M}
        spans = bounds(micro.lengths_S.tolist(), torch.device(device), micro.shared) if attention == PACKED else {}
        logits_MV = model(**inputs, **spans, use_cache=False).logits[0]
        cross_entropy(logits_MV.float(), targets_M, reduction="sum").backward()
    model.zero_grad(set_to_none=True)


def padded_passes(batch: Batch, limit: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(ids, attention mask, mask of the positions before a target), each [R, L], R x L at most the limit if R > 1."""
    ends_B = np.cumsum(batch.lengths_B)
    order = np.random.default_rng(0).permutation(len(ends_B))
    passes: list[list[int]] = [[]]
    for row in order.tolist():
        longest = max(int(batch.lengths_B[other]) for other in (*passes[-1], row))
        if passes[-1] and longest * (len(passes[-1]) + 1) > limit:
            passes.append([])
        passes[-1].append(row)

    def rows(array: Any, chosen: list[int], shift: int) -> Tensor:
        spans = [(ends_B[row] - batch.lengths_B[row] + shift, ends_B[row]) for row in chosen]
        return pad_sequence([torch.from_numpy(array[start:end]) for start, end in spans], batch_first=True)

    ones_N = np.ones(len(batch.token_ids_N), np.int64)
    return [
        (rows(batch.token_ids_N, chosen, 0).long(), rows(ones_N, chosen, 0), rows(batch.sampled_N, chosen, 1))
        for chosen in passes
    ]


def padded(model: nn.Module, passes: Sequence[tuple[Tensor, Tensor, Tensor]], device: str) -> None:
    for ids_RL, mask_RL, chosen_RL in passes:
        ids_RL, chosen_RL = ids_RL.to(device), chosen_RL.to(device)
        logits_RLV = model(input_ids=ids_RL, attention_mask=mask_RL.to(device), use_cache=False).logits[:, :-1]
        cross_entropy(logits_RLV[chosen_RL].float(), ids_RL[:, 1:][chosen_RL], reduction="sum").backward()
    model.zero_grad(set_to_none=True)


class Clock:
    """Seconds of named pieces of work; on a GPU until it is done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.now = time.process_time if options.cpu_time else time.perf_counter
        self.seconds: dict[str, float] = {}
        self._device = options.device

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        self._wait()
        started = self.now()
        result = work()
        self._wait()
        self.seconds[name] = self.now() - started
        return result


def learner_step(trainer: Trainer, load: Load, clock: Clock, number: int) -> None:
    """What a batch passes through, each part timed."""
    config = trainer.config
    cut = {"minibatches": 1, "micro_batch_tokens": config.micro_batch_tokens, "ranks": 1, "seed": 0}
    clock.time("plan", lambda: plan(load.batch, **cut))
    passed = clock.time("forward and backward", lambda: trainer._passes(load.packed))
    clock.time("clip and optimizer", lambda: trainer._step(load.packed, *passed))
    clock.time("publish", lambda: trainer.publisher.publish(number))


def contenders(source: Path, options: argparse.Namespace, load: Load) -> dict[str, Callable[[], None]]:
    """By name; with long rows only the strictest, for the memory of it."""
    packed = bare_model(source, options, PACKED)
    work: dict[str, Callable[[], None]] = {"bare": partial(bare, packed, load, options.device, PACKED)}
    if not options.context:
        dense = bare_model(source, options, "sdpa")
        passes = padded_passes(load.batch, options.micro_batch_tokens)
        work["bare, dense mask"] = partial(bare, dense, load, options.device, "sdpa")
        work["padded"] = partial(padded, dense, passes, options.device)
    return work


def peak_bytes(device: str) -> int:
    """Most memory that this process held so far; on a GPU what was allocated there."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What does not change from round to round.

    step_flops: the learner's necessary operations (`algo.learner.measure.flops`).
    """

    tokens: int
    rows: int
    parameters: int
    step_flops: float
    peak_bytes: int


Round = tuple[Facts, dict[str, float]]  # seconds by part or contender


def time_contender(name: str, work: dict[str, Callable[[], None]], clock: Clock) -> None:
    """Times one of them; what runs out of memory beside the learner is left out of `work` from then on."""
    try:
        clock.time(name, work[name])
    except torch.OutOfMemoryError:
        say(f"{name} runs out of memory beside the learner: it is left out")
        del work[name]
        torch.cuda.empty_cache()


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Round]:
    source = model_of(options, folder / "model")
    config = LearnerConfig(
        lr=1e-6,
        threads=options.threads,
        dtype=options.dtype,
        device=options.device,
        micro_batch_tokens=options.micro_batch_tokens,
        activation_checkpointing=options.checkpointing,
        lora_rank=options.lora,
    )
    trainer = Trainer(config, source, [], folder, seed=0)
    batch = trajectories(options, trainer.scorer.model.config.vocab_size)
    (packed,) = plan(batch, minibatches=1, micro_batch_tokens=options.micro_batch_tokens, ranks=1, seed=0)
    load = Load(batch=batch, packed=packed, tokens=sum(packed.lengths))
    say("the learner alone")
    for number in (0, 1):  # the second one's passes run beside the optimizer's state
        learner_step(trainer, load, Clock(options), number)
    facts = Facts(
        tokens=load.tokens,
        rows=len(load.micros),
        parameters=trainer.parameters,
        step_flops=trainer.cost.of(targets=packed.loss_tokens, lengths=packed.lengths),
        peak_bytes=peak_bytes(options.device),  # before the contenders are there
    )
    try:
        work = contenders(source, options, load)
    except torch.OutOfMemoryError:
        say("there is no memory for a bare model beside the learner: it is measured alone")
        work = {}
    for number in range(options.rounds + 1):
        say(f"round {number} of {options.rounds}")
        clock = Clock(options)
        for name in random.Random(number).sample(order := [*work, "learner"], len(order)):
            if name == "learner":
                learner_step(trainer, load, clock, number + 2)
            else:
                time_contender(name, work, clock)
        if number:  # the first one warms up
            yield facts, clock.seconds


def device_peak(options: argparse.Namespace) -> float | None:
    """Operations per second: the datasheet's of a GPU; on the CPU those of the best of ten fp32 matrix products."""
    if options.device == "cuda":
        return peak_of(torch.cuda.get_device_name())
    size, seconds = 1024, []
    square, clock = torch.rand(size, size), Clock(options)
    for _ in range(10):
        clock.time("product", lambda: torch.mm(square, square))
        seconds.append(clock.seconds["product"])
    return 2 * size**3 / min(seconds)


def figures(rounds: Sequence[Round], peak_flops: float | None) -> dict[str, Any]:
    """Medians over rounds, of what was timed in all of them."""
    facts = rounds[0][0]
    names = [name for name in rounds[0][1] if all(name in seconds for _, seconds in rounds)]
    middle = {name: statistics.median(seconds[name] for _, seconds in rounds) for name in names}
    ours = middle["forward and backward"]
    theirs = {name: seconds for name, seconds in middle.items() if name not in PARTS}
    return {
        "bare_fraction": theirs["bare"] / ours if "bare" in theirs else None,
        "padded_speedup": theirs["padded"] / ours if "padded" in theirs else None,
        "mfu": facts.step_flops / (ours + middle["clip and optimizer"]) / peak_flops if peak_flops else None,
        "peak_bytes": facts.peak_bytes,
        "peak_flops": peak_flops,
        "tokens": facts.tokens,
        "tokens_per_s": {name: facts.tokens / seconds for name, seconds in {"learner": ours, **theirs}.items()},
        "part_s": {name: middle[name] for name in PARTS},
    }


def show(options: argparse.Namespace, machine: dict[str, Any], rounds: Sequence[Round]) -> None:
    metrics = figures(rounds, device_peak(options))
    facts, ours, whole = rounds[0][0], metrics["tokens_per_s"]["learner"], sum(metrics["part_s"].values())
    rows = [[name, f"{rate:,.0f}", f"{ours / rate:.3f}"] for name, rate in metrics["tokens_per_s"].items()]
    rows += [[f"  {name}", f"{1000 * s:.1f} ms", f"{100 * s / whole:.1f} %"] for name, s in metrics["part_s"].items()]
    title = f"{options.model}: {facts.parameters:,} parameters, {facts.tokens:,} tokens in {facts.rows} rows"
    header = ("forward and backward", "tokens/s", "learner is")
    finish("learner", title, header, rows, config=vars(options), metrics=metrics, environment=machine)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench learner", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds of 32 trajectories")
    parser.add_argument("--long", action="store_true", help="long rows and a large vocabulary, on the CPU")
    parser.add_argument("--plain-limit-gb", type=at_least(1), default=8, help="with --long: no plain head beyond it")
    parser.add_argument("--model", choices=("tiny", *SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the passes; default: the device's")
    parser.add_argument("--threads", type=at_least(1), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=at_least(32), help="tokens of every trajectory; default: the quick start's")
    parser.add_argument("--trajectories", type=at_least(1))
    parser.add_argument("--micro-batch-tokens", type=at_least(1), help="default: the learner's, or the context")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed again")
    parser.add_argument("--lora", type=at_least(0), default=0, help="rank of adapters; 0: all weights are trained")
    parser.add_argument("--rounds", type=at_least(1))
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, where others use the machine too")
    options = parser.parse_args(given)
    if options.cpu_time and (options.device, options.threads) != ("cpu", 1):
        parser.error("--cpu-time needs --device cpu --threads 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: PyTorch finds no GPU here")
    if options.long and options.device == "cuda":
        parser.error("argument --long: its figures are of a process on the CPU")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.micro_batch_tokens = options.micro_batch_tokens or options.context or LearnerConfig().micro_batch_tokens
    fill(options, trajectories=(4, 4) if options.context else (32, 128), rounds=(3, 9))
    return options


def main() -> None:
    options, machine = arguments(), environment()
    if options.long:
        run_long_rows(options, machine)
        return
    keep_freed_memory()  # as the learner's process does
    listen_on("lo")
    rounds: list[Round] = []

    def run() -> None:
        with tempfile.TemporaryDirectory() as name:
            backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{name}/store", rank=0, world_size=1)
            try:
                for found in measure(options, Path(name)):
                    rounds.append(found)  # one by one: Ctrl-C keeps them
            finally:
                dist.destroy_process_group()

    interruptible(run, lambda: show(options, machine, rounds), rounds)
