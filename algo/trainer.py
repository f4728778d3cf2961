"""The model under training: an HF causal language model sharded with FSDP2, its optimizer, and what it publishes.

Invariants
- The loss is a mean over the tokens of the whole minibatch: neither the cut into microbatches nor the number of ranks
  changes it beyond rounding.
- A non-finite loss or gradient raises `Diverged` before the weights are touched.
- Same checkpoint, batches, seed and number of threads give the same weights bit by bit.

Shape legend: R rows and L columns of a microbatch, M positions with loss, V vocabulary, H hidden size.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from algo.flops import peak_of
from algo.loss import LossSums, policy_loss
from algo.model import choose_device, is_tight, load, reshard
from algo.pack import MicroBatch, MiniBatch, plan
from algo.publish import Publisher, export
from engine.types import Batch

if TYPE_CHECKING:
    from algo.learner import LearnerConfig

# What a forward and backward pass counts, in this order: what is added up over passes and ranks, and maxima.
SUMS = ("loss", "entropy", *LossSums._fields[:-2])
MAXIMA = LossSums._fields[-2:]


class Diverged(RuntimeError):
    """Loss or gradient is not finite; the weights are those before the update."""


def join_group() -> None:
    """This process becomes a rank of the learner. Raises OSError when the launcher is gone."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The launcher serves the store. One that died before it could take us along leaves no rank waiting for it.
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10).close()
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: do not depend on its host name
    # A rank that waits for the next request waits as long as the rollouts take; a dead rank is seen by the launcher.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=1))


def broadcast(frames: list[bytes] | None) -> list[bytes]:
    """Rank 0's frames on every rank; the others give None."""
    packed = bytearray(msgspec.msgpack.encode(frames)) if frames else bytearray()
    size = torch.tensor([len(packed)])
    dist.broadcast(size, 0)
    content = torch.frombuffer(packed or bytearray(int(size)), dtype=torch.uint8)
    dist.broadcast(content, 0)
    return msgspec.msgpack.decode(content.numpy(), type=list[bytes])


class Trainer:
    """One rank's share of model and optimizer. Every method is a collective: all ranks call it with equal arguments."""

    def __init__(
        self, config: LearnerConfig, source: Path, canary: Sequence[Sequence[int]], weights_dir: Path, seed: int
    ) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(config.threads)
        self.config, self.source, self.seed = config, source, seed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = choose_device(config.device)
        self.scorer, self.cost = load(config, source)
        self.trained = [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]
        self.parameters = sum(parameter.numel() for parameter in self.scorer.parameters())
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.peak_flops = config.peak_flops or (
            peak_of(torch.cuda.get_device_name()) if self.device.type == "cuda" else None
        )
        self.tight = is_tight(config)
        self.canary = [ids for ids in canary if len(ids) > 1]
        self.trained_batches = 0
        self.publisher = Publisher(self.scorer, weights_dir)
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
            self.trained_batches += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.lr * min(1.0, self.trained_batches / max(1, self.config.warmup_steps))
            results = [self._update(minibatch) for minibatch in minibatches]
            metrics |= _summary(results)
            metrics["padding_waste"] = float(np.mean([minibatch.padding_waste for minibatch in minibatches]))
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        return metrics | self._speed(minibatches, started)

    def _speed(self, minibatches: Sequence[MiniBatch], started: float) -> dict[str, float]:
        """Seconds since `started`, what they were used for, and the largest memory of this rank's process so far.

        tokens_per_s counts inputs (prompts and tools' responses too). mfu: share of the peak of all ranks that the
        model's own operations are; left out where the peak is unknown.
        """
        lengths = [n for minibatch in minibatches for n in minibatch.lengths]
        targets = sum(minibatch.loss_tokens for minibatch in minibatches)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            peak_bytes = float(torch.cuda.max_memory_allocated())
        else:
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        seconds = time.perf_counter() - started
        speed = {"train_s": seconds, "tokens_per_s": sum(lengths) / seconds, "peak_bytes": peak_bytes}
        if self.peak_flops:
            needed = self.cost.of(targets=targets, lengths=lengths)
            speed["mfu"] = needed / (seconds * self.peak_flops * self.world_size)
        return speed

    def _update(self, minibatch: MiniBatch) -> dict[str, float]:
        """Forward and backward over this rank's microbatches, then one optimizer step."""
        return self._step(self._passes(minibatch))

    def _passes(self, minibatch: MiniBatch) -> Tensor:
        """The gradient of a minibatch; returns what its passes count (`_backward`), a row each."""
        micros = minibatch.ranks[self.rank]
        counts = []
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            self.scorer.set_requires_gradient_sync(last or self.tight)
            self.scorer.set_reshard_after_backward(last or self.tight)
            counts.append(self._backward(micro, minibatch.loss_tokens))
        return torch.stack(counts)

    def _step(self, counts: Tensor) -> dict[str, float]:
        """One optimizer step with the clipped gradient; sums and maxima over passes and ranks. Raises Diverged."""
        gradients = [parameter.grad.to_local() for parameter in self.trained if parameter.grad is not None]
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum(0, keepdim=True)
        sums, maxima = counts.split([len(SUMS), len(MAXIMA)], dim=1)
        sums, maxima = torch.cat([sums.sum(0), square]), maxima.amax(0)
        if self.world_size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
        result = dict(zip((*SUMS, "square", *MAXIMA), torch.cat([sums, maxima]).tolist(), strict=True))
        norm = result["grad_norm"] = result.pop("square") ** 0.5
        if not np.isfinite([result["loss"], norm]).all():
            numbers = f"loss {result['loss']}, grad_norm {norm}, ratio_max {result['ratio_max']}"
            raise Diverged(f"not finite: {numbers}; the weights were not updated")
        if norm + 1e-6 > self.config.grad_clip:
            torch._foreach_mul_(gradients, self.config.grad_clip / (norm + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _backward(self, micro: MicroBatch, loss_tokens: int) -> Tensor:
        """Adds the gradient of a microbatch; returns its SUMS and MAXIMA, float64."""
        here = partial(_tensor, device=self.device)
        inputs = here(micro.token_ids_RL), here(micro.position_ids_RL), micro.lengths_S.tolist()
        logprobs_M, entropy_M = self.scorer(*inputs, here(micro.positions_M), here(micro.targets_M))
        loss, counts = policy_loss(
            logprobs_M,
            here(micro.old_logprobs_M),
            here(micro.advantages_M),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            total_tokens=loss_tokens,
        )
        (loss * self.world_size).backward()  # FSDP averages over ranks; the loss already counts the tokens of all
        return torch.stack([part.detach().double() for part in (loss, entropy_M.sum(), *counts)])

    def score_canary(self) -> NDArray[np.float32]:
        """log p(ids[1:]) of each fixed sequence under the current weights, concatenated."""
        inputs = [np.asarray(ids[:-1]) for ids in self.canary] or [np.zeros(1, np.int64)]
        targets_M = np.asarray([target for ids in self.canary for target in ids[1:]], np.int64)
        rows = np.concatenate(inputs)[None], np.concatenate([np.arange(len(ids)) for ids in inputs])[None]
        here = partial(_tensor, device=self.device)
        with torch.no_grad():
            chosen = here(np.arange(len(targets_M))), here(targets_M)
            logprobs_M, _ = self.scorer(*map(here, rows), [len(ids) for ids in inputs], *chosen)
        reshard(self.scorer)
        return logprobs_M.cpu().numpy()

    def save(self, path: Path) -> None:
        """A Hugging Face checkpoint (`algo.publish.export`). Raises OSError or SafetensorError."""
        export(self.scorer, self.source, path)


def _summary(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its minibatches; the mismatch is that before any update."""
    tokens = sum(result["tokens"] for result in results)
    means = {
        name: sum(result[name] for result in results) / tokens for name in ("clip_low", "clip_high", "kl", "entropy")
    }
    return means | {
        "tokens": tokens,
        "loss": sum(result["loss"] * result["tokens"] for result in results) / tokens,
        "grad_norm": max(result["grad_norm"] for result in results),
        "ratio_mean": sum(result["ratio"] for result in results) / tokens,
        "ratio_max": max(result["ratio_max"] for result in results),
        "mismatch_max": results[0]["mismatch_max"],
    }


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
