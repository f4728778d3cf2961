"""Computes entropies of recorded trajectories under a checkpoint by a forward pass of the learner's own model.

Promises
- The ids are those that were recorded: nothing is tokenised again.
- Entropies are exact, over the whole vocabulary, at temperature 1. Memory is bounded by `batch_tokens` and the longest
  trajectory: logits exist for a thousand tokens at a time (`algo.learner.model.scorer.Scorer`).
- A checkpoint whose tokenizer does not give the recorded texts back is refused.

On the CPU it computes in float32; on a GPU in bfloat16 with logits in float32, which has not been run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from algo.learner.model.attention import PACKED, register
from algo.learner.model.loading import read
from algo.learner.model.scorer import Scorer
from algo.learner.model.supported import check_structure, empty
from engine.diagnosis.token_kinds import mark
from engine.rollout.chat_template import TextStream
from engine.types import Trajectory
from recipes.rstar2.parts.analysis.token_entropy import Scored

CHECKED = 16  # trajectories whose text the tokenizer must give back
CUT_OFF = "\ufffd"  # the decoder's mark for bytes that are no whole character


class EntropyScorer:
    """Loads a checkpoint that gives recorded trajectories their entropies. Raises ValueError for one that cannot."""

    def __init__(self, model: Path, *, device: str = "cpu") -> None:
        for name in ("config.json", "tokenizer_config.json"):
            if not (model / name).is_file():
                raise ValueError(f"model {str(model)!r} has no {name}. Fix: model=DIR, a Hugging Face folder")
        transformers_logging.disable_progress_bar()
        register()
        self.path = model
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        try:
            check_structure(empty(AutoConfig.from_pretrained(model, trust_remote_code=False), PACKED))
            loaded = read(model, PACKED)
        except ValueError as error:
            raise ValueError(f"model {str(model)!r}: {error}") from error
        self.vocabulary: int = loaded.get_input_embeddings().weight.shape[0]
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self._scorer = Scorer(loaded.to(self.device, dtype), fp32_head=on_gpu).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False).backend_tokenizer

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises ValueError where they hold ids of another model's vocabulary, or texts of another tokenizer."""
        for each in trajectories:
            if each.token_ids_T.max() >= self.vocabulary:
                raise self._other_model(each, f"token {each.token_ids_T.max()}, and it has {self.vocabulary}")
        for each in trajectories[:CHECKED]:
            spans = (each.token_ids_T[turn.start : turn.end].tolist() for turn in each.turns)
            text = "".join(self._tokenizer.decode(ids, skip_special_tokens=False) for ids in spans)
            if text.replace(CUT_OFF, "") != each.text.replace(CUT_OFF, ""):
                raise self._other_model(each, f"{text[:40]!r} where {each.text[:40]!r} was recorded")

    def _other_model(self, trajectory: Trajectory, what: str) -> ValueError:
        where = f"{trajectory.prompt.id} #{trajectory.sample}"
        return ValueError(
            f"{self.path} is not the model of this run or has another tokenizer: {where} has {what}. "
            "Fix: model=DIR, a checkpoint of that run"
        )

    def entropies(
        self, trajectories: Sequence[Trajectory], batch_tokens: int
    ) -> Iterator[tuple[int, Sequence[float], Sequence[float]]]:
        """Yields (index, entropy_T, logprob_T) of each, in any order; 0 where nothing was sampled."""
        for pack in packs([len(each.token_ids_T) for each in trajectories], batch_tokens):
            yield from self._pack(trajectories, pack)

    @torch.no_grad()
    def _pack(self, trajectories: Sequence[Trajectory], pack: Sequence[int]) -> Iterator[tuple[int, Any, Any]]:
        ids = [trajectories[at].token_ids_T for at in pack]
        lengths = [len(each) for each in ids]
        begins = np.cumsum(lengths) - lengths
        sampled = [np.flatnonzero(trajectories[at].sampled_T) for at in pack]
        places_M = np.concatenate([begin + each for begin, each in zip(begins, sampled, strict=True)])
        token_ids_L = np.concatenate(ids).astype(np.int64)
        position_ids_L = np.concatenate([np.arange(length) for length in lengths])
        logprobs_M, entropies_M = self._scorer(
            self._to_device(token_ids_L[None]),
            self._to_device(position_ids_L[None]),
            lengths,
            self._to_device(places_M - 1),
            self._to_device(token_ids_L[places_M]),
        )
        values_2L = np.zeros((2, len(token_ids_L)), np.float32)
        values_2L[:, places_M] = torch.stack([entropies_M, logprobs_M]).float().cpu().numpy()
        for at, begin, length in zip(pack, begins, lengths, strict=True):
            entropy_T, logprob_T = values_2L[:, begin : begin + length]
            yield at, np.maximum(entropy_T, 0.0), logprob_T

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def scored(self, trajectory: Trajectory, entropy_T: NDArray[np.float32], logprob_T: NDArray[np.float32]) -> Scored:
        """Returns the trajectory with the text and kind of each token."""
        texts_T, turns = self.texts(trajectory), trajectory.turns
        failed = frozenset(n for n, turn in enumerate(turns) if any(use.failed for use in turn.tool_uses))
        return Scored(
            texts_T=texts_T,
            marks=mark(texts_T, [(turn.start, turn.end) for turn in turns]),
            entropy_T=entropy_T,
            logprob_T=logprob_T,
            failed_turns=failed,
        )

    def texts(self, trajectory: Trajectory) -> list[str]:
        """Returns the text of each token: together they are the whole. A character of several tokens stands at its last
        one.
        """
        texts: list[str] = []
        ids = trajectory.token_ids_T.tolist()
        bounds = [0, *(bound for turn in trajectory.turns for bound in (turn.start, turn.end)), len(ids)]
        for begin, end in pairwise(bounds):
            stream = TextStream(self._tokenizer)
            texts += [stream.step([token]) for token in ids[begin:end]]
        return texts


def packs(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yields indices of sequences for one pass each, long ones first; one longer than `batch_tokens` goes alone.

    >>> list(packs([3, 9, 2, 4], 6))
    [[1], [3], [0, 2]]
    """
    pack: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if pack and sum(lengths[each] for each in pack) + lengths[at] > batch_tokens:
            yield pack
            pack = []
        pack.append(at)
    if pack:
        yield pack
