"""Checks of the promises that a loss and a weight transport must keep. Run them on your own:

    from algo import contracts

    def test_my_loss():
        contracts.check_loss(MyLoss())

A check raises AssertionError with the promise that was broken. The checks for tools, rewards, selectors, replicas and
placement are in `engine.contracts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from algo.learner.serialize import from_plain, to_plain
from algo.loss.interface import Tokens, Totals


def check_loss(loss: Any, lengths: Sequence[int] = (1, 5, 3), seed: int = 0) -> None:
    """Checks that a loss keeps the promises of `algo.loss.interface.Loss`.

    It returns a scalar and sums over tokens, which add up however trajectories are divided; it is 0 without a token to
    learn from; it reaches the learner as plain values.
    """
    assert from_plain(to_plain(loss)) == loss, "the learner builds the same loss from its plain values"
    rng = torch.Generator().manual_seed(seed)
    totals = Totals(tokens=sum(lengths), sequences=len(lengths))
    sequence_M = torch.repeat_interleave(torch.tensor(lengths))
    values = {
        name: torch.randn(totals.tokens, generator=rng, dtype=torch.float64)
        for name in ("logprobs_M", "old_logprobs_M", "proximal_logprobs_M")
    }
    values = {name: -1 - 0.2 * value.abs() for name, value in values.items()}
    values["advantages_M"] = torch.randn(len(lengths), generator=rng, dtype=torch.float64)[sequence_M]

    def called(trajectories: Sequence[int]) -> tuple[Any, Any, Any]:
        chosen = [at for at, sequence in enumerate(sequence_M.tolist()) if sequence in trajectories]
        at = torch.tensor(chosen, dtype=torch.long)
        tensors = {name: value[at] for name, value in values.items()}
        logprobs_M = tensors.pop("logprobs_M").requires_grad_()
        order = {sequence: index for index, sequence in enumerate(trajectories)}
        renumbered_M = torch.tensor([order[int(sequence_M[index])] for index in chosen], dtype=torch.long)
        versions_M = torch.zeros(len(chosen), dtype=torch.int32)
        parts = {"sequence_M": renumbered_M, "sequences": len(trajectories), "versions_M": versions_M}
        value, counts = loss(Tokens(logprobs_M=logprobs_M, **tensors, **parts), totals)
        assert value.shape == (), f"a loss is a scalar, not of shape {tuple(value.shape)}"
        assert value.isfinite(), f"the loss of finite tokens is finite, not {value}"
        value.backward()
        gradient = torch.zeros(totals.tokens, dtype=torch.float64)
        assert logprobs_M.grad is not None, "the loss is differentiable in the learner's log-probabilities"
        gradient[at] = logprobs_M.grad
        assert gradient.isfinite().all(), "the gradient is finite"
        assert not any(count.requires_grad for count in counts.values()), "what is counted carries no gradient"
        assert all(count.shape == () for count in counts.values()), "what is counted is a scalar each"
        return value.detach(), gradient, {name: float(count) for name, count in counts.items()}

    everything = range(len(lengths))
    whole, parts = called(everything), [called([index]) for index in everything]
    assert [part[2].keys() for part in parts] == [whole[2].keys()] * len(parts), "the same names each time"
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0], msg="the losses of parts add up")
    torch.testing.assert_close(sum(part[1] for part in parts), whole[1], msg="the gradients of parts add up")
    for name, count in whole[2].items():
        of_parts = [part[2][name] for part in parts]
        assert math.isclose(count, max(of_parts) if name.endswith("_max") else sum(of_parts), abs_tol=1e-9), name
    again, nothing = called(everything), called([])
    assert torch.equal(again[0], whole[0]), "the same tokens, the same loss"
    assert (float(nothing[0]), nothing[2].keys()) == (0.0, whole[2].keys()), "no token: 0, and the same names"


def check_transport(transport: Any, read: Callable[[str, int], Mapping[str, Any]]) -> None:
    """Checks a transport (`algo.weights.layout.Transport`): replicas read all that was written as a version.

    read: returns the weights by name that a replica gets at an address for a version.
    """
    for version in range(4):  # the transport writes its memory again
        with transport.writing(version) as views:
            for number, view in enumerate(views.values()):
                view.fill_(10 * version + number)
        assert views, "this rank hands nothing on"
        for _ in range(2):
            weights = read(transport.address(version), version)
            assert weights.keys() == views.keys(), f"read: {sorted(weights)}"
            for number, (name, view) in enumerate(views.items()):
                assert weights[name].shape == view.shape, name
                assert weights[name].dtype == view.dtype, name
                assert weights[name].eq(10 * version + number).all(), f"{name} of version {version} is {weights[name]}"
