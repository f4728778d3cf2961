"""The optimizer's state leaves its device when it is the replicas' turn, and comes back with the same bits."""

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from algo.learner.config import LearnerConfig
from algo.learner.learner import Learner
from algo.learner.state.offload import Offloader
from algo.learner.trainer import Trainer


class OnDevice(torch.Tensor):
    """Stands for a tensor on a GPU."""

    device = torch.device("privateuseone", 1)
    __torch_function__ = torch._C._disabled_torch_function_impl


class ToDevice(TorchFunctionMode):
    """Copies from the host to that GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and args[1] == OnDevice.device:
            return args[0].clone().as_subclass(OnDevice)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def device():
    with ToDevice():
        yield


def stepped():
    """An optimizer after a step, and its state."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer, optimizer.state[weight]


def moved(state):
    """The state's moments are on a device now."""
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = state[name].as_subclass(OnDevice)


def test_what_was_on_a_device_leaves_it_and_returns_and_the_rest_stays():
    optimizer, state = stepped()
    offloader = Offloader(optimizer)
    assert offloader.offload() == 0, "nothing is on a device"
    moved(state)
    memory = {}
    for step in range(3):
        before = {name: value.as_subclass(torch.Tensor).clone() for name, value in state.items()}
        assert offloader.offload() == 2 * 3 * 4
        assert {type(value) for value in state.values()} == {torch.Tensor}
        own = {name: state[name].data_ptr() for name in ("exp_avg", "exp_avg_sq")}
        assert memory in ({}, own), "the same host memory each time"
        pieces = {state[name].untyped_storage().data_ptr() for name in own}
        assert len(pieces) == 1, "pinned memory is rounded up to a power of two, so it is taken once"
        memory = own
        offloader.onload()
        assert {type(value) for value in state.values()} == {OnDevice, torch.Tensor}
        for name, value in before.items():
            assert torch.equal(state[name].as_subclass(torch.Tensor), value)
        state["exp_avg"].as_subclass(torch.Tensor).add_(step + 1)  # the next step's
    offloader.onload()
    assert {type(value) for value in state.values()} == {OnDevice, torch.Tensor}, "nothing is away"


def test_a_trainer_releases_the_gpu_where_it_was_told_to_and_forgets_nothing():
    for told in (False, True):
        optimizer, state = stepped()
        moved(state)
        config = LearnerConfig(offload_optimizer=told)
        trainer = SimpleNamespace(config=config, offloader=Offloader(optimizer), device=torch.device("cpu"))
        Trainer.release_gpu(trainer)
        Trainer.release_gpu(trainer)
        assert type(state["exp_avg"]) is (torch.Tensor if told else OnDevice)
        trainer.offloader.onload()
        assert type(state["exp_avg"]) is OnDevice


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
    learner.trainer = rank = Rank()
    learner.publish(0)
    assert rank.log == ["publish", "canary", "release_gpu"]
