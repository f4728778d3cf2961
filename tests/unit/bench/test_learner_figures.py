"""The figures of the learner's bench, also where a contender has no memory."""

import torch

from bench.benches.learner import Facts, figures, time_contender


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
    ours = {"plan": 0.1, "passes": 1.0, "optimizer": 0.1, "publish": 0.1}
    facts = Facts(tokens=10, step_flops=1.0, peak_bytes=1, peak_flops=None)
    rows = figures(facts, {**ours, **clock.seconds})
    assert rows["padded"] == {"tokens_per_s": 5.0, "learner_is": 2.0}
    assert rows["learner"]["tokens_per_s"] == 10.0
    assert rows.keys() == {"learner", "padded"}
    assert "mfu" not in rows["learner"], "the device's peak is not known"
