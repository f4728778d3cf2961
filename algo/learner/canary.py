"""Scores the canary: fixed sequences whose log-probabilities each replica must give too, after each weight update.

In a mixture of experts a wrong expert shows only in tokens that are sent to it. So the learner, which knows where they
are sent, adds sequences of random ids until each expert has a token, and names the experts that it cannot reach. Where
tokens are sent changes with the weights: when an expert loses its last token, the search begins anew.

Invariants
- A run that is resumed has the sequences of the one before, since they are in its checkpoints (`state`).
- Every rank makes the same passes (each is a collective): what it decides by is rank 0's.
- A token is compared only if rounding cannot send it, or one before it in its sequence, to another expert. The others
  have UNCOMPARED in place of a log-probability, and count for no expert.

Shape legend: L tokens of a row, M of them with a target, S sequences, E experts of a layer, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from algo.learner.model.context import RowPart
from algo.learner.model.experts import MixtureLayer, mixture_of
from algo.learner.model.sharding import reshard
from algo.learner.model.unsharded import UnshardedScorer
from engine.types import UNCOMPARED

if TYPE_CHECKING:
    from algo.learner.config import LearnerConfig
    from algo.learner.model.scorer import Scorer

# In float32 a token is compared if the router's logits of the last expert taken and the first not taken are so far
# apart; replicas and learner differ by 1e-6 to 1e-5 there. In bfloat16 they differ by what many tokens are apart, and
# the canary's tolerance has room for them.
TIE = 1e-4
# The search: random sequences that are tried in one pass, the ids of each, and passes at most.
TRIED, LENGTH, PASSES = 64, 16, 4

Expert = tuple[int, int]  # decoder layer, expert
Reached = list[set[Expert]]  # by each sequence


@dataclass(frozen=True, slots=True)
class Routed:
    """Where one layer sends the tokens of a row. margin_L: logits between the last expert taken and the next one."""

    layer: MixtureLayer
    experts_Lk: Tensor
    margin_L: Tensor


class Canary:
    """The canary of a model in training. Every method is a collective."""

    def __init__(self, sequences: Sequence[Sequence[int]], scorer: Scorer, config: LearnerConfig) -> None:
        """sequences: the fixed ones; those without two tokens have nothing to score and are left out."""
        self._fixed = [list(ids) for ids in sequences if len(ids) > 1]
        self._sharded = scorer
        self.scorer = UnshardedScorer(scorer, config) if UnshardedScorer.fits(config) else scorer
        """What computes: the model in training, or its weights without the copy that sharding takes."""
        self._exact = config.dtype == config.weights_dtype == "float32"
        vocabulary = scorer.model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        self._tried = torch.randint(vocabulary, (PASSES * TRIED, LENGTH), generator=generator).tolist()
        self._added: list[int] = []  # numbers of tried sequences
        self._out_of_reach: set[Expert] = set()  # what the last search has not found a token for
        layers = mixture_of(scorer.model) if self._fixed else []
        self._experts = {(layer.layer, expert) for layer in layers for expert in range(layer.count)}
        self.unreached: set[Expert] = set()
        """The experts that no compared token is sent to, under the weights that were scored last."""

    @property
    def further(self) -> list[list[int]]:
        """The sequences that were added to reach more experts; they follow the fixed ones."""
        return [self._tried[number] for number in self._added]

    @property
    def metrics(self) -> dict[str, float]:
        """How many experts of a mixture the canary does not cover; empty for a dense model."""
        return {"canary_unreached": float(len(self.unreached))} if self._experts else {}

    @property
    def gaps(self) -> str:
        """What the canary cannot see, for the user; empty if it covers the model."""
        if not self.unreached:
            return ""
        names = [f"expert {expert} of layer {layer}" for layer, expert in sorted(self.unreached)]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return (
            f"the canary reaches all experts but {len(names)} of {len(self._experts)} ({shown}): if their weights were "
            "wrong on a replica, it would not show in the canary"
        )

    @property
    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: the sequences that were added, and the experts that are out of reach."""
        added = {f"canary_added_{place}": number for place, number in enumerate(self._added)}
        return added | {f"canary_missed_{layer}_{expert}": 1 for layer, expert in self._out_of_reach}

    def restore(self, state: Mapping[str, int]) -> None:
        """Takes over a `state`; other names are ignored."""
        places = sorted((int(name.rpartition("_")[2]), name) for name in state if name.startswith("canary_added_"))
        missed = [name.split("_")[2:] for name in state if name.startswith("canary_missed_")]
        self._added = [state[name] for _, name in places]
        self._out_of_reach = {(int(layer), int(expert)) for layer, expert in missed}

    def score(self) -> NDArray[np.float32]:
        """Returns log p(ids[1:]) of each sequence under the current weights, concatenated, or UNCOMPARED."""
        logprobs_M = self._score()
        if self.unreached - self._out_of_reach:
            self._search()
            logprobs_M = self._score()
            self._out_of_reach = set(self.unreached)
        return logprobs_M.cpu().numpy()

    def _score(self) -> Tensor:
        """Returns the log-probabilities, and notes which experts are reached."""
        logprobs_M, reached = self._pass([*self._fixed, *self.further])
        self.unreached = self._experts.difference(*reached)
        return logprobs_M

    def _search(self) -> None:
        """Chooses the sequences to add: those of the tried ones that reach most of what is missing, one by one."""
        _, reached = self._pass(self._fixed)
        missing = self._experts.difference(*reached)
        self._added = []
        for first in range(0, len(self._tried), TRIED):
            _, reached = self._pass(self._tried[first : first + TRIED])
            while missing:
                best = max(range(TRIED), key=lambda number: len(reached[number] & missing))
                if not reached[best] & missing:
                    break
                self._added.append(first + best)
                missing -= reached[best]
            if not missing:
                break

    def _pass(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Reached]:
        """Returns the log-probabilities, and the experts that each sequence reaches with tokens that are compared."""
        logprobs_M, routes = self._forward(sequences)
        reached: Reached = [set() for _ in sequences]
        if not routes:
            return logprobs_M, reached
        lengths_S = torch.tensor([len(ids) - 1 for ids in sequences])
        sequence_M = torch.repeat_interleave(torch.arange(len(sequences)), lengths_S)
        compared_M = self._compared(routes, sequence_M)
        for route in routes:
            pairs = torch.stack(
                [
                    sequence_M[compared_M].repeat_interleave(route.layer.per_token),
                    route.experts_Lk[compared_M].flatten(),
                ],
                1,
            )
            for sequence, expert in pairs.unique(dim=0).tolist():
                reached[sequence].add((route.layer.layer, expert))
        return torch.where(compared_M.to(logprobs_M.device), logprobs_M, UNCOMPARED), reached

    def _forward(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, list[Routed]]:
        inputs = [np.asarray(ids[:-1]) for ids in sequences] or [np.zeros(1, np.int64)]
        lengths_S = [len(ids) for ids in inputs]
        targets_M = np.asarray([target for ids in sequences for target in ids[1:]], np.int64)
        device = next(self._sharded.parameters()).device
        row = (
            torch.from_numpy(np.concatenate(inputs)[None]).to(device),
            torch.from_numpy(np.concatenate([np.arange(length) for length in lengths_S])[None]).to(device),
            lengths_S,
            np.arange(len(targets_M)),
            torch.from_numpy(targets_M).to(device),
        )
        context = self._sharded.context
        part = None if context is None else context.of(sum(lengths_S))
        with torch.no_grad(), _recorded(self.scorer.model if self._experts else None, part) as routes:
            logprobs_M, _ = self.scorer(*row)
        reshard(self._sharded)
        return logprobs_M, routes

    def _compared(self, routes: Sequence[Routed], sequence_M: Tensor) -> Tensor:
        """Returns which tokens are compared, [M]: those that no close decision comes before, in their sequence."""
        close_M = torch.zeros(len(sequence_M), dtype=torch.bool)
        if self._exact:
            for route in routes:
                close_M |= (route.margin_L >= 0) & (route.margin_L < TIE)
        before_M = close_M.long().cumsum(0)
        first_S = torch.ones_like(sequence_M, dtype=torch.bool)
        first_S[1:] = sequence_M[1:] != sequence_M[:-1]
        at_begin_S = (before_M - close_M.long())[first_S]
        return before_M == at_begin_S[sequence_M]


@contextmanager
def _recorded(model: nn.Module | None, part: RowPart | None) -> Iterator[list[Routed]]:
    """Records inside where a model's routers send the tokens, as rank 0 has it; complete afterwards, in host memory.

    part: where ranks share the row, what this rank has of it. Rank 0 then has it from the ranks that share its row.
    """
    layers = mixture_of(model) if model is not None else []
    outputs: list[tuple[MixtureLayer, Tensor]] = []  # margin and experts of each position, [L, 1 + k]
    routes: list[Routed] = []

    def record(layer: MixtureLayer) -> Any:
        def note(module: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
            experts_Lk = output[-1].flatten(0, -2)
            margin_L = _margin(layer, output[0].flatten(0, -2), experts_Lk)
            outputs.append((layer, torch.cat([margin_L[:, None].double(), experts_Lk.double()], 1)))

        return note

    hooks = [layer.router.register_forward_hook(record(layer)) for layer in layers]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()
    values = _of_rank_0([own for _, own in outputs], part)
    routes += [Routed(layer, row[:, 1:].long(), row[:, 0]) for (layer, _), row in zip(outputs, values, strict=True)]


def _margin(layer: MixtureLayer, logits_LE: Tensor, experts_Lk: Tensor) -> Tensor:
    """Returns by how much the least of the logits taken is above the others, [L]; -1 if more than logits decides."""
    if layer.by_sigmoid:
        return torch.full_like(logits_LE[:, 0], -1.0)
    taken_L = logits_LE.gather(-1, experts_Lk).amin(-1)
    return taken_L - logits_LE.scatter(-1, experts_Lk, float("-inf")).amax(-1)


def _of_rank_0(values: Sequence[Tensor], part: RowPart | None) -> list[Tensor]:
    """Returns rank 0's values of positions, [L, ...] each, on every rank, whole and in host memory. A collective."""
    if not values:
        return []
    row_LV = torch.cat([*values], 1)
    if part is not None:
        own = torch.arange(part.start, part.start + part.tokens, device=row_LV.device)
        row_LV = part.whole(row_LV[: part.tokens], own, part.length)
    row_LV = row_LV.cpu().contiguous()
    dist.broadcast(row_LV, 0)
    return [*row_LV.split([each.shape[1] for each in values], 1)]
