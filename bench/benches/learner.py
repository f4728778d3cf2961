"""How far is the learner from the bare forward and backward pass of its model, and what does each part cost?

    rocstar bench learner [rounds=9] [model=tiny|tiny-moe|30m|135m|qwen3-1.7b|qwen3-4b|14b-8l|30b-a3b-4l]
                          [device=cuda context=16384]

In one process, in shuffled rounds, over the same trajectories:

learner      packed rows, policy loss, entropy and statistics, FSDP2 on one rank
bare         the same Hugging Face model on the same rows with the same attention, logits at the targets only,
             cross-entropy
dense mask   bare with transformers' own attention ("sdpa")
padded       what is usual without packing: random order, padded on the right to a pass's longest row

Tokens are real inputs. Weights are random, except for the tiny models. With long trajectories only the first two run.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from algo.learner.config import Checkpointing, FlashAttention, LearnerConfig
from algo.learner.hosts import listen_on
from algo.learner.learner import keep_freed_memory
from algo.learner.model.attention import PACKED, bounds, register
from algo.learner.pack import MicroBatch, MiniBatch, plan
from algo.learner.trainer import Trainer
from bench.benches.shapes import fields_of, is_mixture
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import Kind, megabytes, milliseconds, rate, ratio, share
from bench.measuring.result import Figures
from bench.measuring.terminal import say
from engine.learner.gpu_peaks import peak_of
from engine.types import Batch
from recipes.tiny.task import SHIPPED
from sandbox.require import at_least, none_or, require_fields

VOCABULARIES = {"135m": 49152, "30m": 4096}
QWEN_VOCABULARY = 151936  # of all others
UNTIED = ("14b-8l", "30b-a3b-4l")  # their head is no copy of the embeddings
SHIPPED_MODELS = {"tiny": SHIPPED, "tiny-moe": SHIPPED.with_name("agent_moe")}
PARTS = {"plan": "plan_s", "passes": "passes_s", "optimizer": "optimizer_s", "publish": "publish_s"}


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "passes of each contender"] = 9
    model: Annotated[
        Literal["tiny", "tiny-moe", "30m", "135m", "qwen3-1.7b", "qwen3-4b", "14b-8l", "30b-a3b-4l"],
        "shape of the model",
    ] = "tiny"
    device: Annotated[Literal["cpu", "cuda"], "where it runs"] = "cpu"
    dtype: Annotated[Literal["float32", "bfloat16"] | None, "of the passes; none: the device's"] = None
    threads: Annotated[int, "threads of PyTorch"] = len(os.sched_getaffinity(0))
    context: Annotated[int | None, "tokens of every trajectory; none: the quick start's lengths"] = None
    trajectories: Annotated[int, "trajectories of a pass"] = 128
    micro_batch_tokens: Annotated[int | None, "tokens of a row; none: the learner's, or the context"] = None
    checkpointing: Annotated[Checkpointing, "what of the activations is computed again"] = "none"
    offload: Annotated[bool, "with full checkpointing, keep the layers' inputs in host memory"] = False
    flash_attention: Annotated[FlashAttention, "kernels of packed attention on a GPU"] = "FA2"
    lora: Annotated[int, "rank of adapters; 0: all weights are trained"] = 0
    only: Annotated[
        Literal["all", "learner", "bare"], "all: the others too, beside the learner; on a GPU one fits where two do not"
    ] = "all"
    cpu_time: Annotated[bool, "CPU time of one thread, where others use the machine too"] = False

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "threads", "trajectories")
        require_fields(self, at_least(0), "lora")
        require_fields(self, none_or(at_least(32)), "context")
        require_fields(self, none_or(at_least(1)), "micro_batch_tokens")
        if self.lora and self.mixture:
            raise ValueError(f"lora must be 0 for {self.model}, whose experts get no adapters, got {self.lora}")
        if self.offload and self.only == "bare":
            raise ValueError("offload must be false for the bare model, got true")
        if self.cpu_time and (self.device, self.threads) != ("cpu", 1):
            raise ValueError("cpu_time must be false unless device=cpu and threads=1, got true")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be cpu here, got 'cuda': PyTorch finds no GPU")

    @property
    def mixture(self) -> bool:
        return self.model == "tiny-moe" or is_mixture(self.model)

    @property
    def row_tokens(self) -> int:
        return self.micro_batch_tokens or self.context or LearnerConfig().micro_batch_tokens

    @property
    def passes_dtype(self) -> Literal["float32", "bfloat16"]:
        return self.dtype or ("bfloat16" if self.device == "cuda" else "float32")


METRICS = {
    "tokens_per_s": rate("tokens/s", "of forward and backward"),
    "learner_is": ratio("learner is", "the learner's tokens/s over its own, in the same round", form=".3f"),
    "plan_s": milliseconds("plan", "the batch is cut into rows"),
    "passes_s": milliseconds("passes", "forward and backward"),
    "optimizer_s": milliseconds("optimizer", "clipping and the optimizer's step"),
    "publish_s": milliseconds("publish", "a version is written"),
    "mfu": share(
        "MFU", "necessary operations over the device's peak (datasheet; on the CPU a matrix product)", kind=Kind.RATIO
    ),
    "peak_bytes": megabytes("peak", "most memory of two steps, before the others are made"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The same trajectories, packed as the learner packs them."""

    batch: Batch
    packed: MiniBatch
    tokens: int

    @property
    def micros(self) -> Sequence[MicroBatch]:
        return self.packed.micros


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What does not change from round to round. step_flops: the learner's necessary operations."""

    tokens: int
    step_flops: float
    peak_bytes: int
    peak_flops: float | None


class Clock:
    """Takes the seconds of named pieces of work; on a GPU until it has done them."""

    def __init__(self, options: Options) -> None:
        self.now = time.process_time if options.cpu_time else time.perf_counter
        self.seconds: dict[str, float] = {}
        self._on_gpu = options.device == "cuda"

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        self._wait()
        started = self.now()
        result = work()
        self._wait()
        self.seconds[name] = self.now() - started
        return result

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def measure(options: Options, keep: Keep) -> None:
    keep_freed_memory()  # as the learner's process does
    listen_on("lo")
    with tempfile.TemporaryDirectory() as name:
        backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{name}/store", rank=0, world_size=1)
        try:
            _measure(options, Path(name), keep)
        finally:
            dist.destroy_process_group()


def _measure(options: Options, folder: Path, keep: Keep) -> None:
    source = model_of(options, folder / "model")
    if options.only == "bare":
        measure_bare(options, source, keep)
        return
    config = LearnerConfig(
        lr=1e-6,
        threads=options.threads,
        dtype=options.passes_dtype,
        device=options.device,
        micro_batch_tokens=options.row_tokens,
        activation_checkpointing=options.checkpointing,
        activation_offload=options.offload,
        flash_attention=options.flash_attention,
        lora_rank=options.lora,
    )
    trainer = Trainer(config, source, [], folder, seed=0)
    batch = trajectories(options, trainer.scorer.model.config.vocab_size)
    (packed,) = plan(batch, minibatches=1, micro_batch_tokens=options.row_tokens, ranks=1, seed=0)
    load = Load(batch=batch, packed=packed, tokens=sum(packed.lengths))
    say(f"{options.model}: {trainer.parameters:,} parameters, {load.tokens:,} tokens in {len(load.micros)} rows")
    for number in (0, 1):  # the second one's passes run beside the optimizer's state
        learner_step(trainer, load, Clock(options), number)
    facts = Facts(
        tokens=load.tokens,
        step_flops=trainer.cost.of(targets=packed.loss_tokens, lengths=packed.lengths),
        peak_bytes=peak_bytes(options.device),  # before the contenders are there
        peak_flops=device_peak(options),
    )
    try:
        work = contenders(source, options, load) if options.only == "all" else {}
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
            keep(figures(facts, clock.seconds))


def measure_bare(options: Options, source: Path, keep: Keep) -> None:
    """Measures the bare model without a learner in the same memory."""
    batch = trajectories(options, AutoConfig.from_pretrained(source).vocab_size)
    (packed,) = plan(batch, minibatches=1, micro_batch_tokens=options.row_tokens, ranks=1, seed=0)
    load = Load(batch=batch, packed=packed, tokens=sum(packed.lengths))
    model, clock = bare_model(source, options, PACKED), Clock(options)
    for number in range(options.rounds + 1):
        say(f"round {number} of {options.rounds}")
        clock.time("bare", lambda: bare(model, load, options.device, PACKED))
        if number:  # the first one warms up
            keep({"bare": {"tokens_per_s": load.tokens / clock.seconds["bare"]}})


def model_of(options: Options, folder: Path) -> Path:
    """Returns the checkpoint; a random one is written by a process of its own, whose memory is not the learner's."""
    if options.model in SHIPPED_MODELS:
        return SHIPPED_MODELS[options.model]
    given = (options.model, options.device, str(folder))
    code = f"from bench.benches.learner import write_model; write_model{given}"
    subprocess.run([sys.executable, "-c", code], check=True)
    return folder


def write_model(model: str, device: str, folder: str) -> None:
    """Writes a random checkpoint."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **fields_of(model),
        vocab_size=VOCABULARIES.get(model, QWEN_VOCABULARY),
        tie_word_embeddings=model not in UNTIED,
        max_position_embeddings=32768,
    )
    with torch.device(device):
        written = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    written.to(torch.bfloat16).save_pretrained(folder)


def trajectories(options: Options, vocabulary: int) -> Batch:
    """Makes lengths like the quick start's (log-normal around 100), or of the whole context; half is sampled."""
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


def learner_step(trainer: Trainer, load: Load, clock: Clock, number: int) -> None:
    """Times each part that a batch passes through."""
    micro_batch_tokens = trainer.config.micro_batch_tokens
    clock.time("plan", lambda: plan(load.batch, minibatches=1, micro_batch_tokens=micro_batch_tokens, ranks=1, seed=0))
    passed = clock.time("passes", lambda: trainer.passes(load.packed))
    clock.time("optimizer", lambda: trainer.step(load.packed, *passed))
    clock.time("publish", lambda: trainer.publisher.publish(number))


def contenders(source: Path, options: Options, load: Load) -> dict[str, Callable[[], None]]:
    """Returns the contenders by name; with a long context only the strictest, for the memory of it."""
    packed = bare_model(source, options, PACKED)
    work: dict[str, Callable[[], None]] = {"bare": partial(bare, packed, load, options.device, PACKED)}
    if not options.context:
        dense = bare_model(source, options, "sdpa")
        passes = padded_passes(load.batch, options.row_tokens)
        work["dense mask"] = partial(bare, dense, load, options.device, "sdpa")
        work["padded"] = partial(padded, dense, passes, options.device)
    return work


def bare_model(source: Path, options: Options, attention: str) -> nn.Module:
    """Returns the model with the learner's dtype, checkpointing and trained weights."""
    register()
    dtype = getattr(torch, options.passes_dtype)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attention)
    if options.lora:
        from algo.learner.model.lora import add_adapters

        add_adapters(model, LearnerConfig(lora_rank=options.lora))
    if options.checkpointing != "none":
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
    """Returns (ids, attention mask, mask of positions before a target), each [R, L]. R x L is at most the limit."""
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
    for host_ids_RL, mask_RL, host_chosen_RL in passes:
        ids_RL, chosen_RL = host_ids_RL.to(device), host_chosen_RL.to(device)
        logits_RLV = model(input_ids=ids_RL, attention_mask=mask_RL.to(device), use_cache=False).logits[:, :-1]
        cross_entropy(logits_RLV[chosen_RL].float(), ids_RL[:, 1:][chosen_RL], reduction="sum").backward()
    model.zero_grad(set_to_none=True)


def time_contender(name: str, work: dict[str, Callable[[], None]], clock: Clock) -> None:
    """Times a contender. One that runs out of memory beside the learner is left out of `work` from then on."""
    try:
        clock.time(name, work[name])
    except torch.OutOfMemoryError:
        say(f"{name} runs out of memory beside the learner: it is left out")
        del work[name]
        torch.cuda.empty_cache()


def peak_bytes(device: str) -> int:
    """Returns the most memory that this process held so far; on a GPU the most that was allocated there."""
    if device == "cuda":
        allocated: int = torch.cuda.max_memory_allocated()
        return allocated
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_peak(options: Options) -> float | None:
    """Returns operations per second: a GPU's datasheet, or on the CPU the best of ten fp32 matrix products."""
    if options.device == "cuda":
        return peak_of(torch.cuda.get_device_name())
    size, seconds = 1024, []
    square, clock = torch.rand(size, size), Clock(options)
    for _ in range(10):
        clock.time("product", lambda: torch.mm(square, square))
        seconds.append(clock.seconds["product"])
    return 2 * size**3 / min(seconds)


def figures(facts: Facts, seconds: Mapping[str, float]) -> Figures:
    """Returns a row for the learner and for each contender that was timed."""
    passes_s = seconds["passes"]
    learner = {
        "tokens_per_s": facts.tokens / passes_s,
        **{metric: seconds[part] for part, metric in PARTS.items()},
        "peak_bytes": facts.peak_bytes,
    }
    if facts.peak_flops:
        learner["mfu"] = facts.step_flops / (passes_s + seconds["optimizer"]) / facts.peak_flops
    others = {name: each_s for name, each_s in seconds.items() if name not in PARTS}
    return {"learner": learner} | {
        name: {"tokens_per_s": facts.tokens / each_s, "learner_is": each_s / passes_s}
        for name, each_s in others.items()
    }


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("tokens_per_s", "learner_is", "passes_s"),
    quick={"rounds": "3", "trajectories": "32"},
)
