"""Computes what a rank of the learner allocates on its GPU, at each moment at which it may be most.

A test runs the learner's own code on fake GPUs and compares (tests/real/algo/test_fake_gpus.py): no GPU has been
compared. Ranks hold gathered weights of two layers at a time; a single rank keeps all of them.

Legend: P parameters and T trained ones (all, or those of the adapters), R ranks, H hidden size, I intermediate size, V
vocabulary, Q and K widths of all query and key heads, N tokens that a rank has of a row; float32 has 4 bytes, bfloat16
has 2.
"""

from __future__ import annotations

from algo.learner.model.scorer import LOGIT_ROWS
from recipes.rstar2.parts.memory.model import Model
from recipes.rstar2.parts.memory.plan import Plan

Parts = dict[str, int]


def layer_activations(model: Model, *, adapters: bool = False) -> int:
    """Returns the bytes that a layer without checkpointing keeps of each token for its backward pass.

    Two norms keep their inputs in float32, normalised inputs and outputs (16 H); attention keeps queries, keys, values
    and its output with the sums of each head (4 Q + 4 K + 4 a head); the MLP four wide tensors (8 I). Norms of queries
    and keys keep as much as the others of each (6 Q + 6 K). Frozen norms, beside adapters, need no normalised inputs.
    """
    norms = 4 * model.hidden + (2 * (model.queries + model.keys) if model.norms_queries else 0)
    return (
        16 * model.hidden
        + 4 * (model.queries + model.keys + model.heads)
        + 8 * model.intermediate
        + (6 * (model.queries + model.keys) if model.norms_queries else 0)
        - (norms if adapters else 0)
    )


def kept_activations(plan: Plan) -> int:
    """Returns the bytes that a layer keeps of each token until its backward pass: its input, and what the kind of
    checkpointing says (`algo.learner.model.recompute`). Beside adapters the MLP's last product is kept too.
    """
    model, last = plan.model, 2 * plan.model.hidden if plan.learner.lora_rank else 0
    attention = 4 * model.queries + 4 * model.keys + 4 * model.heads + 2 * model.hidden
    match plan.learner.activation_checkpointing:
        case "full":
            return 2 * model.hidden
        case "attention":
            return 2 * model.hidden + attention + last
        case "selective":
            return 2 * model.hidden + attention + last + 4 * model.intermediate
    return layer_activations(model, adapters=plan.learner.lora_rank > 0)


def learner_moments(plan: Plan) -> dict[str, Parts]:
    """Returns the parts of a rank's allocations in bytes, by moment: "loading", when the checkpoint is read, and three
    of the backward pass: "logits", "layers" and, where they are trained, "embeddings".
    """
    model, learner, ranks = plan.model, plan.learner, plan.devices.learner_ranks
    several, full = ranks > 1, not learner.lora_rank
    tokens = plan.rank_tokens
    root, layer, head = model.root_parameters, model.layer_parameters, model.head
    state = {"weights": 4 * plan.weights // ranks, "AdamW's moments": 8 * plan.trained // ranks}
    state["gradients"] = 4 * plan.trained // ranks
    if learner.reference_kl_coef and full:
        state["reference"] = 4 * model.parameters // ranks
    gathered = 2 * root if several else 2 * plan.weights
    kept = kept_activations(plan) * tokens * (2 if learner.activation_offload else model.layers)
    # A weight that is taken apart for the ranks lies there whole, filled up to equal shards. On a single rank one that
    # two modules share is made twice.
    largest = 4 * head + 4 * head // ranks if several else 4 * head * model.tied
    moments = {"loading": {"weights": state["weights"], "largest weight": largest} | _reference(state)}

    # A chunk of logits (bfloat16 and twice float32), and the head's gradient: when a chunk's is added, there are three.
    size = 4 if learner.fp32_head else 2  # of a weight of the head in its product
    logits = 10 * LOGIT_ROWS * model.vocabulary
    moments["logits"] = {
        **state,
        "gathered weights": gathered + (2 * layer if several else 0),
        "activations": kept + 10 * model.hidden * tokens,
        "logits": (max(logits + size * head, 3 * size * head) if full else logits) + 4 * head * learner.fp32_head,
    }

    # The last layer is computed again, as far as it was not kept; two gradients of its MLP; gradients of the layer
    # before it on their way to the ranks, in float32, while the head's wait.
    again = 0
    if learner.activation_checkpointing != "none":
        again = layer_activations(model, adapters=not full) * tokens - kept_activations(plan) * tokens
    widths = (4 * model.intermediate + 6 * model.hidden) * tokens
    on_their_way = (4 if several else 8) * layer + 2 * model.hidden * model.intermediate + 2 * head
    moments["layers"] = {
        **state,
        "gathered weights": gathered + (4 * layer if several else 0),
        "activations": kept + again + widths,
        "gradients on their way": on_their_way if full else 0,
    }

    if full:  # The root's weights are gone by then; its gradients are there in bfloat16, and in float32 for the ranks.
        moments["embeddings"] = {**state, "gradients on their way": 6 * root + 4 * root // ranks}
    return moments


def _reference(state: Parts) -> Parts:
    return {name: size for name, size in state.items() if name == "reference"}


def learner_at_rest(plan: Plan) -> int:
    """Returns the bytes of a rank between steps, while replicas sample.

    The optimizer's state is in host memory where they have the same GPU.
    """
    parts = learner_moments(plan)["layers"]
    moments = 0 if plan.devices.shared else parts["AdamW's moments"]
    return parts["weights"] + moments + parts.get("reference", 0)
