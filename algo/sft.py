"""Supervised fine-tuning of a causal language model on masked examples.

Promises
- Only tokens with `loss_T` True are learnt, each predicted from all the tokens before it.
- Batches hold examples of similar length (less padding), drawn from a pool of `pool_batches` batches; every example of
  the stream is used exactly once, in an order that depends on the seed only.
- A loss that is not finite raises; it never ends a run that then looks healthy.

Shapes: B examples of a batch, T its longest example, V vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One tokenised conversation. loss_T marks the tokens to learn.

    >>> Example(ids_T=[5, 6, 7, 2], loss_T=[False, False, True])
    Traceback (most recent call last):
    ValueError: Example: 4 ids but 3 loss marks
    """

    ids_T: Sequence[int]
    loss_T: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.ids_T) != len(self.loss_T):
            raise ValueError(f"Example: {len(self.ids_T)} ids but {len(self.loss_T)} loss marks")


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """How to fit.

    The learning rate rises linearly over `warmup_steps`, stays, and from `decay_from` (share of the steps) falls
    linearly to `floor` times itself.
    tokens_per_example: None takes the mean over the batch's learnt tokens. With batches of similar length a token of a
    short example then weighs more than one of a long example, which shifts the model towards the short kind; where the
    mix of kinds matters, give a typical number of learnt tokens: the summed loss is divided by batch_size times that.
    """

    steps: int
    batch_size: int
    lr: float
    warmup_steps: int = 50
    decay_from: float = 0.6
    floor: float = 0.05
    tokens_per_example: float | None = None
    pool_batches: int = 16
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "lr", "pool_batches", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"SftConfig.{name} must be positive, not {getattr(self, name)}")
        if not 0 <= self.decay_from < 1:
            raise ValueError(f"SftConfig.decay_from must be in [0, 1), not {self.decay_from}")

    def lr_factor(self, step: int) -> float:
        """Multiplier of the learning rate at a step counted from 0."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (self.steps - step) / (self.steps * (1 - self.decay_from))
        return warm * max(self.floor, min(1.0, left))


def fit(
    model: nn.Module,
    examples: Iterable[Example],
    config: SftConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Trains the model in place; returns the mean loss per learnt token of every step.

    model: called as `model(input_ids=ids).logits`, int64 [B, T] to float [B, T, V]. on_step(step, loss): progress.
    Stops early when the stream of examples ends. Raises FloatingPointError on a loss that is not finite.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, betas=config.betas, weight_decay=config.weight_decay)
    losses = []
    model.train()
    for step, batch in enumerate(itertools.islice(_batches(examples, config), config.steps)):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * config.lr_factor(step)
        summed, learnt = masked_loss(model, batch, device)
        share = learnt if config.tokens_per_example is None else config.batch_size * config.tokens_per_example
        optimizer.zero_grad(set_to_none=True)
        (summed / share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm, error_if_nonfinite=True)
        optimizer.step()
        losses.append(summed.item() / learnt)
        on_step(step, losses[-1])
    model.eval()
    return losses


def masked_loss(model: nn.Module, batch: Sequence[Example], device: torch.device) -> tuple[Tensor, int]:
    """Cross-entropy summed over the learnt tokens, and how many they are.

    No attention mask: the padding is on the right, where a causal model does not look.
    """
    ids_BT, loss_BT = (tensor.to(device) for tensor in collate(batch))
    logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
    chosen_BT = loss_BT[:, 1:]
    summed = functional.cross_entropy(logits_BTV[chosen_BT].float(), ids_BT[:, 1:][chosen_BT], reduction="sum")
    if not torch.isfinite(summed):
        raise FloatingPointError(f"SFT loss is {summed.item()}")
    return summed, max(1, int(chosen_BT.sum()))


def collate(batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Right-padded ids int64 [B, T] and loss marks bool [B, T]."""
    ids_BT = nn.utils.rnn.pad_sequence([torch.tensor(example.ids_T) for example in batch], batch_first=True)
    loss_BT = nn.utils.rnn.pad_sequence([torch.tensor(example.loss_T) for example in batch], batch_first=True)
    return ids_BT, loss_BT


def _batches(examples: Iterable[Example], config: SftConfig) -> Iterator[list[Example]]:
    rng, stream, size = random.Random(config.seed), iter(examples), config.batch_size
    while pool := list(itertools.islice(stream, size * config.pool_batches)):
        pool.sort(key=lambda example: len(example.ids_T))
        batches = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(batches)
        yield from batches
