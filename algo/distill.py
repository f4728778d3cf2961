"""On-policy distillation: a student learns from how its teacher rates the tokens that the student has sampled.

    job.group(teacher.scores(rollouts), reward, select_and_score(KeepAll(), seed, keep_flat=True))
    job.train(partial(distilled, clip=10.0), measure=partial(teacher.measured, clip=10.0))

The advantage of a sampled token is the teacher's log-probability less the sampler's, held to +-clip: the negative of
the k1 estimate of the reverse KL, KL(student || teacher), per token (Lu, "On-Policy Distillation", Thinking Machines,
2025). No mean is subtracted and nothing is discounted, so that a student like its teacher has advantages of 0. Prompts,
tool replies and what a grammar decided have none. The loss, its clipping and its corrections are those of any run.

With `top` the teacher's likeliest tokens go to the learner instead (`algo.loss.distillation.TopK`), and the token has
no advantage of this kind.

Shape legend: T tokens of a sequence, N tokens of a batch, K of a teacher's likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from algo.group.advantages import Advantage
from algo.group.batch import GRPO, make_batch
from engine.types import Batch, Bools, Floats, Group, Segment, TokenScores, Trajectory

CLIP = 10.0  # nats; a token beyond it is one that the teacher would all but never write


def token_advantages(teacher_T: Floats, sampler_T: Floats, sampled_T: Bools, *, clip: float) -> Floats:
    """Returns clip(teacher - sampler) of each sampled token and 0 of the others, float32 [T].

    >>> token_advantages(np.float32([-1, -9, np.nan]), np.float32([-2, -1, 0]), np.array([1, 1, 0], bool), clip=5.0)
    array([ 1., -5.,  0.], dtype=float32)
    """
    difference_T = np.clip(np.where(sampled_T, teacher_T - sampler_T, 0.0), -clip, clip)
    return difference_T.astype(np.float32)


def distilled(
    step: int,
    groups: Sequence[Group],
    *,
    clip: float = CLIP,
    reward_weight: float = 0.0,
    top: int = 0,
    advantage: Advantage = GRPO,
) -> Batch:
    """Makes a step's batch as `make_batch` does, with what the teacher says of each token. For `job.train`.

    clip: bound of a token's advantage, in nats. reward_weight: what multiplies the group's advantages, which are added
    to those of the tokens; 0: the reward is only measured. top: how many of the teacher's likeliest tokens the learner
    gets in place of the token's advantage; 0: none. Raises ValueError for a trajectory that no teacher has scored.
    """
    batch = make_batch(step, groups, advantage=advantage)
    batch = replace(batch, advantages_B=np.asarray(reward_weight * batch.advantages_B, np.float32))
    parts = [part for group in groups for index in group.kept for part in group.trajectories[index].parts]
    if not parts:
        return batch
    if top:
        pairs = [_scores(part, top).top_TK for part in parts]
        ids_NK, logprobs_NK = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
        return replace(batch, teacher_ids_NK=ids_NK, teacher_logprobs_NK=logprobs_NK)
    rows = [
        token_advantages(_scores(part, top).logprobs_T, part.logprobs_T, part.sampled_T, clip=clip) for part in parts
    ]
    return replace(batch, token_advantages_N=np.concatenate(rows))


def _scores(part: Trajectory | Segment, top: int) -> TokenScores:
    scores = part.teacher
    if scores is None or scores.top < top or np.isnan(scores.logprobs_T[part.sampled_T]).any():
        lacks = "no teacher has scored it" if scores is None else f"it has scores of {scores.top} tokens, or lacks some"
        raise ValueError(
            f"a trained sequence of {len(part.token_ids_T)} tokens must have scores of a teacher, top={top}: {lacks}. "
            "Fix: job.group(teacher.scores(rollouts), ...)"
        )
    return scores
