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
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from algo.attention import PACKED, bounds, register
from algo.loss import Tokens, Totals, statistics
from algo.pack import MicroBatch, MiniBatch, plan
from algo.place import Diverged, Mismatched, first_not_finite, worst_mismatch
from algo.plain import build
from algo.publish import Publisher, export
from engine.types import Batch

if TYPE_CHECKING:
    from algo.learner import LearnerConfig

# Rows of logits at once; with a vocabulary of 150k in fp32 that is 0.6 GB, and it is recomputed in the backward pass.
LOGIT_ROWS = 1024
# Below this many logits in all they are kept for the backward pass: recomputing would cost more than 64 MB is worth.
KEPT_LOGITS = 1 << 24
# Ratio and divergence are about the sampler where nothing of the step was learnt yet: in its first minibatch.
BEFORE_THE_UPDATE = ("mismatch_max", "mismatch_fresh_max")


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

    def forward(
        self, token_ids_RL: Tensor, position_ids_RL: Tensor, lengths_S: Tensor, positions_M: Tensor, targets_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """log p(targets_M) in fp32, and the (detached) entropy there, both [M]."""
        hidden_RLH = self.model.base_model(
            input_ids=token_ids_RL, position_ids=position_ids_RL, use_cache=False, **bounds(lengths_S)
        ).last_hidden_state
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
        self.loss = build(config.loss)
        self.proximal = bool(getattr(self.loss, "proximal", False))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        register()
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation=PACKED)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.scorer = _shard(Scorer(model.train()))
        self.optimizer = torch.optim.AdamW(
            self.scorer.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.canary = _canary_batch(canary)
        self.trained_batches = 0
        self.publisher = Publisher(self.scorer, weights_dir)
        gc.collect()
        gc.freeze()  # the model's object graph is large and lives forever: keep it out of every collection

    def train(self, batch: Batch, version: int | None = None) -> dict[str, float]:
        """One pass over the batch in minibatches, an optimizer step each. Empty batch: no update.

        version: of the weights that this makes; those before it have the number below, and tokens of that number are
        checked (`LearnerConfig.mismatch_tolerance`). Raises Diverged or Mismatched.
        """
        started = time.perf_counter()
        minibatches = self._plan(batch, self.config.minibatches)
        metrics = {"trajectories": float(len(batch.lengths_B)), "tokens": 0.0}
        if minibatches:
            self.trained_batches += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.lr_at(self.trained_batches)
            metrics |= _summary(self._updates(minibatches, None if version is None else version - 1))
            metrics["padding_waste"] = float(np.mean([minibatch.padding_waste for minibatch in minibatches]))
            if version is not None:
                staleness = version - 1 - batch.versions_N[batch.sampled_N]
                metrics |= {"staleness_mean": float(staleness.mean()), "staleness_max": float(staleness.max())}
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["train_s"] = time.perf_counter() - started
        metrics["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        return metrics

    def _plan(self, batch: Batch, minibatches: int) -> list[MiniBatch]:
        return plan(
            batch,
            minibatches=minibatches,
            micro_batch_tokens=self.config.micro_batch_tokens,
            ranks=self.world_size,
            seed=self.seed,
        )

    def _updates(self, minibatches: Sequence[MiniBatch], live: int | None) -> list[dict[str, float]]:
        """The optimizer steps of a batch.

        Where the loss asks for it, what follows the first update is scored before it; in the first minibatch the
        forward pass gives the same.
        """
        later = minibatches[1:] if self.proximal else []
        proximal = [None, *([self._logprobs(micro) for micro in part.ranks[self.rank]] for part in later)]
        results: list[dict[str, float]] = []
        for index, minibatch in enumerate(minibatches):
            try:
                before = proximal[index] if self.proximal else None
                results.append(self._update(minibatch, before, live if index == 0 else None))
            except Diverged as error:
                raise Diverged(f"minibatch {index + 1} of {len(minibatches)}: {error}") from error
        return results

    def _update(
        self, minibatch: MiniBatch, proximal: Sequence[Tensor] | None = None, live: int | None = None
    ) -> dict[str, float]:
        """Forward and backward over this rank's microbatches, then one optimizer step."""
        micros = minibatch.ranks[self.rank]
        totals = Totals(minibatch.loss_tokens, minibatch.sequences)
        counts, logprobs = [], []
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            self.scorer.set_requires_gradient_sync(last)
            self.scorer.set_reshard_after_backward(last)
            counted, logprobs_M = self._backward(micro, totals, proximal[index] if proximal else None, live)
            counts.append(counted)
            logprobs.append(logprobs_M)
        gradients = [parameter.grad.to_local() for parameter in self.scorer.parameters() if parameter.grad is not None]
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        result = self._reduced(counts, square)
        norm = result["grad_norm"] = result.pop("square") ** 0.5
        if not np.isfinite([result["loss"], norm]).all():
            numbers = f"loss {result['loss']}, grad_norm {norm}, ratio_max {result['ratio_max']}"
            place = first_not_finite(micros, logprobs, [float(counted["loss"]) for counted in counts])
            raise Diverged(f"not finite: {numbers}; {place}; the weights were not updated")
        tolerance = self.config.mismatch_tolerance
        if live is not None and tolerance is not None and result["mismatch_fresh_max"] > tolerance:
            worst = worst_mismatch(micros, logprobs, live)
            raise Mismatched(
                f"sampler and learner differ on tokens of version {live} by up to {worst.difference:.2e}, tolerance "
                f"{tolerance:.0e} (LearnerConfig.mismatch_tolerance): {worst}; the weights were not updated"
            )
        if norm + 1e-6 > self.config.grad_clip:
            torch._foreach_mul_(gradients, self.config.grad_clip / (norm + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _reduced(self, counts: Sequence[dict[str, Tensor]], square: Tensor) -> dict[str, float]:
        """What the microbatches of all ranks counted: sums, and maxima where the name says so."""
        maxima = [name for name in counts[0] if name.endswith("_max")]
        sums = [name for name in counts[0] if name not in maxima]
        added = torch.stack([*(torch.stack([counted[name] for counted in counts]).sum() for name in sums), square])
        largest = torch.stack([torch.stack([counted[name] for counted in counts]).max() for name in maxima])
        if self.world_size > 1:
            dist.all_reduce(added)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return dict(zip((*sums, "square", *maxima), torch.cat([added, largest]).tolist(), strict=True))

    def _backward(
        self, micro: MicroBatch, totals: Totals, proximal_M: Tensor | None, live: int | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Adds the gradient of a microbatch; returns what it counted, float64, and the log-probabilities [M]."""
        logprobs_M, entropy_M = self._forward(micro)
        if self.proximal and proximal_M is None:
            proximal_M = logprobs_M.detach()
        tokens = Tokens(
            logprobs_M=logprobs_M,
            old_logprobs_M=torch.from_numpy(micro.old_logprobs_M),
            advantages_M=torch.from_numpy(micro.advantages_M),
            sequence_M=torch.from_numpy(micro.sequence_M),
            sequences=micro.sequences,
            versions_M=torch.from_numpy(micro.versions_M),
            proximal_logprobs_M=proximal_M,
        )
        loss, counts = self.loss(tokens, totals)
        (loss * self.world_size).backward()  # FSDP averages over ranks; the loss already counts the tokens of all
        counts = {"loss": loss, "entropy": entropy_M.sum(), **statistics(tokens, live), **counts}
        return {name: part.detach().double() for name, part in counts.items()}, logprobs_M.detach()

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the targets, [M]."""
        names = ("token_ids_RL", "position_ids_RL", "lengths_S", "positions_M", "targets_M")
        return self.scorer(*(torch.from_numpy(getattr(micro, name)) for name in names))

    @torch.no_grad()
    def _logprobs(self, micro: MicroBatch) -> Tensor:
        return self._forward(micro)[0]

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """log p of each sampled token under the current weights, [N] as the batch's; 0 where none was sampled."""
        starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
        logprobs_N = torch.zeros(len(batch.token_ids_N))
        for minibatch in self._plan(batch, 1):
            for micro in minibatch.ranks[self.rank]:
                places_M = starts_B[micro.trajectories_S[micro.sequence_M]]
                places_M = places_M + micro.position_ids_RL.flat[micro.positions_M] + 1
                logprobs_N[torch.from_numpy(places_M)] = self._logprobs(micro)
        if self.world_size > 1:
            dist.all_reduce(logprobs_N)
        return logprobs_N.numpy()

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
    """Metrics of a step from those of its minibatches: per token, or the largest."""
    tokens = sum(result["tokens"] for result in results)
    metrics = {"tokens": tokens, "loss": sum(result["loss"] * result["tokens"] for result in results) / tokens}
    for name in results[0]:
        values = [result[name] for result in results]
        if name in BEFORE_THE_UPDATE:
            metrics[name] = values[0]
        elif name not in ("tokens", "loss"):
            metrics[name] = max(values) if name.endswith("_max") or name == "grad_norm" else sum(values) / tokens
    return metrics


def _shard(scorer: Scorer) -> Scorer:
    """FSDP2 per decoder layer and on the root.

    Weights stay gathered between forward and backward: memory is not scarce where this runs in fp32 on the CPU, and
    gathering again costs more than it saves.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*scorer.model.base_model.layers, scorer):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return scorer


def _canary_batch(canary: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """The Scorer's arguments for all sequences at once; one row without a target when there is none."""
    inputs = [torch.tensor(ids[:-1]) for ids in canary or [[0, 0]]]
    position_ids = [torch.arange(len(ids)) for ids in inputs]
    targets_M = torch.tensor([target for ids in canary for target in ids[1:]], dtype=torch.int64)
    row, positions = (torch.cat(parts)[None] for parts in (inputs, position_ids))
    return row, positions, torch.tensor([len(ids) for ids in inputs]), torch.arange(len(targets_M)), targets_M
