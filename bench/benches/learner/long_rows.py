"""What a long row costs the learner, and what the plain head of transformers would take for it.

    python -m bench learner --long [--quick] [--dtype bfloat16] [--threads N] [--plain-limit-gb 8]

A row is one trajectory, of which every token but the first is a target. *learner*: its passes (`Trainer`: packed row,
log-probabilities and entropies in chunks, policy loss). *plain head*: the same checkpoint in transformers, whose
forward pass makes the logits of all tokens and takes their cross-entropy. Both go forward and backward once, after a
short row that warms up; neither updates the weights.

Each measure has a process of its own, and `peak_bytes` is that process's largest resident memory, torch itself and the
weights included. Where the plain head would need more than the limit it is not run, and what it would need is computed
(`plain_head_bytes`): logits alone, without the layers below them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.hosts import listen_on
from algo.learner.learner import keep_freed_memory
from algo.learner.pack import MiniBatch, plan
from algo.learner.trainer import Trainer
from bench.measuring.report import finish, interruptible, say
from engine.types import Batch

SMALL_VOCABULARY, LARGE_VOCABULARY = 8192, 151_936  # the second one is Qwen's
WARM_UP_TOKENS = 256
GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measure: a row of so many tokens on one side, "learner" or "plain"."""

    title: str
    side: str
    tokens: int
    vocabulary: int
    dtype: str
    threads: int

    @property
    def plain_head_bytes(self) -> int:
        """Logits, their log-softmax and its gradient, the last two in fp32; in bf16 an fp32 copy of the logits too, and
        the gradient in bf16.
        """
        per_logit = 12 if self.dtype == "float32" else 2 + 4 + 4 + 4 + 2
        return per_logit * self.tokens * self.vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """seconds and peak_bytes: None where it was not run."""

    case: Case
    seconds: float | None
    peak_bytes: int | None


def cases(options: argparse.Namespace) -> list[Case]:
    short, long = (1024, 4096) if options.quick else (8192, 32768)
    rows = [
        ("short row", short, SMALL_VOCABULARY),
        ("long row", long, SMALL_VOCABULARY),
        ("long row, large vocabulary", long, LARGE_VOCABULARY),
    ]
    return [
        Case(
            title=title,
            side=side,
            tokens=tokens,
            vocabulary=vocabulary,
            dtype=options.dtype,
            threads=options.threads,
        )
        for title, tokens, vocabulary in rows
        for side in ("learner", "plain")
    ]


def write_model(case: Case, folder: Path) -> None:
    """A random checkpoint with two narrow layers: what is measured is the head."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        vocab_size=case.vocabulary,
        max_position_embeddings=case.tokens,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def packed(case: Case, tokens: int) -> MiniBatch:
    """One row of one trajectory; every token but the first is a target."""
    rng = np.random.default_rng(0)
    sampled_N = np.arange(tokens) > 0
    batch = Batch(
        step=0,
        token_ids_N=rng.integers(0, case.vocabulary, tokens).astype(np.int32),
        sampled_N=sampled_N,
        logprobs_N=np.where(sampled_N, -np.log(case.vocabulary), 0.0).astype(np.float32),
        versions_N=np.where(sampled_N, 0, -1).astype(np.int32),
        lengths_B=np.asarray([tokens], np.int32),
        advantages_B=np.ones(1, np.float32),
    )
    (minibatch,) = plan(batch, minibatches=1, micro_batch_tokens=tokens, ranks=1, seed=0)
    return minibatch


def learner_passes(case: Case, source: Path, folder: Path) -> Callable[[int], None]:
    """Forward and backward of the learner over a row of so many tokens."""
    config = LearnerConfig(threads=case.threads, dtype=case.dtype)  # type: ignore[arg-type]
    trainer = Trainer(config, source, [], folder, seed=0)

    def passes(tokens: int) -> None:
        trainer._passes(packed(case, tokens))
        trainer.optimizer.zero_grad(set_to_none=True)

    return passes


def plain_passes(case: Case, source: Path) -> Callable[[int], None]:
    """The same in transformers alone, the loss being its own."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, case.dtype), attn_implementation="sdpa")

    def passes(tokens: int) -> None:
        ids_RL = torch.randint(case.vocabulary, (1, tokens))
        model(input_ids=ids_RL, labels=ids_RL, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return passes


def measure(case: Case, source: Path) -> dict[str, float]:
    """In this process, which does nothing else."""
    keep_freed_memory()  # as the learner's process does
    listen_on("lo")
    torch.set_num_threads(case.threads)
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group("gloo", init_method=f"file://{name}/store", rank=0, world_size=1)
        passes = learner_passes(case, source, Path(name)) if case.side == "learner" else plain_passes(case, source)
        passes(WARM_UP_TOKENS)
        started = time.perf_counter()
        passes(case.tokens)
        seconds = time.perf_counter() - started
        dist.destroy_process_group()
    return {"seconds": seconds, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def in_a_process_of_its_own(what: str, case: Case, folder: Path) -> bytes:
    command = [sys.executable, "-m", "bench.benches.learner.long_rows", what, json.dumps(asdict(case)), str(folder)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def measured(every: Sequence[Case], plain_limit_bytes: float) -> Iterator[Found]:
    for case in every:
        if case.side == "plain" and case.plain_head_bytes > plain_limit_bytes:
            yield Found(case=case, seconds=None, peak_bytes=None)
            continue
        say(f"{case.title}, {case.side}, {case.dtype}")
        with tempfile.TemporaryDirectory() as folder:
            in_a_process_of_its_own("write", case, Path(folder))
            result = json.loads(in_a_process_of_its_own("measure", case, Path(folder)).splitlines()[-1])
        yield Found(case=case, seconds=result["seconds"], peak_bytes=result["peak_bytes"])


def row(found: Found) -> list[str]:
    case = found.case
    head = "learner" if case.side == "learner" else "plain head"
    what = [case.title, f"{case.tokens:,}", f"{case.vocabulary:,}", head, case.dtype]
    if found.seconds is None or found.peak_bytes is None:
        return [*what, "not run", f"would need {case.plain_head_bytes / GB:.1f} GB for logits"]
    return [*what, f"{case.tokens / found.seconds:,.0f}", f"{found.peak_bytes / GB:.2f} GB"]


def show(options: argparse.Namespace, machine: dict[str, Any], every: Sequence[Found]) -> None:
    header = ("row", "tokens", "vocabulary", "head", "dtype", "tokens/s", "peak memory")
    metrics = [
        {
            "title": found.case.title,
            "side": found.case.side,
            "tokens": found.case.tokens,
            "vocabulary": found.case.vocabulary,
            "dtype": found.case.dtype,
            "tokens_per_s": found.case.tokens / found.seconds if found.seconds else None,
            "peak_bytes": found.peak_bytes,
            "plain_head_bytes": found.case.plain_head_bytes,
        }
        for found in every
    ]
    title = f"long rows, forward and backward, {options.threads} threads"
    rows = [row(found) for found in every]
    finish("learner", title, header, rows, config=vars(options), metrics={"rows": metrics}, environment=machine)


def run(options: argparse.Namespace, machine: dict[str, Any]) -> None:
    """The bench."""
    found: list[Found] = []

    def work() -> None:
        for each in measured(cases(options), options.plain_limit_gb * GB):
            found.append(each)  # one by one: Ctrl-C keeps them

    interruptible(work, lambda: show(options, machine, found), found)


def main() -> None:
    """One measure in this process: `write` or `measure`, a case, the folder of its checkpoint."""
    what, case, folder = sys.argv[1], Case(**json.loads(sys.argv[2])), Path(sys.argv[3])
    if what == "write":
        write_model(case, folder)
    else:
        print(json.dumps(measure(case, folder)))


if __name__ == "__main__":
    main()
