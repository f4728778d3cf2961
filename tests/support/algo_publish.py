"""Publishes odd shapes over and over, on several ranks: `algo_publish.py FOLDER TIMES`. Rank 0 compares."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from algo.learner.learner import leave
from algo.learner.state.publish import Publisher
from algo.learner.trainer import join_group


class Scorer(nn.Module):
    """Rows that the ranks share evenly, unevenly, and that are fewer than the ranks."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(width, width % 7 + 1) for width in range(1, 31)))


def main(folder, times):
    join_group()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    scorer = Scorer()
    expected = {name: weight.clone() for name, weight in scorer.model.state_dict().items()}
    fully_shard(scorer)
    publisher = Publisher(scorer, folder)
    for version in range(times):
        path = publisher.publish(version)
        if dist.get_rank() == 0 and version in (0, times - 1):
            found = load_file(path)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], weight) for name, weight in expected.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    leave(0)
