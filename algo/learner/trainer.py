"""Trains a Hugging Face causal language model, sharded with FSDP2, and publishes its weights.

Invariants
- The loss is a mean over the tokens of the whole minibatch: neither its division into microbatches nor the number of
  ranks changes it beyond rounding.
- A non-finite loss or gradient raises `Diverged` before its update is made; the message counts the updates before it.
- The same checkpoint, batches, seed and number of threads give the same weights bit by bit.

Shape legend: R rows and L columns of a microbatch, M positions with loss, J tokens that are scored at each, K of them a
teacher's likeliest, V vocabulary, H hidden size.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from algo.learner import hosts
from algo.learner.canary import Canary
from algo.learner.measure.divergence import Diverged, Mismatched, first_not_finite, mismatch_mean, worst_mismatch
from algo.learner.measure.expert_load import ExpertLoad
from algo.learner.measure.step_metrics import reduced, summary
from algo.learner.measure.tokens import TokenNotes
from algo.learner.model.attention import PACKED
from algo.learner.model.experts import mixture_of
from algo.learner.model.loading import choose_device, load
from algo.learner.model.lora import peft_settings
from algo.learner.model.reference import Reference
from algo.learner.model.routing import RowRoutes, check_shape
from algo.learner.model.scorer import Scorer
from algo.learner.model.sharding import context_of, copies_of, reshard, reshard_between_passes
from algo.learner.optimizer import adamw, set_options
from algo.learner.pack import MicroBatch, MiniBatch, plan
from algo.learner.serialize import from_plain
from algo.learner.state.checkpoint import Checkpoints
from algo.learner.state.export import export
from algo.learner.state.offload import Offloader
from algo.learner.state.publish import Publisher
from algo.loss.interface import Aggregate, Tokens, Totals, aggregated, statistics
from algo.loss.kl import ESTIMATORS
from engine.learner.gpu_peaks import peak_of
from engine.process.heap import Heap
from engine.types import Batch

if TYPE_CHECKING:
    from algo.learner.config import LearnerConfig


def join_group() -> None:
    """Makes this process a rank of the learner, as its launcher says (`engine.learner.launch`)."""
    store, rank = hosts.meet()
    # A rank waits for the next request as long as the rollouts take; a dead rank is noticed by the launcher.
    backend, patience = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timedelta(days=1)
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, timeout=patience, store=store, rank=rank, world_size=size)


def broadcast(frames: list[bytes] | None) -> list[bytes]:
    """Returns rank 0's frames on every rank; the others give None."""
    packed = bytearray(msgspec.msgpack.encode(frames)) if frames else bytearray()
    size = torch.tensor([len(packed)])
    dist.broadcast(size, 0)
    content = torch.frombuffer(packed or bytearray(int(size)), dtype=torch.uint8)
    dist.broadcast(content, 0)
    return msgspec.msgpack.decode(content.numpy(), type=list[bytes])


# A mismatch comes from routing if, with the sampler's routes, this share of it or less is left.
ROUTING_SHARE = 0.5
ONE_TOKEN = 100.0  # times `mismatch_tolerance`: how far one of millions of sampled tokens may be off


class Scored(NamedTuple):
    """Log-probabilities [M] of a minibatch's targets under other weights, one tensor a microbatch; None if not needed.

    proximal: those of the learner before the step's first update. reference: those of the model that training began
    with.
    """

    proximal: Sequence[Tensor] | None = None
    reference: Sequence[Tensor] | None = None

    def of(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns both for one microbatch."""
        proximal_M = None if self.proximal is None else self.proximal[index]
        reference_M = None if self.reference is None else self.reference[index]
        return proximal_M, reference_M


NOTHING_SCORED = Scored()


def _sum_in_order(device: torch.device) -> None:
    """Makes PyTorch sum in the same order each time on the CPU. Otherwise its threads race for the gradient of a token
    that three experts or more share. On a GPU nothing is changed.
    """
    torch.use_deterministic_algorithms(device.type == "cpu", warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write all new memory twice


class Trainer:
    """One rank's share of model and optimizer. Every method is a collective: all ranks call it with equal arguments."""

    def __init__(
        self, config: LearnerConfig, source: Path, canary: Sequence[Sequence[int]], weights_dir: Path, seed: int
    ) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(config.threads)
        self.config, self.source, self.seed = config, source, seed
        self.loss = from_plain(config.loss)
        self.proximal = bool(getattr(self.loss, "proximal", False))
        self.normalizes = bool(getattr(self.loss, "normalizes", False))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = choose_device(config.device)
        _sum_in_order(self.device)
        self.context = context_of(config)  # the ranks that share rows
        self.sharing = config.context_parallel  # how many they are
        self.scorer, self.cost = load(config, source, self.context)
        self.mixtures = mixture_of(self.scorer.model)
        self.copies = copies_of(self.scorer)  # how many ranks hold the same shard of a gradient
        self.reference = Reference(self.scorer, config, source) if config.reference_kl_coef else None
        self.trained = [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]
        self.parameters = sum(parameter.numel() for parameter in self.scorer.parameters())
        self.expert_load = ExpertLoad(self.scorer.model, config.load_balancing_coef, self.device, self.context)
        self.optimizer = adamw(self.trained, config)
        known = peak_of(torch.cuda.get_device_name()) if self.device.type == "cuda" else None
        self.peak_flops = config.peak_flops or known
        self.reshard_between_passes = reshard_between_passes(config)
        self.canary = Canary(canary, self.scorer, config)
        self.trained_batches = 0
        self.heap = Heap()
        self.noted: dict[str, NDArray[np.float32]] = {}  # for the rows that the last step was asked about
        self._notes: TokenNotes | None = None
        self.offloader = Offloader(self.optimizer)  # moves its state to host memory while the replicas have the device
        self.checkpoints = Checkpoints(self.scorer, self.optimizer)
        self.publisher = Publisher(
            self.scorer, weights_dir, config.weight_transfer, config.weights_dtype, peft_settings(config)
        )
        gc.collect()
        gc.freeze()  # the model's object graph is large and lives forever: keep it out of every collection

    def train(self, batch: Batch, version: int | None = None, rows: Sequence[int] = ()) -> dict[str, float]:
        """Trains on a batch once, in minibatches with an optimizer step each; an empty batch makes no update.

        In the first minibatch, whose forward pass runs under the weights before this step, the trajectories that these
        weights alone sampled are checked (`LearnerConfig.mismatch_tolerance`). At staleness 0 that is all of them; if
        steps overlap, few or none, and the metric mismatch_checked is their share of the step's tokens. There only the
        canary, after each update, compares the two sides under the same weights.

        version: the number of the weights that this step makes; those before it have the number below.
        rows: sequences of the batch whose tokens are `noted`.

        Raises Diverged or Mismatched.
        """
        started = time.perf_counter()
        self._notes = TokenNotes(batch.lengths_B, rows) if rows else None
        self.offloader.onload()
        minibatches = self.plan(batch, self.config.minibatches)
        metrics = {"trajectories": float(len(batch.lengths_B)), "tokens": 0.0}
        if batch.routes_NXE is not None:
            check_shape(batch.routes_NXE, self.mixtures)
            metrics["route_bytes"] = batch.routes_NXE.nbytes / max(1, len(batch.token_ids_N))
        if minibatches:
            self.trained_batches += 1
            set_options(self.optimizer, self.config, self.trained_batches)
            metrics |= summary(self.updates(minibatches, None if version is None else version - 1))
            metrics["padding_waste"] = float(np.mean([minibatch.padding_waste for minibatch in minibatches]))
            if version is not None:
                staleness = version - 1 - batch.versions_N[batch.sampled_N]
                metrics |= {"staleness_mean": float(staleness.mean()), "staleness_max": float(staleness.max())}
        self.noted = self._notes.gathered(self.world_size) if self._notes is not None else {}
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        self.heap.trim()
        return metrics | self._speed(minibatches, started)

    def _speed(self, minibatches: Sequence[MiniBatch], started: float) -> dict[str, float]:
        """Returns the seconds since `started`, how they were used, and this process's largest memory so far.

        tokens_per_s counts inputs (prompts and tools' responses too). mfu is the share of all ranks' peak that the
        model's own operations take; it is missing if the peak is unknown.
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

    def plan(self, batch: Batch, minibatches: int) -> list[MiniBatch]:
        return plan(
            batch,
            minibatches=minibatches,
            micro_batch_tokens=self.config.micro_batch_tokens,
            ranks=self.world_size // self.sharing,
            rank=self.rank // self.sharing,
            parts=self.sharing,
            seed=self.seed,
            share_prefix=self.config.share_prefix and self.config.attention == PACKED,
        )

    def updates(self, minibatches: Sequence[MiniBatch], live: int | None) -> list[dict[str, float]]:
        """Makes the optimizer steps of a batch.

        If the loss asks for it, the minibatches after the first update are scored before it; in the first minibatch the
        forward pass gives the same.
        """
        later = minibatches[1:] if self.proximal else []
        proximal = [None, *(self.logprobs(part.micros) for part in later)]
        results: list[dict[str, float]] = []
        for index, minibatch in enumerate(minibatches):
            if self._notes is not None:
                self._notes.minibatch = index
            try:
                scored = Scored(proximal[index] if self.proximal else None, self._reference_logprobs(minibatch))
                results.append(self.update(minibatch, scored, live if index == 0 else None))
            except (Diverged, Mismatched) as error:
                place = f"minibatch {index + 1} of {len(minibatches)}"
                raise type(error)(f"{place}: {error}; updates of this step before it: {index}") from error
        return results

    def update(
        self, minibatch: MiniBatch, scored: Scored = NOTHING_SCORED, live: int | None = None
    ) -> dict[str, float]:
        """Runs forward and backward over this rank's microbatches, then makes one optimizer step."""
        counts, logprobs = self.passes(minibatch, scored, live)
        return self.step(minibatch, counts, logprobs, live)

    def passes(
        self, minibatch: MiniBatch, scored: Scored = NOTHING_SCORED, live: int | None = None
    ) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Adds up the gradient of a minibatch; returns what each pass counted, and its log-probabilities."""
        micros = minibatch.micros
        totals = Totals(minibatch.loss_tokens, minibatch.sequences)
        counts, logprobs = [], []
        if self.config.load_balancing_coef and (len(micros) > 1 or self.world_size > 1):
            self._count_experts(micros)
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            self.scorer.set_requires_gradient_sync(last or self.reshard_between_passes)
            self.scorer.set_reshard_after_backward(last or self.reshard_between_passes)
            counted, logprobs_M = self._backward(micro, totals, *scored.of(index), live)
            counts.append(counted)
            logprobs.append(logprobs_M)
        return counts, logprobs

    def step(
        self,
        minibatch: MiniBatch,
        counts: Sequence[dict[str, Tensor]],
        logprobs: Sequence[Tensor],
        live: int | None = None,
    ) -> dict[str, float]:
        """Makes one optimizer step with the clipped gradient; returns sums and maxima over passes and ranks.

        Raises Diverged or Mismatched before it touches the weights.
        """
        micros = minibatch.micros
        gradients = [parameter.grad.to_local() for parameter in self.trained if parameter.grad is not None]
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum() / self.copies
        result = reduced(counts, square, copies=self.sharing) | self.expert_load.metrics()
        mean_weight = _mean_weight(result) if self.normalizes else 1.0
        result["loss"] /= mean_weight
        norm = result["grad_norm"] = result.pop("square") ** 0.5 / mean_weight
        if not np.isfinite([result["loss"], norm]).all():
            numbers = f"loss {result['loss']}, grad_norm {norm}, ratio_max {result['ratio_max']}"
            place = first_not_finite(micros, logprobs, [float(counted["loss"]) for counted in counts])
            raise Diverged(f"not finite: {numbers}; {place}")
        if live is not None and self.config.mismatch_bound is not None and result.get("mismatch_checked"):
            self._check_mismatch(result, self.config.mismatch_bound, live, micros, logprobs)
        factor = min(1.0, self.config.grad_clip / (norm + 1e-6)) / mean_weight
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _check_mismatch(
        self,
        result: dict[str, float],
        tolerance: float,
        live: int,
        micros: Sequence[MicroBatch],
        logprobs: Sequence[Tensor],
    ) -> None:
        """Raises Mismatched. The mean is judged, since rounding averages out in it and a wrong weight does not."""
        mean, largest = result["mismatch_fresh_mean"] / result["mismatch_checked"], result["mismatch_fresh_max"]
        if mean <= tolerance and largest <= ONE_TOKEN * tolerance:
            return
        worst = worst_mismatch(micros, logprobs, live)
        raise Mismatched(
            f"sampler and learner differ on tokens of version {live} by {mean:.2e} on average (tolerance "
            f"{tolerance:.0e}, mismatch_tolerance) and by up to {worst.difference:.2e} (tolerance "
            f"{ONE_TOKEN * tolerance:.0e}): {worst}. {self._cause(result, micros, live, mean)}"
        )

    def _cause(self, result: dict[str, float], micros: Sequence[MicroBatch], live: int, mean: float) -> str:
        """Returns what a mismatch comes from, as far as the sampler's routes tell, and what to do. A collective."""
        fix = "Fix: if the model's own rounding is so large, raise mismatch_tolerance, or use float32 on both sides"
        if not self.mixtures:
            return fix
        if not result["routed"]:
            return (
                f"Which experts the sampler chose is not known. {fix}; or let the learner use them, with "
                "learner.replay_routing=true"
            )
        if self.config.replay_routing is True:
            return f"The learner used the sampler's experts, so routing is not the cause. {fix}"
        with_routes = mismatch_mean(micros, self.logprobs(micros, replay=True), live)
        other = result["routed_otherwise"] / result["routed"]
        figures = f"The learner sends {other:.1%} of the positions to other experts than the sampler in some layer"
        if with_routes > ROUTING_SHARE * mean:
            return (
                f"{figures}; with the sampler's it would differ by {with_routes:.2e}, so that is not the cause. {fix}"
            )
        return (
            f"{figures}, and that is the cause: with the sampler's it would differ by {with_routes:.2e} on average. "
            "Fix: learner.replay_routing=true"
        )

    def _backward(
        self,
        micro: MicroBatch,
        totals: Totals,
        proximal_M: Tensor | None,
        reference_M: Tensor | None,
        live: int | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Adds the gradient of a microbatch; returns what it counted and the log-probabilities [M]."""
        routes = self._routes(micro)
        with self.expert_load.counted(micro):
            logprobs_M, top_MK, entropy_M = self._forward_with_top(micro, routes)
        if self._notes is not None:
            logprobs_M.retain_grad()
        if self.proximal and proximal_M is None:
            proximal_M = logprobs_M.detach()
        tokens = Tokens(
            logprobs_M=logprobs_M,
            old_logprobs_M=self._to_device(micro.old_logprobs_M),
            advantages_M=self._to_device(micro.advantages_M),
            sequence_M=self._to_device(micro.sequence_M),
            sequences=micro.sequences,
            versions_M=self._to_device(micro.versions_M),
            proximal_logprobs_M=proximal_M,
            top_logprobs_MK=top_MK,
            teacher_logprobs_MK=None if top_MK is None else self._to_device(micro.teacher_logprobs_MK),
        )
        loss, counts = self.loss(tokens, totals)
        added: dict[str, Tensor] = {}
        if reference_M is not None:
            kl_M = ESTIMATORS[self.config.reference_kl](logprobs_M, reference_M)
            how: Aggregate = getattr(self.loss, "aggregate", "token")
            loss = loss + self.config.reference_kl_coef * aggregated(kl_M, tokens, totals, how)
            added["reference_kl"] = kl_M.detach().sum()
        counted_loss = loss.detach()
        if self.config.load_balancing_coef:
            balance = self.expert_load.loss(micro)
            loss = loss + balance
            # `reduced` divides by the ranks that share the row, and each has only its positions' part of this.
            counted_loss = counted_loss + self.sharing * balance.detach()
        # FSDP averages over ranks, but the loss already counts the tokens of all. Of ranks that share the row, each has
        # the gradient of its own positions only.
        (loss * self.world_size).backward()
        if self._notes is not None and self._reports:
            self._notes.add(micro, logprobs_M, entropy_M, scale=totals.tokens / self.world_size)
        if self.mixtures:
            added |= self._routing(micro, routes)
        own = {"loss": counted_loss, "entropy": entropy_M.sum(), **statistics(tokens, live), **added}
        if taken := counts.keys() & {*own, "square", "grad_norm"}:
            raise ValueError(f"the loss counts {min(taken)!r}, which is a name of the learner's own")
        return own | counts, logprobs_M.detach()

    def _routes(self, micro: MicroBatch, *, replay: bool | None = None) -> RowRoutes | None:
        """Returns the routes of a row. replay: whether routers follow them; None: as configured."""
        if micro.routes_LXE is None:
            return None
        replay = self.config.replay_routing is True if replay is None else replay
        part = None if self.context is None else self.context.of(len(micro.routes_LXE))
        return RowRoutes(micro.routes_LXE, self.device, replay=replay, part=part)

    def _routing(self, micro: MicroBatch, routes: RowRoutes | None) -> dict[str, Tensor]:
        """Returns how many of the row's positions have routes, have none, and would have been routed otherwise."""
        none = torch.zeros((), device=self.device)
        if routes is None:
            return {"routed": none, "unrouted": none + micro.tokens, "routed_otherwise": none}
        routed = routes.known_L.sum()
        counts = {"routed": routed, "unrouted": routes.tokens - routed, "routed_otherwise": routes.differing_L().sum()}
        # `reduced` divides by the ranks that share the row, and each has counted only its own positions.
        return {name: self.sharing * count for name, count in counts.items()}

    def forward(
        self,
        micro: MicroBatch,
        scorer: Scorer | None = None,
        targets: NDArray[np.int64] | None = None,
        routes: RowRoutes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies of the targets, [M], under the model in training or another.

        targets: in place of the microbatch's, [M] or [M, J]; the log-probabilities have their shape. routes: the
        sampler's for the row.
        """
        scorer = scorer or self.scorer
        return scorer(
            self._to_device(micro.token_ids_RL),
            self._to_device(micro.position_ids_RL),
            micro.lengths_S.tolist(),
            micro.positions_M,
            self._to_device(micro.targets_M if targets is None else targets),
            micro.shared,
            routes,
        )

    def _forward_with_top(self, micro: MicroBatch, routes: RowRoutes | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the log-probabilities of the targets [M] and of a teacher's likeliest tokens [M, K], None if there
        are none, and the entropies [M], all of one pass.
        """
        if not micro.teacher_ids_MK.shape[1]:
            logprobs_M, entropy_M = self.forward(micro, routes=routes)
            return logprobs_M, None, entropy_M
        targets_MJ = np.concatenate([micro.targets_M[:, None], micro.teacher_ids_MK], 1)
        logprobs_MJ, entropy_M = self.forward(micro, targets=targets_MJ, routes=routes)
        return logprobs_MJ[:, 0].contiguous(), logprobs_MJ[:, 1:], entropy_M

    @torch.no_grad()
    def logprobs(
        self, micros: Sequence[MicroBatch], scorer: Scorer | None = None, *, replay: bool | None = None
    ) -> list[Tensor]:
        """Returns the log-probabilities of each microbatch's targets, without a gradient.

        scorer: another model than the one in training, which routes its tokens freely. replay: whether the one in
        training follows the sampler's routes; None: as configured.
        """
        logprobs = []
        for micro in micros:
            routes = self._routes(micro, replay=replay) if scorer is None else None
            logprobs.append(self.forward(micro, scorer, routes=routes)[0])
        reshard(scorer or self.scorer)
        return logprobs

    @torch.no_grad()
    def _count_experts(self, micros: Sequence[MicroBatch]) -> None:
        """Counts the choices of a minibatch before its passes, since the load-balancing loss of each needs them all."""
        for micro in micros:
            with self.expert_load.counted(micro):
                bare = replace(micro, positions_M=micro.positions_M[:0], targets_M=micro.targets_M[:0])
                self.forward(bare, routes=self._routes(micro))
        reshard(self.scorer)
        self.expert_load.fix()

    def _reference_logprobs(self, minibatch: MiniBatch) -> list[Tensor] | None:
        """Returns those of this rank's targets under the reference, if there is one."""
        if self.reference is None:
            return None
        with self.reference.scorer() as scorer:
            return self.logprobs(minibatch.micros, scorer)

    def release_gpu(self) -> None:
        """Gives the device to the replicas: what only training needs leaves it until `train`, if so configured."""
        if self.config.offload_optimizer:
            self.offloader.offload()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the replicas would lack what PyTorch keeps for itself

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Returns log p of each sampled token under the current weights, [N] as the batch's; 0 for other tokens."""
        starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
        logprobs_N = torch.zeros(len(batch.token_ids_N))
        for minibatch in self.plan(batch, 1):
            micros = minibatch.micros
            scored = zip(micros, self.logprobs(micros), strict=True)
            for micro, logprobs_M in scored if self._reports else ():
                places_M = starts_B[micro.trajectories_S[micro.sequence_M]]
                places_M = places_M + micro.position_ids_RL.flat[micro.positions_M] + 1
                logprobs_N[torch.from_numpy(places_M)] = logprobs_M.cpu()
        if self.world_size > 1:
            dist.all_reduce(logprobs_N)
        return logprobs_N.numpy()

    def score_canary(self) -> NDArray[np.float32]:
        """Returns the canary's log-probabilities under the current weights (`algo.learner.canary`)."""
        return self.canary.score()

    def save(self, path: Path, *, chat_template: str | None = None, end_of_turn: int | None = None) -> None:
        """Writes a Hugging Face checkpoint (`algo.learner.state.export`). Raises OSError or SafetensorError."""
        export(self.scorer, self.source, path, chat_template=chat_template, end_of_turn=end_of_turn)

    def checkpoint(self, path: Path, version: int) -> None:
        """Writes all that resuming takes to path, in a thread (`algo.learner.state.checkpoint`)."""
        counters = {"version": version, "trained_batches": self.trained_batches}
        self.checkpoints.write(path, counters | self.canary.state)

    def restore(self, path: Path) -> int:
        """Restores a checkpoint and returns the version of its weights. Raises CheckpointFailed."""
        counters = self.checkpoints.read(path)
        self.trained_batches = counters["trained_batches"]
        self.canary.restore(counters)
        return counters["version"]

    @property
    def _reports(self) -> bool:
        """Returns whether this rank reports of its rows, for all that share them."""
        return self.rank % self.sharing == 0

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _mean_weight(result: Mapping[str, float]) -> float:
    """Returns the mean weight of a minibatch's tokens that were not rejected; 1 if all were."""
    kept = result["tokens"] - result["rejected"]
    return result["weight"] / kept if kept else 1.0
