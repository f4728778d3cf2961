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
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from algo.loss import LossSums, policy_loss
from algo.pack import MicroBatch, MiniBatch, plan
from algo.publish import Publisher, export
from engine.types import Batch

if TYPE_CHECKING:
    from algo.learner import LearnerConfig

# Rows of logits at once; with a vocabulary of 150k in fp32 that is 0.6 GB, and it is recomputed in the backward pass.
LOGIT_ROWS = 1024
# Below this many logits in all they are kept for the backward pass: recomputing would cost more than 64 MB is worth.
KEPT_LOGITS = 1 << 24
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
    dist.init_process_group("gloo", timeout=timedelta(days=1))


def broadcast(frames: list[bytes] | None) -> list[bytes]:
    """Rank 0's frames on every rank; the others give None."""
    packed = bytearray(msgspec.msgpack.encode(frames)) if frames else bytearray()
    size = torch.tensor([len(packed)])
    dist.broadcast(size, 0)
    content = torch.frombuffer(packed or bytearray(int(size)), dtype=torch.uint8)
    dist.broadcast(content, 0)
    return msgspec.msgpack.decode(content.numpy(), type=list[bytes])


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
        score = partial(checkpoint, self._score, use_reentrant=False) if recompute else self._score
        chunks = zip(hidden_MH.split(LOGIT_ROWS), targets_M.split(LOGIT_ROWS), strict=True)
        logprobs, entropies = zip(*(score(*chunk) for chunk in chunks), strict=True)
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
        torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()
        self.config, self.source, self.seed = config, source, seed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.scorer = _shard(Scorer(model.train()))
        self.optimizer = torch.optim.AdamW(
            self.scorer.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.canary = _canary_batch(canary)
        self.trained_batches = 0
        self.publisher = Publisher(self.scorer, weights_dir, config.weight_transfer, config.weights_dtype)
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
        metrics["train_s"] = time.perf_counter() - started
        metrics["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        return metrics

    def _update(self, minibatch: MiniBatch) -> dict[str, float]:
        """Forward and backward over this rank's microbatches, then one optimizer step."""
        micros = minibatch.ranks[self.rank]
        counts = []
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            self.scorer.set_requires_gradient_sync(last)
            self.scorer.set_reshard_after_backward(last)
            counts.append(self._backward(micro, minibatch.loss_tokens))
        gradients = [parameter.grad.to_local() for parameter in self.scorer.parameters() if parameter.grad is not None]
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum(0, keepdim=True)
        sums, maxima = torch.stack(counts).split([len(SUMS), len(MAXIMA)], dim=1)
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
        logprobs_M, entropy_M = self.scorer(
            torch.from_numpy(micro.token_ids_RL), torch.from_numpy(micro.positions_M), torch.from_numpy(micro.targets_M)
        )
        loss, counts = policy_loss(
            logprobs_M,
            torch.from_numpy(micro.old_logprobs_M),
            torch.from_numpy(micro.advantages_M),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            total_tokens=loss_tokens,
        )
        (loss * self.world_size).backward()  # FSDP averages over ranks; the loss already counts the tokens of all
        return torch.stack([part.detach().double() for part in (loss, entropy_M.sum(), *counts)])

    def score_canary(self) -> NDArray[np.float32]:
        """log p(ids[1:]) of each fixed sequence under the current weights, concatenated.

        The weights stay gathered until the next backward pass; nothing changes them before that.
        """
        with torch.no_grad():
            logprobs_M, _ = self.scorer(*self.canary)
        return logprobs_M.numpy()

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


def _shard(scorer: Scorer) -> Scorer:
    """FSDP2 per decoder layer and on the root.

    Weights stay gathered between forward and backward: memory is not scarce where this runs in fp32 on the CPU, and
    gathering again costs more than it saves.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*scorer.model.base_model.layers, scorer):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return scorer


def _canary_batch(canary: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """The Scorer's arguments for all sequences at once; one row without a target when there is none."""
    ids_RL = pad_sequence([torch.tensor(ids) for ids in canary or [[0, 0]]], batch_first=True)
    targets_R = torch.tensor([len(ids) - 1 for ids in canary or [[0]]])
    chosen_RL = torch.arange(ids_RL.shape[1] - 1) < targets_R[:, None]
    return ids_RL[:, :-1].contiguous(), chosen_RL.flatten().nonzero().flatten(), ids_RL[:, 1:][chosen_RL]
