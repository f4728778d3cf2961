"""The optimizer's state leaves its device when it is the replicas' turn, and comes back with the same bits."""

from types import SimpleNamespace

import torch

from algo.learner.config import LearnerConfig
from algo.learner.learner import Learner
from algo.learner.offload import offload, onload
from algo.learner.trainer import Trainer


class OnDevice(torch.Tensor):
    """Stands for a tensor on a GPU."""

    device = torch.device("cuda", 1)

    def to(self, device):
        assert device == "cpu"
        return self.as_subclass(OnHost)


class OnHost(torch.Tensor):
    def to(self, device):
        assert device == OnDevice.device
        return self.as_subclass(OnDevice)


def stepped():
    """An optimizer after a step, and its state."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer, optimizer.state[weight]


def test_what_was_on_a_device_leaves_it_and_returns_and_the_rest_stays():
    optimizer, state = stepped()
    before = {name: value.clone() for name, value in state.items()}
    assert offload(optimizer) == [], "nothing is on a device"
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = state[name].as_subclass(OnDevice)
    moved = offload(optimizer)
    assert sorted(name for _, name, _ in moved) == ["exp_avg", "exp_avg_sq"]
    assert {type(value) for value in state.values()} == {OnHost, torch.Tensor}
    onload(moved)
    assert {type(value) for value in state.values()} == {OnDevice, torch.Tensor}
    assert moved == []
    for name, value in before.items():
        assert torch.equal(state[name].as_subclass(torch.Tensor), value)


def test_a_trainer_releases_the_gpu_where_it_was_told_to_and_forgets_nothing():
    for told in (False, True):
        optimizer, state = stepped()
        state["exp_avg"] = state["exp_avg"].as_subclass(OnDevice)
        config = LearnerConfig(offload_optimizer=told)
        trainer = SimpleNamespace(config=config, optimizer=optimizer, offloaded=[], device=torch.device("cpu"))
        Trainer.release_gpu(trainer)
        Trainer.release_gpu(trainer)
        assert [name for _, name, _ in trainer.offloaded] == ["exp_avg"] * told


class Rank:
    """A trainer as far as it publishes."""

    weights_dir = "nowhere"

    def __init__(self):
        self.publisher, self.log = self, []

    def publish(self, version):
        self.log.append("publish")

    def score_canary(self):
        self.log.append("canary")

    def release_gpu(self):
        self.log.append("release_gpu")


def test_a_learner_releases_the_gpu_when_it_has_published_and_before_it_answers():
    """Also before the first step: what a checkpoint brought is on the device."""
    learner = Learner()
    learner._trainer = rank = Rank()
    learner._publish(0)
    assert rank.log == ["publish", "canary", "release_gpu"]
