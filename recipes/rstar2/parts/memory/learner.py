"""Computes what a rank of the learner allocates on its GPU, at each moment at which it may be most.

A test runs the learner's own code on fake GPUs and compares (tests/real/algo/test_fake_gpus.py); four cases were
compared with an H200 (recipes/machines.md). Ranks hold gathered weights of two layers at a time; a single rank keeps
all of them.

Legend: P parameters and T trained ones (all, or those of the adapters), R ranks, H hidden size, V vocabulary, N tokens
that a rank has of a row; float32 has 4 bytes, bfloat16 has 2.
"""

from __future__ import annotations

from algo.learner.model.scorer import LOGIT_ROWS
from recipes.rstar2.parts.memory.activations import all_kept, backward_of_layer, kept_activations, layer_activations
from recipes.rstar2.parts.memory.plan import Plan

Parts = dict[str, int]


def learner_moments(plan: Plan) -> dict[str, Parts]:
    """Returns the parts of a rank's allocations in bytes, by moment: "loading", when the checkpoint is read, four of
    the backward pass ("logits", with several ranks "gathering", "layers" and, where they are trained, "embeddings"),
    and "publishing".
    """
    model, learner, ranks = plan.model, plan.learner, plan.shards
    several, full = ranks > 1, not learner.lora_rank
    tokens = plan.rank_tokens
    root, layer, head = model.root_parameters, plan.layer, model.head
    experts = int(model.mixture.matrices * plan.padding) if model.mixture else 0
    state = {"weights": 4 * plan.of_a_rank(plan.weights), "AdamW's moments": 8 * plan.of_a_rank(plan.trained)}
    state["gradients"] = 4 * plan.of_a_rank(plan.trained)
    if learner.reference_kl_coef and full:
        state["reference"] = 4 * plan.of_a_rank(model.parameters)
    gathered = 2 * root if several else 2 * plan.weights
    kept = all_kept(plan) * tokens
    # A weight that is taken apart for the ranks lies there whole, filled up to equal shards. On a single rank one that
    # two modules share is made twice.
    whole = max(head, 2 * experts // 3)
    largest = 4 * whole + 4 * whole // ranks if several else 4 * head * model.tied
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

    # When a layer's weights have come and are put in their places, they lie there twice, beside those of another layer.
    if several:
        moments["gathering"] = {**state, "gathered weights": gathered + 6 * layer, "activations": kept}

    # A layer is computed again, as far as it was not kept. Either it is the last one, or gradients of the one after it
    # are on their way to the ranks, in float32, and what that one has kept is gone. The head's gradients wait.
    again = 0
    if learner.activation_checkpointing != "none":
        again = layer_activations(model, adapters=not full) * tokens - kept_activations(plan) * tokens
    widths, matrices = backward_of_layer(plan)
    sent = (4 if several else 8) * layer if full else 0
    gone = 0 if learner.activation_offload else kept_activations(plan) * tokens
    if sent < gone:
        sent = gone = 0
    moments["layers"] = {
        **state,
        "gathered weights": gathered + (4 * layer if several else 0),
        "activations": kept + again + widths - gone,
        "gradients on their way": sent + matrices + 2 * head if full else 0,
    }

    if full:  # The root's weights are gone by then; its gradients are there in bfloat16, and in float32 for the ranks.
        moments["embeddings"] = {**state, "gradients on their way": 6 * root + 4 * root // ranks}
    # A weight is gathered in float32, and the next one ahead. Gradients are gone by then.
    published = 4 * max(head + model.hidden * model.intermediate, experts) if several else 0
    moments["publishing"] = {**state, "gradients": 0, "gathered weights": published}
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
