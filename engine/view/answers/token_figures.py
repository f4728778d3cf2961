"""Summarizes the recorded tokens of a step: the age of their weights, and where learner and sampler differ.

It covers the groups that have log-probabilities recorded (`record.token_groups`). Shape legend: N tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.recording.records import PartTokens
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles

BINS = 16  # bins of positions, with equally many tokens in each


def token_figures_of(run: RunFiles, step: int) -> dict[str, Any]:
    """Returns the figures of a step. Raises NotThere if none of its groups has log-probabilities recorded.

    ages: number of sampled tokens by how many versions older their weights were than those that the step trained.
    positions: columns over the sampled tokens in the order of their position.
    """
    sequences = _sequences(run, step)
    if not sequences:
        raise NotThere(f"no group of step {step} has the log-probabilities of its tokens recorded")
    ages: Counter[int] = Counter()
    for tokens in sequences:
        assert tokens.versions_T is not None
        ages.update((step - 1 - tokens.versions_T[tokens.sampled_T]).tolist())  # step 1 trains version 0
    return {
        "step": step,
        "ages": {str(age): count for age, count in sorted(ages.items())},
        "positions": _by_position(sequences, step),
    }


def _sequences(run: RunFiles, step: int) -> list[PartTokens]:
    recorded = [run.recorded.tokens(step, group.number) for group in run.recorded.groups(step) if group.whole]
    return [
        tokens
        for group in recorded
        if group is not None
        for trajectory in group.trajectories
        for tokens in trajectory
        if tokens.versions_T is not None
    ]


def _by_position(sequences: list[PartTokens], step: int) -> dict[str, list[float | None]]:
    """Returns means over the trained tokens, by position: entropy, and |learner - sampler| of the log-probability.

    mismatch: None where none of a bin's tokens was sampled and scored by the same weights: those before the step.
    """
    positions_N, mismatch_N, entropy_N = [], [], []
    for tokens in sequences:
        if tokens.learner_logprobs_T is None or tokens.learner_entropy_T is None:
            continue
        assert tokens.logprobs_T is not None
        assert tokens.versions_T is not None
        sampled_N = np.flatnonzero(tokens.sampled_T)
        trained = ~np.isnan(tokens.learner_logprobs_T[sampled_N])
        at_N = sampled_N[trained]
        positions_N.append(np.arange(len(sampled_N))[trained])
        difference_N = np.abs(tokens.learner_logprobs_T[at_N] - tokens.logprobs_T[at_N])
        same_N = (tokens.versions_T[at_N] == step - 1) & (tokens.minibatch == 0)
        mismatch_N.append(np.where(same_N, difference_N, np.nan))
        entropy_N.append(tokens.learner_entropy_T[at_N])
    if not positions_N or not sum(map(len, positions_N)):
        return {"position": [], "mismatch": [], "entropy": []}
    order = np.argsort(np.concatenate(positions_N), kind="stable")
    columns = zip(
        ("position", "mismatch", "entropy"),
        (np.concatenate(values)[order] for values in (positions_N, mismatch_N, entropy_N)),
        strict=True,
    )
    return {name: [_mean(part) for part in np.array_split(values, min(BINS, len(values)))] for name, values in columns}


def _mean(values_N: NDArray[np.float64]) -> float | None:
    known_N = values_N[~np.isnan(values_N)]
    return float(known_N.mean()) if len(known_N) else None
