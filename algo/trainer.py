"""The model under training: an HF causal language model sharded with FSDP2, its optimizer, and what it publishes.

Invariants
- The loss is a mean over the tokens of the whole minibatch: neither the cut into microbatches nor the number of ranks
  changes it beyond rounding.
- A non-finite loss or gradient raises `Diverged` before the weights are touched.
- A published or saved file appears under its name complete or not at all.
- Same checkpoint, batches, seed and number of threads give the same weights bit by bit.

Shape legend: R rows and L columns of a microbatch, M positions with loss, V vocabulary, H hidden size.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from algo.loss import LossSums, policy_loss
from algo.pack import MicroBatch, MiniBatch, plan
from engine.types import Batch

if TYPE_CHECKING:
    from algo.learner import LearnerConfig

# Rows of logits at once; with a vocabulary of 150k in fp32 that is 0.6 GB, and it is recomputed in the backward pass.
LOGIT_ROWS = 1024
# Below this many logits in all they are kept for the backward pass: recomputing would cost more than 64 MB is worth.
KEPT_LOGITS = 1 << 24


class Diverged(RuntimeError):
    """Loss or gradient is not finite; the weights are those before the update."""


class Scorer(nn.Module):
    """Log-probabilities and entropies at chosen positions; the FSDP root, so that the head runs on gathered weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids_RL: Tensor, positions_M: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        """log p(targets_M) in fp32, and the (detached) entropy there, both [M]."""
        hidden_RLH = self.model.base_model(input_ids=token_ids_RL, use_cache=False).last_hidden_state
        hidden_MH = hidden_RLH.flatten(0, 1).index_select(0, positions_M)
        recompute = len(targets_M) * self.model.config.vocab_size > KEPT_LOGITS
        parts = []
        for start in range(0, max(1, len(targets_M)), LOGIT_ROWS):
            chunk = slice(start, start + LOGIT_ROWS)
            if recompute:
                parts.append(checkpoint(self._score, hidden_MH[chunk], targets_M[chunk], use_reentrant=False))
            else:
                parts.append(self._score(hidden_MH[chunk], targets_M[chunk]))
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(self, hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_MV = self.model.get_output_embeddings()(hidden_MH).float().log_softmax(-1)
        with torch.no_grad():
            entropy_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
        return logprobs_MV.gather(-1, targets_M[:, None]).squeeze(-1), entropy_M


class Trainer:
    """One rank's share of model and optimizer. Every method is a collective: all ranks call it with equal arguments."""

    def __init__(
        self, config: LearnerConfig, source: Path, canary: Sequence[Sequence[int]], weights_dir: Path, seed: int
    ) -> None:
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        self.config, self.source, self.weights_dir, self.seed = config, source, weights_dir, seed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.scorer = _shard(Scorer(model.train()))
        self.optimizer = torch.optim.AdamW(
            self.scorer.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.canary = _canary_batch(canary)
        self.trained_batches = 0
        self.published: list[Path] = []
        gc.collect()
        gc.freeze()  # the model's object graph is large and lives forever: keep it out of every collection

    def train(self, batch: Batch) -> dict[str, float]:
        """One pass over the batch in minibatches, an optimizer step each. Raises Diverged. Empty batch: no update."""
        started = time.perf_counter()
        minibatches = plan(
            batch,
            minibatches=self.config.minibatches,
            micro_batch_tokens=self.config.micro_batch_tokens,
            ranks=self.world_size,
            seed=self.seed,
        )
        metrics = {"trajectories": float(len(batch.lengths_B)), "tokens": 0.0}
        if minibatches:
            self._set_lr()
            results = [self._update(minibatch) for minibatch in minibatches]
            self.trained_batches += 1
            metrics |= _summary(results)
            metrics["padding_waste"] = float(np.mean([minibatch.padding_waste for minibatch in minibatches]))
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["train_s"] = time.perf_counter() - started
        metrics["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        return metrics

    def _set_lr(self) -> None:
        warm = min(1.0, (self.trained_batches + 1) / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * warm

    def _update(self, minibatch: MiniBatch) -> dict[str, float]:
        """Forward and backward over this rank's microbatches, then one optimizer step."""
        micros = minibatch.ranks[self.rank]
        sums = torch.zeros(len(_SUMMED), dtype=torch.float64)
        peaks = torch.zeros(2, dtype=torch.float64)
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            self.scorer.set_requires_gradient_sync(last)
            self.scorer.set_reshard_after_backward(last)
            micro_sums, micro_peaks = self._backward(micro, minibatch.loss_tokens)
            sums += micro_sums
            peaks = torch.maximum(peaks, micro_peaks)
        gradients = [_local(parameter.grad) for parameter in self.scorer.parameters() if parameter.grad is not None]
        norms = torch._foreach_norm(gradients)
        sums[-1] = torch.stack(norms).double().square().sum()
        if self.world_size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(peaks, dist.ReduceOp.MAX)
        result = dict(zip(_SUMMED, sums.tolist(), strict=True)) | dict(zip(_PEAKS, peaks.tolist(), strict=True))
        result["grad_norm"] = result.pop("square") ** 0.5
        if not np.isfinite([result["loss"], result["grad_norm"]]).all():
            names = ("loss", "grad_norm", "ratio_max")
            raise Diverged("not finite: " + ", ".join(f"{name} {result[name]}" for name in names))
        scale = self.config.grad_clip / (result["grad_norm"] + 1e-6)
        if scale < 1.0:
            torch._foreach_mul_(gradients, scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _backward(self, micro: MicroBatch, loss_tokens: int) -> tuple[Tensor, Tensor]:
        old_logprobs_M = torch.from_numpy(micro.old_logprobs_M)
        logprobs_M, entropy_M = self.scorer(
            torch.from_numpy(micro.token_ids_RL), torch.from_numpy(micro.positions_M), torch.from_numpy(micro.targets_M)
        )
        loss, stats = policy_loss(
            logprobs_M,
            old_logprobs_M,
            torch.from_numpy(micro.advantages_M),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            total_tokens=loss_tokens,
            entropy_M=entropy_M,
        )
        (loss * self.world_size).backward()  # FSDP averages over ranks; the loss already counts the tokens of all
        mismatch = (logprobs_M.detach() - old_logprobs_M).abs()
        peaks = torch.stack([stats.ratio_max, mismatch.max() if len(mismatch) else torch.zeros(())])
        return _stack(loss.detach(), stats), peaks.double()

    def score_canary(self) -> NDArray[np.float32]:
        """log p(ids[1:]) of each fixed sequence under the current weights, concatenated.

        The weights stay gathered until the next backward pass; nothing changes them before that.
        """
        with torch.no_grad():
            logprobs_M, _ = self.scorer(*self.canary)
        return logprobs_M.numpy()

    def publish(self, version: int) -> Path:
        """Writes the full fp32 weights for the replicas; keeps this file and the one before it."""
        path = self.weights_dir / f"weights-{version}.safetensors"
        self._write(path, self._full_state())
        self.published = [old for old in self.published if old != path] + [path]
        while len(self.published) > 2:
            old = self.published.pop(0)
            if self.rank == 0:
                old.unlink(missing_ok=True)
        return path

    def save(self, path: Path) -> None:
        """A Hugging Face checkpoint in the dtype of the source, with the source's config and tokenizer files.

        An existing checkpoint at path is replaced at the end. Raises OSError or SafetensorError.
        """
        dtype = source_dtype(self.source)
        state = {name: tensor.to(dtype) for name, tensor in self._full_state().items()}
        if self.rank:
            return
        partial, replaced = (path.with_name(f".{path.name}.{kind}-{os.getpid()}") for kind in ("partial", "replaced"))
        try:
            partial.mkdir(parents=True)
            for file in self.source.iterdir():
                if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
                    shutil.copy(file, partial / file.name)
            save_file(state, partial / "model.safetensors", metadata={"format": "pt"})
            if path.exists():
                path.rename(replaced)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)

    def _full_state(self) -> dict[str, Tensor]:
        """Unsharded weights under their Hugging Face names; a tied head is left out, as Hugging Face does."""
        return {
            name.removeprefix("model."): _full(parameter.detach()).contiguous()
            for name, parameter in self.scorer.named_parameters()
        }

    def _write(self, path: Path, state: dict[str, Tensor]) -> None:
        if self.rank:
            return
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            save_file(state, partial)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)


_SUMMED = ("loss", "tokens", "clip_low", "clip_high", "ratio", "kl", "entropy", "square")
_PEAKS = ("ratio_max", "mismatch")


def _stack(loss: Tensor, stats: LossSums) -> Tensor:
    summed = (stats.tokens, stats.clip_low, stats.clip_high, stats.ratio, stats.kl, stats.entropy)
    return torch.stack([part.double() for part in (loss, *summed, torch.zeros(()))])


def _summary(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its minibatches; the mismatch is that before any update."""
    tokens = sum(result["tokens"] for result in results)

    def mean(name: str) -> float:
        return sum(result[name] for result in results) / tokens

    return {
        "tokens": tokens,
        "loss": sum(result["loss"] * result["tokens"] for result in results) / tokens,
        "grad_norm": max(result["grad_norm"] for result in results),
        "clip_low": mean("clip_low"),
        "clip_high": mean("clip_high"),
        "ratio_mean": mean("ratio"),
        "ratio_max": max(result["ratio_max"] for result in results),
        "kl": mean("kl"),
        "entropy": mean("entropy"),
        "mismatch_max": results[0]["mismatch"],
    }


def _shard(scorer: Scorer) -> Scorer:
    """FSDP2 per decoder layer and on the root. Weights stay gathered between forward and backward: memory is not scarce
    where this runs in fp32 on the CPU, and gathering again costs more than it saves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in scorer.model.base_model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(scorer, mesh=mesh, reshard_after_forward=False)
    return scorer


def _canary_batch(canary: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    columns = max((len(ids) for ids in canary), default=2) - 1
    token_ids_RL = torch.zeros(max(1, len(canary)), columns, dtype=torch.int64)
    positions, targets = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for row, ids in enumerate(canary):
        token_ids_RL[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        positions.append(torch.arange(len(ids) - 1) + row * columns)
        targets.append(torch.tensor(ids[1:]))
    return token_ids_RL, torch.cat(positions), torch.cat(targets)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def source_dtype(source: Path) -> torch.dtype:
    """The dtype that a checkpoint's config declares; float32 when it declares none."""
    config = json.loads((source / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return getattr(torch, name)
