"""What the bench of the learner says where a contender has no memory."""

import torch

from bench.benches.gpu import parts
from bench.benches.learner.learner import Facts, figures, time_contender


class Clock:
    def __init__(self):
        self.seconds = {}

    def time(self, name, work):
        work()
        self.seconds[name] = 2.0


def test_a_contender_without_memory_costs_its_own_figure_and_not_the_learners():
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    work, clock = {"bare": full, "padded": lambda: None}, Clock()
    for name in list(work):
        time_contender(name, work, clock)
    assert list(work) == list(clock.seconds) == ["padded"]
    ours = {"plan": 0.1, "forward and backward": 1.0, "clip and optimizer": 0.1, "publish": 0.1}
    facts = Facts(tokens=10, rows=1, parameters=5, step_flops=1.0, peak_bytes=1)
    found = figures([(facts, {**ours, "bare": 2.0}), (facts, ours)], None)
    assert found["bare_fraction"] is None
    assert found["tokens_per_s"] == {"learner": 10.0}
    row = parts.learner({"metrics": found})
    assert row["training_tgs"] == 10.0
