"""Summarizes the recorded tokens of a step: how old their weights were, and where learner and sampler differ.

It covers the groups whose tokens have their numbers (`record.token_groups`). Shape legend: N tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from engine.recording.records import SequenceTokens
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles

BINS = 16  # of positions, with equally many tokens


def token_figures_of(run: RunFiles, step: int) -> dict[str, Any]:
    """Returns the figures of a step. Raises NotThere if no group of it has the numbers of its tokens.

    ages: sampled tokens by how many versions older their weights were than those that the step trained. positions:
    columns over the sampled tokens in the order of their position.
    """
    sequences = _sequences(run, step)
    if not sequences:
        raise NotThere(f"no group of step {step} is recorded with the numbers of its tokens")
    ages: Counter[int] = Counter()
    for tokens in sequences:
        assert tokens.versions is not None
        ages.update((step - 1 - tokens.versions[tokens.sampled]).tolist())  # step 1 trains version 0
    return {
        "step": step,
        "ages": {str(age): count for age, count in sorted(ages.items())},
        "positions": _by_position(sequences),
    }


def _sequences(run: RunFiles, step: int) -> list[SequenceTokens]:
    held = [run.recorded.tokens(step, group.group) for group in run.recorded.groups(step) if group.whole]
    return [
        tokens
        for group in held
        if group is not None
        for trajectory in group.trajectories
        for tokens in trajectory
        if tokens.versions is not None
    ]


def _by_position(sequences: list[SequenceTokens]) -> dict[str, list[float]]:
    """Returns the means of trained tokens by position: |learner - sampler| of the log-probability, and entropy."""
    positions_N, mismatch_N, entropy_N = [], [], []
    for tokens in sequences:
        if tokens.learner_logprobs is None or tokens.logprobs is None or tokens.entropy is None:
            continue
        sampled_N = np.flatnonzero(tokens.sampled)
        trained = ~np.isnan(tokens.learner_logprobs[sampled_N])
        at_N = sampled_N[trained]
        positions_N.append(np.arange(len(sampled_N))[trained])
        mismatch_N.append(np.abs(tokens.learner_logprobs[at_N] - tokens.logprobs[at_N]))
        entropy_N.append(tokens.entropy[at_N])
    if not positions_N or not sum(map(len, positions_N)):
        return {"position": [], "mismatch": [], "entropy": []}
    order = np.argsort(np.concatenate(positions_N), kind="stable")
    columns = zip(
        ("position", "mismatch", "entropy"),
        (np.concatenate(values)[order] for values in (positions_N, mismatch_N, entropy_N)),
        strict=True,
    )
    return {
        name: [float(part.mean()) for part in np.array_split(values, min(BINS, len(values)))]
        for name, values in columns
    }
