"""Computes how much memory a run takes on GPUs. **Nothing here was compared with a GPU.**

`recipes.rstar2.parts.memory.learner` has what the learner allocates, which is compared with its own code on fake GPUs.
What CUDA, NCCL, vLLM and gaps between allocations take is estimated here.
"""

from __future__ import annotations

from engine.replica.config import MEMORY_SHARE, STEP_TOKENS
from recipes.rstar2.parts.memory.learner import Parts, learner_at_rest, learner_moments
from recipes.rstar2.parts.memory.model import Model
from recipes.rstar2.parts.memory.plan import GIB, Plan, gib

USABLE = 0.985  # CUDA gives programs some 79 GiB of a GPU that is sold with 80 GB

# Estimates.
RESERVE_BYTES = 2 * GIB  # a process takes it on a GPU for CUDA's context and NCCL's buffers
ASLEEP_BYTES = 3 * GIB // 2  # a replica that sleeps keeps it: its context and CUDA graphs
FRAGMENTATION = 0.05  # share of what the learner allocates beyond its weights
PROCESS_BYTES = 3 * GIB  # host memory of a rank or an engine
LARGEST_SHARE = 0.9  # the most that a replica takes of a GPU that it shares


def replica_share(plan: Plan) -> float:
    """Returns the share of a GPU that a replica takes: where it shares the GPU, what the learner at rest leaves."""
    if not plan.devices.shared:
        return MEMORY_SHARE
    free = 1 - (learner_at_rest(plan) + RESERVE_BYTES) / plan.gpu_bytes
    return min(LARGEST_SHARE, max(0, int(100 * free)) / 100)


def kv_bytes_per_token(model: Model) -> int:
    """Returns the bytes of keys and values of all layers in bfloat16."""
    return 2 * 2 * model.layers * model.key_heads * model.head_width


def route_bytes_per_token(model: Model) -> int:
    """Returns the bytes of the experts that a token was sent to, of all layers; 0 for a dense model."""
    if (mixture := model.mixture) is None:
        return 0
    return mixture.layers * mixture.per_token * (1 if mixture.experts <= 256 else 2)


def learner_parts(plan: Plan, moment: str | None = None) -> Parts:
    """Returns the parts of one rank's memory in bytes, at the moment at which it is highest or at another one."""
    moments = learner_moments(plan)
    parts = moments[moment or highest(plan)]
    gaps = int(FRAGMENTATION * (sum(parts.values()) - parts["weights"]))
    asleep = ASLEEP_BYTES if plan.devices.shared and plan.samples else 0
    return {**parts, "CUDA, NCCL, gaps": RESERVE_BYTES + asleep + gaps}


def highest(plan: Plan) -> str:
    """Returns the moment at which a rank allocates most."""
    moments = learner_moments(plan)
    return max(moments, key=lambda name: sum(moments[name].values()))


def replica_parts(plan: Plan) -> dict[str, int]:
    """Returns the parts of one GPU of a replica, in bytes.

    The KV cache gets the rest of the share; it may be negative.
    """
    model, gpus = plan.model, plan.devices.tensor_parallel
    wide = 3 * model.intermediate // gpus
    if mixture := model.mixture:  # a token has a row for each of its experts
        wide = mixture.per_token * (model.hidden + 3 * mixture.width // gpus) + 3 * mixture.shared // gpus
    parts = {
        "weights": 2 * model.parameters // gpus,
        "largest step": 2 * STEP_TOKENS * (4 * model.hidden + wide),
        "CUDA and graphs": RESERVE_BYTES,
    }
    return parts | {"KV cache": int(replica_share(plan) * plan.gpu_bytes) - sum(parts.values())}


def kv_tokens(plan: Plan) -> int:
    """Returns how many tokens the KV cache of a replica holds. Its GPUs share the heads of keys."""
    split = min(plan.devices.tensor_parallel, plan.model.key_heads)
    return max(0, replica_parts(plan)["KV cache"]) * split // kv_bytes_per_token(plan.model)


def host_parts(plan: Plan) -> dict[str, int]:
    """Returns the parts of the memory of the first host, in bytes.

    Two versions of the weights are published, in files; where learner and replicas have GPUs of their own it is one, in
    pinned memory. A checkpoint is a copy that lives while it is written.
    """
    learner, devices = plan.learner, plan.devices
    version = 2 * (plan.adapters if learner.weight_transfer == "adapter" else plan.model.parameters)
    ranks = min(devices.learner_ranks, plan.host_gpus)
    serving = min(devices.replicas * devices.tensor_parallel, plan.host_gpus) if plan.samples else 0
    moments = ranks * _pinned(8 * plan.of_a_rank(plan.trained))
    inputs = 2 * plan.model.hidden * plan.model.layers * plan.rank_tokens * ranks
    parts = {
        "processes": (ranks + serving + 2) * PROCESS_BYTES,
        "published weights (pinned)": _pinned(version) if learner.weight_transfer == "nccl" else 0,
        "published weights (/dev/shm)": 0 if learner.weight_transfer == "nccl" else version * (1 + plan.samples),
        "AdamW's moments while replicas sample (pinned)": moments if devices.shared and plan.samples else 0,
        "activations": inputs if learner.activation_offload else 0,
        "checkpoint": 4 * plan.weights + 8 * plan.trained,
    }
    return {name: size for name, size in parts.items() if size}


def _pinned(size: int) -> int:
    """Returns the bytes that PyTorch takes for a piece of pinned memory: the next power of two."""
    return 1 << (size - 1).bit_length()


def problems(plan: Plan) -> list[str]:
    """Returns what does not fit, a sentence each."""
    sentences, room = [], plan.gpu_bytes
    if plan.max_tokens > plan.model.positions:
        sentences.append(f"max_tokens={plan.max_tokens} is more than the model's {plan.model.positions} positions")
    if (peak := sum(learner_parts(plan).values())) > room:
        sentences.append(f"a rank of the learner needs {gib(peak)} of {gib(room)} at its highest ({highest(plan)})")
    if plan.model.heads % (sharing := plan.learner.context_parallel):
        sentences.append(f"context_parallel={sharing} does not divide {plan.model.heads} heads")
    if not plan.samples:
        return sentences
    if plan.model.heads % plan.devices.tensor_parallel:
        sentences.append(f"tensor_parallel={plan.devices.tensor_parallel} does not divide {plan.model.heads} heads")
    if (tokens := kv_tokens(plan)) < plan.max_tokens:
        sentences.append(f"the KV cache of a replica holds {tokens:,} tokens, a trajectory has {plan.max_tokens:,}")
    return sentences
