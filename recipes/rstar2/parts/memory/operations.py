"""Computes the operations of a training step: what the model needs, what is executed, and the MFU that this allows.

A test compares both with PyTorch's FlopCounterMode over the learner's own code (tests/real/algo/
test_fake_gpus.py). How near kernels come to a GPU's peak is an assumption: nothing was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.rstar2.parts.memory.plan import Plan

# Share of the peak that matrix products of a whole step reach.
PRODUCTS = 0.6
# Share of the peak that attention reaches on an H100: 35 % by FlashAttention 2, and 1.5 to 2 times that by 3
# (FlashAttention-3, arXiv 2407.08608, abstract).
ATTENTION = {"FA2": 0.35, "FA3": 0.6}


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
    a forward pass.
    """
    model, kind = plan.model, plan.learner.activation_checkpointing
    wide = model.hidden * model.intermediate  # each of the MLP's three matrices
    weights = 2 * model.hidden * (model.queries + model.keys) + 3 * wide
    adapters = plan.adapters // model.layers
    frozen = adapters > 0
    layer = (4 if frozen else 6) * weights + 6 * adapters
    again = {
        "none": 0,
        "selective": 0,
        "attention": 2 * wide,
        "full": weights - (0 if frozen else wide),  # the last product is needed by its adapter only
    }[kind]
    if kind != "none":
        again += adapters
    head = (4 if frozen else 6) * model.head
    square = 2.0 * model.queries * model.layers * tokens**2
    forward = 1 if plan.learner.reference_kl_coef else 0  # passes of the reference
    return Operations(
        needed=model.layers * layer * tokens + head * targets + 3 * square,
        products=model.layers * (layer + 2 * (again + forward * weights)) * tokens
        + (head + 2 * (1 + forward) * model.head) * targets,
        attention=((4.5 if kind == "full" else 3.5) + forward) * square,
    )
