"""Lets an engine report the routes of its tokens. It runs inside the engine's workers, and adapts interfaces of vLLM.

On GPUs vLLM reports them itself (`enable_return_routed_experts`), with a row for each decoder layer; this only says
which of the layers are mixtures (vLLM 0.32). On the CPU vLLM cannot. There each router tells its choice, which is kept
by KV slot (`engine.replica.routes.slots`) in the one process that the engine has, where its scheduler reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context

from engine.replica.routes.slots import RouteSlots

_HELD: list[RouteSlots] = []  # of the engine in this process


def held() -> RouteSlots | None:
    """Returns the routes that this process keeps; None if it keeps none."""
    return _HELD[0] if _HELD else None


def report_routes(runner: Any, *, on_cpu: bool) -> tuple[list[int], int]:
    """Makes an engine keep its routes from now on. runner: vLLM's model runner, with a KV cache.

    Returns which rows of what it reports are those of mixtures, and the experts of a layer. Raises ValueError for a
    model whose routes cannot be known.
    """
    # Imported here: engines of dense models do not need them.
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    mixtures = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
    if not mixtures:
        raise ValueError("returns_routes must be False for a model that is no mixture of experts, got True")
    for module in mixtures:
        silent = module._quant_method if on_cpu and module._quant_method.is_monolithic else module.router
        if silent is not module.router or not isinstance(module.router, BaseRouter):
            raise ValueError(
                "returns_routes (learner.replay_routing) must be False here, got True: "
                f"{type(silent).__name__} does not tell which experts it chooses"
            )
    experts = max(module.router.global_num_experts for module in mixtures)
    if not on_cpu:
        return [module.layer_id for module in mixtures], experts
    settings = runner.kv_cache_config
    number = _lasting(settings.kv_cache_groups)
    group = settings.kv_cache_groups[number]
    slots = RouteSlots(
        blocks=settings.num_blocks,
        block_size=group.kv_cache_spec.block_size,
        layers=len(mixtures),
        per_token=mixtures[0].router.top_k,
        experts=experts,
        group=number,
    )
    for index, module in enumerate(mixtures):
        module.router.set_capture_fn(partial(_keep, slots, index, group.layer_names[0]))
    _HELD[:] = [slots]
    return list(range(len(mixtures))), experts


def _lasting(groups: Sequence[Any]) -> int:
    """Returns which group of layers keeps the slots of a request until it ends; 0 if each forgets some."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    lasting = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
    return lasting[0] if lasting else 0


def _keep(slots: RouteSlots, layer: int, attention: str, ids_LE: Tensor) -> None:
    """Keeps what a layer chose in a step. attention: the name of a layer by whose slots tokens are kept."""
    mapping = get_forward_context().slot_mapping
    if isinstance(mapping, dict) and attention in mapping:  # otherwise vLLM only tries the model out
        slots.write(layer, mapping[attention].numpy(), ids_LE.numpy())
