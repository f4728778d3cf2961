"""Supervised fine-tuning: turns marked examples into batches, which the learner trains on as it does on RL's rollouts.

    LearnerConfig(loss=CrossEntropy(), minibatches=1, schedule="cosine", steps=..., ...)
    stream = examples(conversations, ChatTemplate.load(checkpoint).conversation)
    for batch in batches(stream, batch_size=16, seed=0): await learner.train(batch, version=0)

Invariants
- Only tokens with `loss_T` True are learnt, each predicted from all the tokens of its example before it.
- Every example of the stream is in exactly one batch, in an order that depends on the seed only.
- A batch holds examples of similar length, drawn from a pool of `pool_batches` batches, so that ranks get equal work.

With `CrossEntropy()` a batch's loss is the mean over its learnt tokens. Since batches have similar lengths, a token of
a short example then weighs more than one of a long example, which shifts the model towards the short kind. Where the
mix of kinds matters, use `CrossEntropy(aggregate=n)` with n a typical number of learnt tokens: it divides by n times
the number of examples.

Shape legend: T tokens of an example, B examples and N tokens of a batch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from engine.types import Batch
from sandbox.require import at_least, require

Pieces = Iterable[tuple[Sequence[int], bool]]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One tokenised conversation. loss_T marks the tokens to learn.

    >>> Example(ids_T=[5, 6, 7, 2], loss_T=[False, False, True])
    Traceback (most recent call last):
    ValueError: an example has 4 ids but 3 loss marks
    """

    ids_T: Sequence[int]
    loss_T: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.ids_T) != len(self.loss_T):
            raise ValueError(f"an example has {len(self.ids_T)} ids but {len(self.loss_T)} loss marks")

    @classmethod
    def of(cls, pieces: Pieces) -> Self:
        """Makes an example of pieces: token ids, and whether they are learnt.

        >>> Example.of([([5, 6], False), ([7, 2], True)])
        Example(ids_T=[5, 6, 7, 2], loss_T=[False, False, True, True])
        """
        pairs = [(token, learnt) for ids, learnt in pieces for token in ids]
        return cls(ids_T=[token for token, _ in pairs], loss_T=[learnt for _, learnt in pairs])


def examples(conversations: Iterable[Conversation], tokenize: Callable[[Conversation], Pieces]) -> Iterator[Example]:
    """Yields the examples of chat data: messages with text or OpenAI's `tool_calls`.

    tokenize: `ChatTemplate.conversation`.

    Raises ValueError naming the example (from 0), the message and the field that cannot be rendered.
    """
    for number, messages in enumerate(conversations):
        try:
            example = Example.of(tokenize(messages))
        except ValueError as error:
            raise ValueError(f"example {number}: {error}") from error
        yield example


def batches(examples: Iterable[Example], *, batch_size: int, seed: int, pool_batches: int = 16) -> Iterator[Batch]:
    """Yields batches of `batch_size` examples, numbered from 1; the last ones of the stream may be smaller."""
    for name, value in (("batch_size", batch_size), ("pool_batches", pool_batches)):
        require(name, value, at_least(1))
    rng, stream, step = random.Random(seed), iter(examples), itertools.count(1)
    while pool := list(itertools.islice(stream, batch_size * pool_batches)):
        pool.sort(key=lambda example: len(example.ids_T))
        chunks = [pool[start : start + batch_size] for start in range(0, len(pool), batch_size)]
        rng.shuffle(chunks)
        yield from (to_batch(next(step), chunk) for chunk in chunks)


def to_batch(step: int, examples: Sequence[Example]) -> Batch:
    """Makes the batch of a step. Nothing sampled these tokens, so log-probabilities are 0 and versions -1."""
    lengths_B = np.asarray([len(example.ids_T) for example in examples], np.int32)
    return Batch(
        step=step,
        token_ids_N=np.concatenate([np.asarray(example.ids_T, np.int32) for example in examples]),
        sampled_N=np.concatenate([np.asarray(example.loss_T, np.bool_) for example in examples]),
        logprobs_N=np.zeros(lengths_B.sum(), np.float32),
        versions_N=np.full(lengths_B.sum(), -1, np.int32),
        lengths_B=lengths_B,
        advantages_B=np.ones(len(examples), np.float32),
    )
