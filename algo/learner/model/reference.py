"""The model that training began with, frozen, which is scored beside the one in training for the KL to it.

Invariants
- It is what the run's own `checkpoint` holds, also after a resume: a resumed run is held to the same model.
- With adapters it is the model in training with these off, and takes no memory; otherwise it is a second model, sharded
  over the ranks like the first, without optimizer and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from algo.learner.model.loading import load
from algo.learner.model.lora import without_adapters
from algo.learner.model.scorer import Scorer

if TYPE_CHECKING:
    from algo.learner.config import LearnerConfig


class Reference:
    """Is made before the first update and before a checkpoint of the run is read."""

    def __init__(self, scorer: Scorer, config: LearnerConfig, source: Path) -> None:
        self._adapted = config.lora_rank > 0
        if self._adapted:
            self._scorer = scorer
        else:
            self._scorer, _ = load(config, source, scorer.context)
            self._scorer.requires_grad_(False)

    @contextmanager
    def scorer(self) -> Iterator[Scorer]:
        """Yields the reference as a scorer, valid inside the block."""
        if self._adapted:
            with without_adapters(self._scorer):
                yield self._scorer
        else:
            yield self._scorer
