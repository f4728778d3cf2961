"""Computes what a layer keeps of each token for its backward pass, and what that pass takes beside it, in bytes.

Experts get the tokens that were sent to them side by side, so what they keep and compute has k rows a token.

Legend: H hidden size, I intermediate size (of an expert in a mixture), S that of shared experts, Q and K widths of all
query and key heads, E experts of a layer, k experts of a token; float32 has 4 bytes, bfloat16 has 2.
"""

from __future__ import annotations

from recipes.rstar2.parts.memory.model import Mixture, Model
from recipes.rstar2.parts.memory.plan import Plan


def layer_activations(model: Model, *, adapters: bool = False, mixed: bool = True) -> int:
    """Returns the bytes that a layer without checkpointing keeps of each token for its backward pass.

    Two norms keep their inputs in float32, normalised inputs and outputs (16 H); attention keeps queries, keys, values
    and its output with the sums of each head (4 Q + 4 K + 4 a head); the MLP four wide tensors (8 I). Norms of queries
    and keys keep as much as the others of each (6 Q + 6 K). Frozen norms, beside adapters, need no normalised inputs.
    Where rotary embeddings join each head of parts, heads lie one after another, and the output is copied (2 Q). Norms
    that multiply in float32 keep normalised inputs of twice the size (4 H).

    mixed: of a mixture, whether it is a layer with experts.
    """
    normalised = (8 if model.float_norms else 4) * model.hidden
    norms = normalised + (2 * (model.queries + model.keys) if model.norms_queries else 0)
    return (
        12 * model.hidden
        + normalised
        + 4 * (model.queries + model.keys + model.heads)
        + 2 * model.queries * model.copies_heads
        + (_expert_activations(model, model.mixture, adapters) if mixed and model.mixture else 8 * model.intermediate)
        + (6 * (model.queries + model.keys) if model.norms_queries else 0)
        - (norms if adapters else 0)
    )


def _expert_activations(model: Model, mixture: Mixture, adapters: bool) -> int:
    """Returns the bytes that the experts of a layer and their router keep of each token.

    A row of an expert keeps its input, its output and the four wide tensors (4 H + 8 I); if experts are frozen, their
    products need no inputs (2 H + 6 I). Experts with biases keep their wide tensors before and after they are clamped,
    and a sigmoid beside them (14 I). The router keeps the scores of all experts, and its input where that is made
    float32.
    """
    hidden, row = model.hidden, 4 * model.hidden + (14 if mixture.biased else 8) * mixture.width
    if adapters:
        row -= 2 * (hidden + mixture.width)
    router = 4 * mixture.experts + (4 * hidden if mixture.router_bytes == 4 else 0)
    return mixture.per_token * row + router + 8 * mixture.shared + 2 * hidden * mixture.gated


def kept_activations(plan: Plan, *, mixed: bool = True) -> int:
    """Returns the bytes that a layer keeps of each token until its backward pass: its input, and what the kind of
    checkpointing says (`algo.learner.model.recompute`). Beside adapters a dense MLP's last product is kept too.
    """
    model, adapters = plan.model, plan.learner.lora_rank > 0
    mixture = model.mixture if mixed else None
    attention = 4 * model.queries + 4 * model.keys + 4 * model.heads + 2 * model.hidden
    wide = 4 * model.intermediate
    last = 2 * model.hidden if adapters else 0
    if mixture:
        attention += mixture.router_bytes * mixture.experts
        products = 0 if mixture.biased else 4 * mixture.width + 2 * model.hidden
        wide = mixture.per_token * products + 4 * mixture.shared
        last = last if mixture.shared else 0
    match plan.learner.activation_checkpointing:
        case "full":
            return 2 * model.hidden
        case "attention":
            return 2 * model.hidden + attention + last
        case "selective":
            return 2 * model.hidden + attention + last + wide
    return layer_activations(model, adapters=adapters, mixed=mixed)


def all_kept(plan: Plan) -> int:
    """Returns the bytes that all layers keep of each token on the GPU."""
    if plan.learner.activation_offload:
        return 2 * kept_activations(plan)
    mixed = plan.model.layers - plan.model.dense_layers
    return mixed * kept_activations(plan) + plan.model.dense_layers * kept_activations(plan, mixed=False)


def backward_of_layer(plan: Plan) -> tuple[int, int]:
    """Returns the bytes of (activations of the row, gradients of weights) that a layer's backward pass takes at most,
    beside what the layer has kept.

    A dense MLP has two wide gradients, and that of one matrix. Experts are highest at one of three moments: when rows
    are brought back into the order of tokens there are three copies of them; then the gradients of the wide tensors
    come with that of the last matrix; then those of all matrices are there. Beside adapters experts with biases have
    two wide gradients more.
    """
    model, tokens, full = plan.model, plan.rank_tokens, not plan.learner.lora_rank
    if (mixture := model.mixture) is None:
        return (4 * model.intermediate + 6 * model.hidden) * tokens, 2 * model.hidden * model.intermediate * full
    rows, hidden, wide = mixture.per_token * tokens, 2 * model.hidden, 2 * mixture.width
    moments = (
        (6 * model.hidden * tokens + rows * 3 * mixture.score_bytes * model.hidden, 0),
        (
            6 * model.hidden * tokens + rows * ((2 if full else 5 if mixture.biased else 3) * wide - hidden),
            mixture.matrices * 2 // 3,
        ),
        (6 * model.hidden * tokens - rows * 2 * wide, 2 * mixture.matrices),
    )
    return max(moments if full else [(size, 0) for size, _ in moments], key=sum)
