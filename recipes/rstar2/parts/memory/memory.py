"""Computes how much memory a run takes on GPUs, by one formula for each part. **None was compared with a GPU.**

A test compares them with the tensors of the real learner, and with what autograd keeps of the models in PUBLIC, as fake
tensors (tests/unit/recipes/test_rstar2_fit.py). What CUDA, NCCL and vLLM take for themselves is estimated.

Legend: P parameters and T trained ones (all, or those of the adapters), R ranks of the learner, H hidden size, I
intermediate size, V vocabulary, Q and K widths of all query and key heads, N tokens of a pass; bfloat16 has 2 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from algo.learner.config import LearnerConfig
from algo.learner.model.scorer import LOGIT_ROWS
from engine.assembly.devices import DevicePlan
from engine.replica.config import MEMORY_SHARE, STEP_TOKENS
from recipes.rstar2.parts.memory.model import Model

GIB = 1 << 30
USABLE = 0.985  # CUDA gives programs some 79 GiB of a GPU that is sold with 80 GB

# Estimates.
RESERVE_BYTES = 2 * GIB  # a process takes it on a GPU for CUDA's context and NCCL's buffers
ASLEEP_BYTES = 3 * GIB // 2  # a replica that sleeps keeps it: its context and CUDA graphs
FRAGMENTATION = 0.05  # share of what the learner allocates beyond its weights
PROCESS_BYTES = 3 * GIB  # host memory of a rank or an engine
LARGEST_SHARE = 0.9  # the most that a replica takes of a GPU that it shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A model and the settings that decide how much memory it takes.

    max_tokens: length of the longest trajectory; the learner's rows (`micro_batch_tokens`) hold it.
    """

    model: Model
    devices: DevicePlan
    learner: LearnerConfig
    max_tokens: int
    gpu_bytes: int

    @property
    def adapters(self) -> int:
        return self.learner.lora_rank * self.model.layers * self.model.adapter_width

    @property
    def weights(self) -> int:
        """P, the number of all parameters."""
        return self.model.parameters + self.adapters

    @property
    def trained(self) -> int:
        """T, the number of trained parameters."""
        return self.adapters or self.model.parameters

    @property
    def share(self) -> float:
        """The share of a GPU that a replica takes.

        Where both share a GPU, it is what the learner at rest leaves free.
        """
        if not self.devices.shared:
            return MEMORY_SHARE
        free = 1 - (learner_at_rest(self) + RESERVE_BYTES) / self.gpu_bytes
        return min(LARGEST_SHARE, max(0, int(100 * free)) / 100)


def layer_activations(model: Model) -> int:
    """Returns the bytes that a layer keeps of each token for its backward pass in bfloat16.

    It keeps the input in float32, the normalised input and the output of two norms; queries and keys, counted with
    norms of their own, which not all models have; values; the attention's output; and four tensors of the gated
    projection.
    """
    queries, keys = model.heads * model.head_width, model.key_heads * model.head_width
    return 16 * model.hidden + 6 * (queries + keys) + 2 * (2 * queries + 2 * keys + 4 * model.intermediate)


def kv_bytes_per_token(model: Model) -> int:
    """Returns the bytes of keys and values of all layers in bfloat16."""
    return 2 * 2 * model.layers * model.key_heads * model.head_width


def learner_parts(plan: Plan) -> dict[str, int]:
    """Returns the parts of one rank's memory at its highest, in bytes."""
    model, learner, ranks, tokens = (
        plan.model,
        plan.learner,
        plan.devices.learner_ranks,
        plan.learner.micro_batch_tokens,
    )
    root, head = model.parameters - model.layers * model.layer_parameters, model.vocabulary * model.hidden
    whole = root + 2 * model.layer_parameters if ranks > 1 else model.parameters
    of_layer = layer_activations(model) * tokens
    kept = 2 * model.hidden * tokens if learner.activation_checkpointing else of_layer
    layers_here = 2 if learner.activation_offload else model.layers
    # The highest of two moments of the backward pass: a chunk of logits (bfloat16, float32, gradients) with the head's
    # gradient, and a layer that is computed again, with its gradients, while the head's is kept.
    head_gradient = 0 if learner.lora_rank else 2 * head
    logits = 10 * LOGIT_ROWS * model.vocabulary + 2 * head_gradient + (8 * head if learner.fp32_head else 0)
    again = of_layer if learner.activation_checkpointing else 0
    in_flight = (8 * model.intermediate + 12 * model.hidden) * tokens
    layer = again + in_flight + 10 * plan.trained // model.layers + head_gradient
    parts = {
        "weights": 4 * plan.weights // ranks,
        "AdamW's moments": 8 * plan.trained // ranks,
        "gradients": 4 * plan.trained // ranks,
        "gathered weights": 2 * whole,
        "activations": layers_here * kept + 10 * model.hidden * tokens,
        "backward pass": max(logits, layer),
    }
    if learner.reference_kl_coef and not learner.lora_rank:
        parts["reference"] = 4 * model.parameters // ranks
    gaps = int(FRAGMENTATION * (sum(parts.values()) - parts["weights"]))
    published = {"published weights": 2 * model.parameters} if learner.weight_transfer == "nccl" else {}
    asleep = ASLEEP_BYTES if plan.devices.shared else 0
    return parts | published | {"CUDA, NCCL, gaps": RESERVE_BYTES + asleep + gaps}


def learner_at_rest(plan: Plan) -> int:
    """Returns the bytes of a rank while replicas sample on its GPU; the optimizer's state is in host memory then."""
    parts = learner_parts(plan)
    return parts["weights"] + parts.get("reference", 0)


def replica_parts(plan: Plan) -> dict[str, int]:
    """Returns the parts of one GPU of a replica, in bytes.

    The KV cache gets the rest of the share; it may be negative.
    """
    model, gpus = plan.model, plan.devices.tensor_parallel
    parts = {
        "weights": 2 * model.parameters // gpus,
        "largest step": 2 * STEP_TOKENS * (4 * model.hidden + 3 * model.intermediate // gpus),
        "CUDA and graphs": RESERVE_BYTES,
    }
    return parts | {"KV cache": int(plan.share * plan.gpu_bytes) - sum(parts.values())}


def kv_tokens(plan: Plan) -> int:
    """Returns how many tokens the KV cache of a replica holds. Its GPUs share the heads of keys."""
    split = min(plan.devices.tensor_parallel, plan.model.key_heads)
    return max(0, replica_parts(plan)["KV cache"]) * split // kv_bytes_per_token(plan.model)


def host_parts(plan: Plan) -> dict[str, int]:
    """Returns the parts of host memory, in bytes. Two versions of the weights are published; a checkpoint is a copy
    that lives while it is written.
    """
    adapters_alone = plan.learner.weight_transfer == "adapter"
    published = 0 if plan.learner.weight_transfer == "nccl" else 4 * (plan.adapters if adapters_alone else plan.weights)
    ranks, serving = plan.devices.learner_ranks, plan.devices.replicas * plan.devices.tensor_parallel
    inputs = 2 * plan.model.hidden * plan.model.layers * plan.learner.micro_batch_tokens * ranks
    parts = {
        "processes": (ranks + serving + 2) * PROCESS_BYTES,
        "published weights (/dev/shm)": published,
        "AdamW's moments while replicas sample": 8 * plan.trained if plan.devices.shared else 0,
        "activations": inputs if plan.learner.activation_offload else 0,
        "checkpoint": 4 * plan.weights + 8 * plan.trained,
    }
    return {name: size for name, size in parts.items() if size}


def problems(plan: Plan) -> list[str]:
    """Returns what does not fit, a sentence each."""
    sentences, room = [], plan.gpu_bytes
    if plan.max_tokens > plan.model.positions:
        sentences.append(f"max_tokens={plan.max_tokens} is more than the model's {plan.model.positions} positions")
    if (peak := sum(learner_parts(plan).values())) > room:
        sentences.append(f"a rank of the learner needs {gib(peak)} of {gib(room)} while it trains")
    if plan.model.heads % plan.devices.tensor_parallel:
        sentences.append(f"tensor_parallel={plan.devices.tensor_parallel} does not divide {plan.model.heads} heads")
    if (tokens := kv_tokens(plan)) < plan.max_tokens:
        sentences.append(f"the KV cache of a replica holds {tokens:,} tokens, a trajectory has {plan.max_tokens:,}")
    return sentences


def gib(size: float) -> str:
    """
    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{size / GIB:.1f} GiB"
