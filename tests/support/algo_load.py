"""Loads a checkpoint on several ranks: `algo_load.py CHECKPOINT RESULT`. Rank 0 writes what all ranks found.

By rank: how much the process's largest memory grew while it loaded, in bytes; the constants of the model; and once, the
whole weights and the log-probabilities of a row.
"""

import resource
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from algo.learner.config import LearnerConfig
from algo.learner.learner import leave
from algo.learner.model.loading import load
from algo.learner.state.publish import full_state
from algo.learner.trainer import join_group


def largest():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(checkpoint, result):
    join_group()
    torch.set_num_threads(1)
    torch.ones(8, 8) @ torch.ones(8, 8)
    before = largest()
    scorer, _ = load(LearnerConfig(threads=1), checkpoint)
    found = {
        "grown": largest() - before,
        "constants": {name: constant.clone() for name, constant in scorer.named_buffers()},
    }
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    ids_L = torch.arange(3, 10)
    with torch.no_grad():
        logprobs_M, _ = scorer(ids_L[None, :-1], torch.arange(6)[None], [6], np.arange(6), ids_L[1:])
    weights = full_state(scorer)
    if dist.get_rank() == 0:
        torch.save({"ranks": ranks, "weights": weights, "logprobs": logprobs_M}, result)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    leave(0)
