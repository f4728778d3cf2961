"""How much memory a run needs: numbers in, bytes out, no torch. **None of it has been compared with a GPU.**

What the learner keeps is read off `algo/learner/`: float32 master weights, two float32 moments of AdamW, float32
gradients, sharded over the ranks; weights gathered in the dtype of the passes; what is published. Parameters, these
tensors, the activations that PyTorch saves and the KV cache are exact (tests/unit/recipes/test_rstar2_fit.py). What the
backward pass needs for a moment, and what CUDA, NCCL and vLLM take for themselves, are estimates. On the CPU the
learner's measured peak was 0.90 to 1.09 of the sum (SmolLM2-135M, and a small Qwen3 with a vocabulary of 152 K; float32
and bfloat16, with and without adapters and checkpointing).

Shape legend: H hidden size, I intermediate size, V vocabulary, A width of all query heads, K of all key heads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from algo.learner.config import LearnerConfig
from engine.assembly.devices import DevicePlan
from engine.replica.config import MEMORY_SHARE, MEMORY_SHARE_BY_TURNS, STEP_TOKENS

GIB = 1 << 30
FLOAT32, BFLOAT16 = 4, 2
LOGIT_ROWS = 1024  # of `algo.learner.model.scorer`, which imports torch

# Estimates. A process on a GPU: CUDA's context, NCCL's buffers, what the allocator cannot use.
RESERVE_BYTES = 2 * GIB
FRAGMENTATION = 0.05  # of what the learner allocates beyond its weights
ASLEEP_BYTES = 3 * GIB // 2  # of a replica that sleeps: its context and CUDA graphs
ENGINE_BYTES = 2 * GIB  # of a replica that serves: its context and CUDA graphs
PROCESS_BYTES = 3 * GIB  # host memory of a rank or an engine: libraries, CUDA's host side
CPU_PROCESS_BYTES = 4 * GIB // 10  # of a rank without CUDA: the libraries

QUERY_KEY_NORMS = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A dense decoder of the families in QUERY_KEY_NORMS.

    >>> sizes = dict(vocab_size=10, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> sizes |= dict(num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=64)
    >>> Shape.of({"model_type": "llama", **sizes}).parameters
    196
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    positions: int
    tied: bool
    normed: bool
    """Queries and keys have norms of their own."""
    query_bias: bool
    """Of the projections to queries, keys and values."""
    output_bias: bool
    mlp_bias: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From the fields of a config.json. Raises ValueError for another family or a field that is not there."""
        kind = config.get("model_type")
        if kind not in QUERY_KEY_NORMS:
            known = ", ".join(QUERY_KEY_NORMS)
            raise ValueError(f"model_type {kind!r} is not known here. Fix: a dense model of {known}")
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            bias = bool(config.get("attention_bias", False))
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                intermediate=int(config["intermediate_size"]),
                heads=heads,
                key_heads=int(config.get("num_key_value_heads") or heads),
                head_width=int(config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)),
                vocabulary=int(config["vocab_size"]),
                positions=int(config["max_position_embeddings"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                normed=QUERY_KEY_NORMS[kind],
                query_bias=bias or kind == "qwen2",
                output_bias=bias and kind != "qwen2",
                mlp_bias=bool(config.get("mlp_bias", False)),
            )
        except KeyError as error:
            raise ValueError(f"config.json has no {error.args[0]!r}. Fix: a whole config.json") from error

    @classmethod
    def read(cls, path: Path) -> Shape:
        """Of a config.json, or of the folder that holds one. Raises ValueError naming the file."""
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read: {error}. Fix: model=DIR with a config.json") from error
        if not isinstance(config, dict):
            raise ValueError(f"{file} is no config.json. Fix: model=DIR with a config.json")
        try:
            return cls.of(config)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @property
    def queries(self) -> int:
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_width

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a layer's projections, by their names in transformers."""
        h, i, a, k = self.hidden, self.intermediate, self.queries, self.keys
        attention = {"q_proj": (h, a), "k_proj": (h, k), "v_proj": (h, k), "o_proj": (a, h)}
        return attention | {"gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}

    @property
    def layer_parameters(self) -> int:
        weights = sum(inputs * outputs for inputs, outputs in self.matrices.values())
        norms = 2 * self.hidden + 2 * self.head_width * self.normed
        biases = self.query_bias * (self.queries + 2 * self.keys) + self.output_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        return weights + norms + biases

    @property
    def root_parameters(self) -> int:
        """Embeddings, head and the last norm: what FSDP gathers with the root."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Of LoRA in all layers. Raises ValueError for a target that is no projection."""
        if unknown := [name for name in targets if name not in self.matrices]:
            raise ValueError(f"lora_targets: {unknown[0]!r} is not counted here. Fix: of {', '.join(self.matrices)}")
        return self.layers * rank * sum(sum(self.matrices[name]) for name in targets)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the KV cache, in bfloat16."""
        return 2 * self.layers * self.keys * BFLOAT16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A model and the settings that decide how much memory it takes."""

    shape: Shape
    devices: DevicePlan
    learner: LearnerConfig
    """As `DevicePlan.learner_fields` leaves it."""
    max_tokens: int
    """Of the longest trajectory, prompt and tools' replies included."""
    memory_bytes: int
    """Of a GPU; of the host, where there is none."""
    memory_share: float | None = None
    """As `ReplicaConfig.memory_share`."""
    max_num_seqs: int = 256
    host_bytes: int | None = None
    """None: not checked."""

    @property
    def on_gpu(self) -> bool:
        return bool(self.devices.devices)

    @property
    def share(self) -> float:
        return self.memory_share or (MEMORY_SHARE_BY_TURNS if self.devices.shared else MEMORY_SHARE)

    @property
    def pass_tokens(self) -> int:
        """Of the largest forward pass: a trajectory that is longer than a row gets a row of its own."""
        return max(self.learner.micro_batch_tokens, self.max_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What `memory_of` finds, in bytes, and what stands in the way. learner: parts of a rank while it trains."""

    plan: Plan
    learner: dict[str, int]
    learner_rest: int
    """Of a rank while replicas sample: weights and what is published."""
    replica: dict[str, int]
    """Parts of one GPU of a replica; empty on the CPU."""
    kv_tokens: int
    """Of a replica."""
    host: dict[str, int]
    longest: int
    """Tokens of the longest trajectory that learner, replica and the model's positions allow."""
    problems: tuple[str, ...] = field(default=())

    @property
    def learner_peak(self) -> int:
        return sum(self.learner.values())

    @property
    def sequences(self) -> int:
        """Of the full length, that a replica holds at once."""
        return min(self.plan.max_num_seqs, self.kv_tokens // self.plan.max_tokens)


def layer_activation_bytes(shape: Shape, learner: LearnerConfig, *, on_gpu: bool) -> int:
    """What a layer saves for its backward pass, per token, without checkpointing.

    Two norms (their input in float32, the normalised input, the output), norms of queries and keys, attention (queries,
    keys, values, output, a log-sum-exp per head; on the CPU the output once more, in the order of its tokens) and the
    gated projection (gate, its activation, up, the product). A frozen norm keeps no normalised input; an adapter keeps
    its inner state.
    """
    s = _itemsize(learner)
    a, k = shape.queries, shape.keys
    frozen = learner.lora_rank > 0
    norms = 2 * ((FLOAT32 + s * (1 if frozen else 2)) * shape.hidden + FLOAT32)
    own_norms = shape.normed * ((FLOAT32 + (0 if frozen else s)) * (a + k) + FLOAT32 * (shape.heads + shape.key_heads))
    attention = s * (2 * a + 2 * k) + FLOAT32 * shape.heads + (0 if on_gpu else s * a)
    adapters = s * learner.lora_rank * len(learner.lora_targets) if frozen else 0
    return norms + own_norms + attention + 4 * s * shape.intermediate + adapters


def _itemsize(learner: LearnerConfig) -> int:
    return FLOAT32 if learner.dtype == "float32" else BFLOAT16


def learner_parts(plan: Plan, tokens: int | None = None) -> dict[str, int]:
    """Parts of one rank's memory at its highest, in bytes. tokens: of the largest pass; None: the plan's.

    Their sum is the peak: `backward pass` is what the worst of three moments needs beyond the other parts (the head's
    chunks, a layer, the reduction of the root's gradient).
    """
    shape, learner, ranks = plan.shape, plan.learner, plan.devices.learner_ranks
    tokens = plan.pass_tokens if tokens is None else tokens
    s, frozen = _itemsize(learner), learner.lora_rank > 0
    adapters = shape.adapter_parameters(learner.lora_rank, learner.lora_targets) if frozen else 0
    weights, trained = shape.parameters + adapters, adapters or shape.parameters
    layer_trained = trained // shape.layers if frozen else shape.layer_parameters
    root_trained = 0 if frozen else shape.root_parameters
    head = shape.vocabulary * shape.hidden
    resharded = plan.on_gpu and ranks > 1
    layer = weights // shape.layers if frozen else shape.layer_parameters
    # Between passes all layers stay gathered, unless several GPUs share them: then the root, and two layers at a time.
    gathered = s * (shape.root_parameters + 2 * layer if resharded else weights)
    per_layer = layer_activation_bytes(shape, learner, on_gpu=plan.on_gpu) * tokens
    last_norm = (FLOAT32 + 2 * s) * shape.hidden * tokens
    chosen = s * shape.hidden * tokens  # the hidden states that the head scores
    kept = s * shape.hidden * tokens if learner.activation_checkpointing else per_layer
    on_device = 2 if plan.on_gpu and learner.activation_offload else shape.layers  # the others wait in host memory
    saved = on_device * kept + last_norm + chosen
    # Logits, their float32 copy, and the probabilities; later these, their gradient and that of the logits.
    chunk = min(LOGIT_ROWS, tokens) * shape.vocabulary * (2 * FLOAT32 + (0 if s == FLOAT32 else s))
    wide_head = FLOAT32 * head if learner.fp32_head and s != FLOAT32 else 0
    head_moment = chunk + wide_head + chosen + (0 if frozen else (2 * s * head + wide_head))
    in_flight = (4 * s * shape.intermediate + 12 * shape.hidden) * tokens
    recomputed = per_layer if learner.activation_checkpointing else 0
    layer_moment = recomputed + in_flight + (s + 2 * FLOAT32) * layer_trained + (0 if frozen else s * head)
    root_moment = root_trained * (s + (FLOAT32 if resharded else 2 * FLOAT32)) - saved
    reference = FLOAT32 * shape.parameters // ranks if learner.reference_kl_coef and not frozen else 0
    parts = {
        "weights (float32)": FLOAT32 * weights // ranks,
        "AdamW moments (float32)": 2 * FLOAT32 * trained // ranks,
        "gradients (float32)": FLOAT32 * trained // ranks,
        f"gathered weights ({learner.dtype})": gathered,
        "reference (float32)": reference,
        "published weights": _published(plan),
        "activations": saved,
        "backward pass": max(head_moment, layer_moment, root_moment),
    }
    parts = {name: size for name, size in parts.items() if size}
    moving = sum(parts.values()) - parts["weights (float32)"] - parts.get("published weights", 0)
    gaps = int(FRAGMENTATION * moving)
    if not plan.on_gpu:
        return parts | {"process and gaps": CPU_PROCESS_BYTES + gaps}
    return parts | {"CUDA, NCCL and gaps": RESERVE_BYTES + (ASLEEP_BYTES if plan.devices.shared else 0) + gaps}


def _published(plan: Plan) -> int:
    """On rank 0, which has most: nccl keeps one copy on its GPU. Everything else are files in host memory, which is the
    learner's memory on the CPU.
    """
    if not plan.on_gpu:
        return _published_files(plan)
    return BFLOAT16 * plan.shape.parameters if plan.learner.weight_transfer == "nccl" else 0


def _published_files(plan: Plan) -> int:
    """Two versions in shared memory, of the adapters alone where these are published."""
    shape, learner = plan.shape, plan.learner
    if learner.weight_transfer == "nccl":
        return 0
    adapters = learner.weight_transfer == "adapter"
    count = shape.adapter_parameters(learner.lora_rank, learner.lora_targets) if adapters else shape.parameters
    return 2 * (FLOAT32 if learner.weights_dtype == "float32" else BFLOAT16) * count


def replica_parts(plan: Plan) -> dict[str, int]:
    """Parts of one GPU of a replica, in bytes; the KV cache gets what is left of its share, which may be negative."""
    shape, ranks = plan.shape, plan.devices.tensor_parallel
    logits = 3 * FLOAT32 * plan.max_num_seqs * shape.vocabulary
    prefill = STEP_TOKENS * BFLOAT16 * (4 * shape.hidden + 3 * shape.intermediate // ranks)
    parts = {
        "weights (bfloat16)": BFLOAT16 * shape.parameters // ranks,
        "largest step": max(logits, prefill),
        "CUDA and graphs": ENGINE_BYTES,
    }
    return parts | {"KV cache": int(plan.share * plan.memory_bytes) - sum(parts.values())}


def kv_bytes_per_gpu(plan: Plan) -> int:
    """Of a token, on each GPU of a replica: heads of keys are split, or repeated where there are fewer than GPUs."""
    split = min(plan.devices.tensor_parallel, plan.shape.key_heads)
    return -(-plan.shape.kv_bytes_per_token // split)


def host_parts(plan: Plan) -> dict[str, int]:
    """Host memory on one machine, in bytes. `checkpoint` is a copy that lives while a checkpoint is written."""
    shape, learner = plan.shape, plan.learner
    adapters = shape.adapter_parameters(learner.lora_rank, learner.lora_targets) if learner.lora_rank else 0
    trained = adapters or shape.parameters
    inputs = BFLOAT16 * shape.hidden * shape.layers * plan.pass_tokens * plan.devices.learner_ranks
    processes = plan.devices.learner_ranks + plan.devices.replicas * plan.devices.tensor_parallel + 2
    return {
        "processes": processes * PROCESS_BYTES,
        "published weights": _published_files(plan),
        "AdamW moments while replicas sample": 2 * FLOAT32 * trained if plan.devices.shared else 0,
        "activations": inputs if learner.activation_offload else 0,
        "checkpoint": FLOAT32 * (shape.parameters + adapters) + 2 * FLOAT32 * trained,
    }


def memory_of(plan: Plan) -> Memory:
    """All of it, with what does not fit as sentences."""
    learner, shape = learner_parts(plan), plan.shape
    rest = learner["weights (float32)"] + learner.get("reference (float32)", 0) + learner.get("published weights", 0)
    replica = replica_parts(plan) if plan.on_gpu else {}
    host = host_parts(plan) if plan.on_gpu else {}
    kv_tokens = max(0, replica["KV cache"]) // kv_bytes_per_gpu(plan) if replica else 0
    allowed = [shape.positions, _longest_pass(plan)]
    longest = max(0, min([*allowed, kv_tokens] if replica else allowed))
    return Memory(
        plan=plan,
        learner=learner,
        learner_rest=rest,
        replica=replica,
        kv_tokens=kv_tokens,
        host=host,
        longest=longest,
        problems=tuple(_problems(plan, learner, rest, replica, kv_tokens, host)),
    )


def _longest_pass(plan: Plan) -> int:
    """Tokens of the longest trajectory that the learner can take; a multiple of 64."""
    low, high = 0, plan.shape.positions // 64 + 1
    while low < high - 1:
        middle = (low + high) // 2
        if sum(learner_parts(plan, 64 * middle).values()) <= plan.memory_bytes:
            low = middle
        else:
            high = middle
    return 64 * low


def _problems(
    plan: Plan,
    learner: Mapping[str, int],
    rest: int,
    replica: Mapping[str, int],
    kv_tokens: int,
    host: Mapping[str, int],
) -> list[str]:
    found = []
    if plan.max_tokens > plan.shape.positions:
        found.append(f"max_tokens={plan.max_tokens} is more than the model's {plan.shape.positions} positions")
    if (peak := sum(learner.values())) > plan.memory_bytes:
        found.append(f"a rank of the learner needs {gib(peak)} of {gib(plan.memory_bytes)} while it trains")
    if not replica:
        return found
    if plan.shape.heads % plan.devices.tensor_parallel:
        found.append(f"tensor_parallel={plan.devices.tensor_parallel} does not divide {plan.shape.heads} heads")
    if plan.devices.shared and rest + RESERVE_BYTES + plan.share * plan.memory_bytes > plan.memory_bytes:
        found.append(
            f"a replica takes {plan.share:.0%} of {gib(plan.memory_bytes)}, and the learner at rest keeps {gib(rest)} "
            f"and {gib(RESERVE_BYTES)} for CUDA"
        )
    if kv_tokens < plan.max_tokens:
        found.append(f"the KV cache of a replica holds {kv_tokens:,} tokens, a trajectory has {plan.max_tokens:,}")
    if plan.host_bytes is not None and (needed := sum(host.values())) > plan.host_bytes:
        found.append(f"the host needs {gib(needed)} of {gib(plan.host_bytes)}")
    return found


def gib(size: float) -> str:
    """
    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{size / GIB:.1f} GiB"
