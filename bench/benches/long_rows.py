"""What does a long row cost the learner, and what would the plain head of transformers take for it?

    rocstar bench long_rows [rounds=3] [tokens=1024,4096] [dtype=bfloat16] [plain_limit_gb=8]

A row is one trajectory, of which every token but the first is a target. *learner*: its passes (`Trainer`: packed row,
log-probabilities and entropies in chunks, policy loss). *plain*: the same checkpoint in transformers, whose forward
pass makes the logits of all tokens and takes their cross-entropy. Both go forward and backward once, after a short row
that warms up; neither updates the weights. The model has two narrow layers: the head is measured.

Each measure has a process of its own, and its peak is that process's largest resident memory, torch itself and the
weights included. Where the plain head would need more than the limit it is not run, and `plain head` says what its
logits alone would need.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.hosts import listen_on
from algo.learner.learner import keep_freed_memory
from algo.learner.pack import MiniBatch, plan
from algo.learner.trainer import Trainer
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import megabytes, rate
from bench.measuring.terminal import say
from engine.types import Batch
from sandbox.require import Rule, at_least, require_fields

SMALL_VOCABULARY, LARGE_VOCABULARY = 8192, 151_936  # the second one is Qwen's
WARM_UP_TOKENS = 256
GB = 1e9

Dtype = Literal["float32", "bfloat16"]
Side = Literal["learner", "plain"]


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "measures of each row"] = 3
    tokens: Annotated[tuple[int, ...], "lengths of rows; the longest also with a large vocabulary"] = (1024, 4096)
    dtype: Annotated[Dtype, "of the passes"] = "bfloat16"
    threads: Annotated[int, "threads of PyTorch"] = len(os.sched_getaffinity(0))
    plain_limit_gb: Annotated[float, "no plain head beyond it"] = 8.0

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "threads")
        require_fields(self, Rule("lengths of at least 2", lambda value: value and min(value) >= 2), "tokens")


METRICS = {
    "tokens_per_s": rate("tokens/s", "of forward and backward"),
    "peak_bytes": megabytes("peak", "largest resident memory of the process", form=",.0f"),
    "plain_head_bytes": megabytes("plain head", "what its logits and their gradients need, computed", form=",.0f"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measure."""

    side: Side
    tokens: int
    vocabulary: int
    dtype: Dtype
    threads: int

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, vocabulary {self.vocabulary}/{self.side}"

    @property
    def plain_head_bytes(self) -> int:
        """Logits, their log-softmax and its gradient, the last two in fp32; in bf16 an fp32 copy of the logits too, and
        the gradient in bf16.
        """
        per_logit = 12 if self.dtype == "float32" else 2 + 4 + 4 + 4 + 2
        return per_logit * self.tokens * self.vocabulary


def cases(options: Options) -> Iterator[Case]:
    rows = [(tokens, SMALL_VOCABULARY) for tokens in options.tokens] + [(max(options.tokens), LARGE_VOCABULARY)]
    sides: tuple[Side, ...] = ("learner", "plain")
    for tokens, vocabulary in rows:
        for side in sides:
            yield Case(side=side, tokens=tokens, vocabulary=vocabulary, dtype=options.dtype, threads=options.threads)


def measure(options: Options, keep: Keep) -> None:
    for number in range(options.rounds):
        figures = {}
        for case in cases(options):
            say(f"round {number + 1} of {options.rounds}: {case.name}")
            figures[case.name] = measured(case, options.plain_limit_gb * GB)
        keep(figures)


def measured(case: Case, plain_limit_bytes: float) -> dict[str, float]:
    """Measures a case in a process of its own, or computes what its plain head would need."""
    if case.side == "plain" and case.plain_head_bytes > plain_limit_bytes:
        return {"plain_head_bytes": case.plain_head_bytes}
    with tempfile.TemporaryDirectory() as folder:
        _process("write", case, Path(folder))
        result: dict[str, float] = json.loads(_process("measure", case, Path(folder)).splitlines()[-1])
    return result


def _process(what: str, case: Case, folder: Path) -> bytes:
    command = [sys.executable, "-m", "bench.benches.long_rows", what, json.dumps(asdict(case)), str(folder)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def write_model(case: Case, folder: Path) -> None:
    """Writes a random checkpoint."""
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


def measure_here(case: Case, source: Path) -> dict[str, float]:
    """Measures a case in this process, which does nothing else."""
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
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"tokens_per_s": case.tokens / seconds, "peak_bytes": peak_bytes}


def learner_passes(case: Case, source: Path, folder: Path) -> Callable[[int], None]:
    """Returns the learner's forward and backward pass over a row of so many tokens."""
    config = LearnerConfig(threads=case.threads, dtype=case.dtype)
    trainer = Trainer(config, source, [], folder, seed=0)

    def passes(tokens: int) -> None:
        trainer.passes(packed(case, tokens))
        trainer.optimizer.zero_grad(set_to_none=True)

    return passes


def packed(case: Case, tokens: int) -> MiniBatch:
    """Returns one row of one trajectory."""
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


def plain_passes(case: Case, source: Path) -> Callable[[int], None]:
    """Returns the same in transformers alone, with its own loss."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, case.dtype), attn_implementation="sdpa")

    def passes(tokens: int) -> None:
        ids_RL = torch.randint(case.vocabulary, (1, tokens))
        model(input_ids=ids_RL, labels=ids_RL, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return passes


def main() -> None:
    """Runs one measure in this process: `write` or `measure`, a case, the folder of its checkpoint."""
    what, case, folder = sys.argv[1], Case(**json.loads(sys.argv[2])), Path(sys.argv[3])
    if what == "write":
        write_model(case, folder)
    else:
        print(json.dumps(measure_here(case, folder)))


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("tokens_per_s", "peak_bytes"),
    quick={"rounds": "1", "tokens": "512,1024"},
)

if __name__ == "__main__":
    main()
