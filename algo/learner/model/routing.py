"""Replays the sampler's routes: the routers of a mixture send each token to the experts that the sampler chose for it.

Invariants
- A router computes its scores and weights by its own code, for the given experts in place of those that it would have
  chosen, so it learns as it does without replay. With its own choice as routes nothing changes, bit by bit.
- A position without a route is routed freely.
- Where ranks share a row, each has the routes of its own positions, and filler has none.
- What activation checkpointing computes again has the routes of the first time: they travel with a layer's arguments.
- No layer ignores its routes: a router that does not choose by one `topk` over its experts, and a model that does not
  pass the layers' arguments on, raise.

Shape legend: L positions of a row, or of a rank's part of it, X layers that are mixtures, E experts that a token is
sent to, N experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from algo.learner.model.context import RowPart
from algo.learner.model.experts import MixtureLayer, mixture_of
from engine.routes import absent

ARGUMENT = "sampler_routes"  # under this name the layers are given a RowRoutes
_TOPK = (torch.topk, Tensor.topk)


class RowRoutes:
    """The routes of one row, and after a forward pass where the model would have chosen others.

    replay: whether the routers follow the routes; False: they only compare them with their own choice. part: where
    ranks share the row, what this rank has of it; the routes are given whole.
    """

    def __init__(
        self, routes_LXE: NDArray[Any], device: torch.device, *, replay: bool, part: RowPart | None = None
    ) -> None:
        self.replay = replay
        filler = 0
        if part is not None:
            routes_LXE = routes_LXE[part.start : part.start + part.tokens]
            filler = part.positions - part.tokens
        self.tokens = len(routes_LXE)
        known_L = (routes_LXE != absent(routes_LXE.dtype)).all((1, 2))
        ids_LXE = np.where(known_L[:, None, None], routes_LXE, 0).astype(np.int64)
        self.known_L = pad(torch.from_numpy(known_L), (0, filler)).to(device)
        self._ids_XLE = pad(torch.from_numpy(ids_LXE.transpose(1, 0, 2).copy()), (0, 0, 0, filler)).to(device)
        self._differing: dict[int, Tensor] = {}  # by layer, where the model would have chosen others, [L]

    @property
    def layers(self) -> int:
        return len(self._ids_XLE)

    def ids_LE(self, index: int) -> Tensor:
        """Returns the experts of each position in one of the mixture's layers."""
        return self._ids_XLE[index]

    def note(self, index: int, own_LE: Tensor) -> None:
        """Notes what a layer would have chosen by itself; a layer that is computed again changes nothing."""
        if index not in self._differing:
            same_L = (own_LE.sort(-1).values == self._ids_XLE[index].sort(-1).values).all(-1)
            self._differing[index] = self.known_L & ~same_L

    def differing_L(self) -> Tensor:
        """Returns where a layer's own choice was not the sampler's. Raises ValueError if a layer was not asked."""
        if len(self._differing) < self.layers:
            raise ValueError(
                f"{self.layers - len(self._differing)} of {self.layers} layers did not get the sampler's routes, as "
                "the model does not pass its layers' arguments on. Fix: replay_routing=false, or another model"
            )
        return torch.stack([*self._differing.values()]).any(0)


def follow_routes(model: PreTrainedModel) -> list[MixtureLayer]:
    """Makes the routers of a model follow the RowRoutes that its layers are given; a dense model is left as it is.

    Returns the layers that are mixtures.
    """
    mixtures = mixture_of(model)
    if not mixtures:
        return mixtures
    followers = {mixture.layer: _Follower(index, mixture) for index, mixture in enumerate(mixtures)}
    for number, layer in enumerate(model.base_model.layers):
        layer.register_forward_pre_hook(partial(_take, followers.get(number)), with_kwargs=True)
    return mixtures


def check_shape(routes_NXE: NDArray[Any], mixtures: list[MixtureLayer]) -> None:
    """Raises ValueError for routes that are not of this model."""
    expected = len(mixtures), mixtures[0].per_token if mixtures else 0
    if routes_NXE.shape[1:] != expected:
        raise ValueError(
            f"the sampler's routes have {routes_NXE.shape[1]} layers of {routes_NXE.shape[2]} experts, the learner's "
            f"model has {expected[0]} of {expected[1]}. Fix: give both the same checkpoint"
        )
    known = routes_NXE[routes_NXE != absent(routes_NXE.dtype)]
    if known.size and int(known.max()) >= (experts := min(mixture.count for mixture in mixtures)):
        raise ValueError(f"a route names expert {known.max()}, and a layer of the learner's model has {experts}")


def _take(follower: _Follower | None, _layer: nn.Module, given: Any, options: dict[str, Any]) -> Any:
    """Takes the routes out of a layer's arguments, which its own code does not know."""
    routes = options.pop(ARGUMENT, None)
    if follower is not None:
        follower.routes = routes
    return given, options


class _Follower:
    """Stands before the forward pass of a router. routes: those of the pass under way."""

    def __init__(self, index: int, mixture: MixtureLayer) -> None:
        self.index = index
        self.routes: RowRoutes | None = None
        self._experts, self._per_token = mixture.count, mixture.per_token
        self._name = f"{mixture.name}'s router ({type(mixture.router).__name__})"
        self._forward: Callable[..., Any] = mixture.router.forward
        mixture.router.forward = self._route

    def _route(self, *inputs: Any, **options: Any) -> Any:
        if self.routes is None:
            return self._forward(*inputs, **options)
        with _Chosen(self._experts, self._per_token, self.routes, self.index) as chosen:
            result = self._forward(*inputs, **options)
        if chosen.times != 1:
            raise ValueError(
                f"{self._name} chooses its experts by {chosen.times} calls of topk over {self._experts} scores, and "
                "only one can be replayed. Fix: replay_routing=false, or another model"
            )
        return result


class _Chosen(TorchFunctionMode):
    """Gives the sampler's choice as the result of the `topk` by which a router chooses its experts."""

    def __init__(self, experts: int, per_token: int, routes: RowRoutes, index: int) -> None:
        super().__init__()
        self.times = 0
        self._experts, self._per_token, self._routes, self._index = experts, per_token, routes, index

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or result.indices.dim() != 2:
            return result
        scores_LN, own_LE = args[0], result.indices
        if (scores_LN.shape[-1], own_LE.shape[-1]) != (self._experts, self._per_token):
            return result  # such as the choice among groups of experts
        self.times += 1
        routes = self._routes
        routes.note(self._index, own_LE)
        if not routes.replay:
            return result
        chosen_LE = torch.where(routes.known_L[:, None], routes.ids_LE(self._index), own_LE)
        return torch.return_types.topk((scores_LN.gather(-1, chosen_LE), chosen_LE))
