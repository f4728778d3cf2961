"""Computes the operations of a training step: what the model needs, what is executed, and the MFU that this allows.

A test compares both with PyTorch's FlopCounterMode over the learner's own code (tests/real/algo/
test_fake_gpus.py). How near kernels come to a GPU's peak is an assumption. On an H200 attention reached 31 to 33 % of
it, and the MFU was 0.16 and 0.25 where this allows 0.33 and 0.31 (recipes/machines.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.rstar2.parts.memory.plan import Plan

# Share of the peak that matrix products of a whole step reach.
PRODUCTS = 0.6
# Share of the peak that attention reaches on an H100: 35 % by FlashAttention 2, and 1.5 to 2 times that by 3
# (FlashAttention-3, arXiv 2407.08608, abstract).
ATTENTION = {"FA2": 0.35, "FA3": 0.6}
PEAK = 989e12  # operations per second of an H100 or H200 in bfloat16, by its data sheet
LINK = 450e9  # bytes per second that NVLink brings to one of them, by its data sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Counts operations of a trajectory: those `needed` for MFU (`algo.learner.measure.flops`), and those executed."""

    needed: float
    products: float
    attention: float

    @property
    def executed(self) -> float:
        return self.products + self.attention

    def mfu(self, kernels: str) -> float:
        """Returns the MFU at which all kernels run as fast as assumed, and nothing else takes time."""
        return self.needed / (self.products / PRODUCTS + self.attention / ATTENTION[kernels])


def operations(plan: Plan, *, tokens: int, targets: int) -> Operations:
    """Returns the operations for a trajectory with so many inputs and targets.

    A weight costs 2 operations a token forward, 2 for the gradient of the input and 2 for its own. What is computed
    again costs the forward pass once more: of the layers, as the kind of checkpointing says, and always of the logits.
    FlashAttention computes its scores again in any case: 5 products backward, of which 4 are needed. A reference costs
    a forward pass. A token goes through the router, its own experts and the shared ones of a layer.
    """
    model, mixture = plan.model, plan.model.mixture
    attention = 2 * model.hidden * (model.queries + model.keys)
    routers = mixture.layers * mixture.experts * model.hidden if mixture else 0
    dense = 3 * model.dense_layers * model.hidden * model.intermediate
    experts = model.experts * mixture.per_token // mixture.experts if mixture else 0
    shared = mixture.layers * model.hidden * (3 * mixture.shared + mixture.gated) if mixture else 0
    weights = model.layers * attention + routers + dense + experts + shared
    adapters = plan.adapters
    frozen = adapters > 0
    layers = (4 if frozen else 6) * weights + 6 * adapters
    if mixture and not plan.learner.train_router:
        layers -= 2 * routers * (not frozen)
    gated = mixture.layers * model.hidden * mixture.shared if mixture and mixture.gated else 0
    again = _again(plan, weights=weights, wide=dense + shared, experts=experts, gated=gated)
    head = (4 if frozen else 6) * model.head
    square = 2.0 * model.queries * model.layers * tokens**2
    forward = 1 if plan.learner.reference_kl_coef else 0  # passes of the reference
    return Operations(
        needed=layers * tokens + head * targets + 3 * square,
        products=(layers + 2 * (again + forward * weights)) * tokens
        + (head + 2 * (1 + forward) * model.head) * targets,
        attention=((4.5 if plan.learner.activation_checkpointing == "full" else 3.5) + forward) * square,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Says how long a row of the learner takes at least, in seconds on an H100, if nothing else takes time.

    needed and computing: a rank's operations, of its part where ranks share the row. moving: its weights and gradients
    between GPUs, `moved` bytes to each. Both can happen at the same time.
    """

    needed: float
    computing: float
    moved: int

    @property
    def moving(self) -> float:
        return self.moved / LINK

    @property
    def mfu(self) -> float:
        """Returns the MFU at most, if the shorter of both hides behind the longer."""
        return self.needed / PEAK / max(self.computing, self.moving)


def row(plan: Plan, *, tokens: int, targets: int) -> Row:
    """Returns what a full row of trajectories with so many inputs and targets takes, with FlashAttention 2.

    Each pass gathers the weights in bfloat16, all experts of a layer too, and gradients go to their ranks in float32.
    """
    trajectories = plan.learner.micro_batch_tokens / tokens / plan.learner.context_parallel
    counted, others = operations(plan, tokens=tokens, targets=targets), (plan.shards - 1) / plan.shards
    return Row(
        needed=trajectories * counted.needed,
        computing=trajectories * counted.needed / counted.mfu("FA2") / PEAK,
        moved=int((2 * 2 * plan.weights + 4 * plan.trained) * others),
    )


def _again(plan: Plan, *, weights: int, wide: int, experts: int, gated: int) -> int:
    """Returns the weights whose products are computed again, of all layers (`algo.learner.model.recompute`).

    A dense MLP's last product, a third of it, is needed by its adapter only. That of experts is needed by the gradient
    of the router, and that of shared experts by their gate, if they have one. No product of experts with biases is
    kept.

    weights: of all products. wide: those of dense MLPs and of shared experts. experts: those of a token's experts.
    gated: those of the last products of shared experts with a gate.
    """
    kind, adapters = plan.learner.activation_checkpointing, plan.adapters
    biased = plan.model.mixture is not None and plan.model.mixture.biased
    last = wide // 3 - gated
    again = {
        "none": 0,
        "selective": (0 if adapters else gated) + (experts if biased else 0),
        "attention": wide - wide // 3 + experts + (0 if adapters else gated),
        "full": weights - (0 if adapters and "down_proj" in plan.learner.lora_targets else last),
    }[kind]
    return again + (adapters if kind != "none" else 0)
