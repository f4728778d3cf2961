"""The optimizer's state leaves its device and comes back with the same bits."""

import torch

from algo.offload import offload, onload


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


def test_what_was_on_a_device_leaves_it_and_returns_and_the_rest_stays():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[weight]
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
