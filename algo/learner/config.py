"""The learner's configuration: plain values, which travel from the recipe to the ranks. It imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from algo.learner.serialize import from_plain, to_plain
from algo.loss.policy_losses import PpoClip
from sandbox.require import Rule, at_least, finite, none_or, one_of, positive, require, true_or_false, whole, within

if TYPE_CHECKING:
    from algo.loss.interface import Loss


Schedule = Literal["constant", "linear", "cosine"]
Checkpointing = Literal["none", "selective", "attention", "full"]
FlashAttention = Literal["FA2", "FA3"]
TRANSFERS = ("shm", "gloo", "adapter", "nccl")
# Allowed means of |learner - sampler| of sampled tokens' log-probabilities. Measured were up to 1e-6 in float32 and
# 0.002 to 0.03 in bfloat16 for models of 2 and 3 layers, 1e-5 and 0.05 for SmolLM2-135M (30 layers).
MISMATCH = {"float32": 3e-5, "bfloat16": 0.1}
_MLP = ("gate_proj", "up_proj", "down_proj")
_FUSED = ("gpt_oss", "mixtral", "qwen3_moe")  # no shared experts: where no layer is dense, no MLP takes adapters
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how config.json names the experts of a layer
ReferenceKl = Literal["k2", "k3", "k3_with_gradient_of_k2"]


def divisors(number: int) -> str:
    """Returns what divides a number, for a message.

    >>> divisors(6), divisors(1)
    ('one of 1, 2, 3, 6', '1')
    """
    found = ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
    return found if number == 1 else f"one of {found}"


def check_quantized(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a checkpoint with quantised weights, which neither learner nor weight updates can take.

    fields: what its config.json holds.
    """
    if quantization := fields.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"the checkpoint's weights are quantised ({method!r} in config.json), and only whole ones can be trained. "
            "Fix: write them in bfloat16 once, as algo/README.md (What cannot be trained) shows"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """How a batch becomes an update."""

    lr: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = 3
    """Batches over which the learning rate rises linearly to `lr`."""
    schedule: Schedule = "constant"
    """What follows the warm-up: "constant" stays at `lr`; "linear" falls towards 0, but not below decay_to * lr;
    "cosine" falls along half a wave to decay_to * lr."""
    steps: int | None = None
    """Batches over which "linear" and "cosine" fall. None: those of the run, which the recipe fills in (`for_run`).
    Always None with "constant"."""
    decay_from: float = 0.0
    """Share of `steps` after which the learning rate begins to fall, never within the warm-up."""
    decay_to: float = 0.05
    """Final learning rate as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's weight decay. Norms and biases are not decayed."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; a longer one is scaled down."""
    loss: Loss | Mapping[str, Any] = PpoClip()  # noqa: RUF009  frozen
    """The loss: one of `algo.loss.policy_losses` or your own (`algo.loss.interface.Loss`). It is kept in its plain
    form, so that `dataclasses.asdict` of this configuration is what the learner is sent. The old log-probabilities are
    the sampler's, so sampling must be at temperature 1."""
    reference_kl_coef: float = 0.0
    """Coefficient of an estimate of KL(learner || reference) per token, averaged as the loss is (its `aggregate`, else
    over tokens). The reference is the run's first checkpoint, frozen, and stays so after a resume
    (`algo.learner.model.reference`). It is scored once a step; without adapters it is a second model in memory. The
    metric is reference_kl."""
    reference_kl: ReferenceKl = "k3"
    """Estimator of that KL (`algo.loss.kl`): "k3" is the usual one, "k2" has the gradient of the divergence itself."""
    train_router: bool = True
    """Train the routers of a mixture of experts; False keeps them bit by bit as the checkpoint has them. Under adapters
    they are frozen anyway. It must stay True for a dense model."""
    load_balancing_coef: float = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts (`algo.learner.measure.expert_load`), which is
    added to the loss of a minibatch and whose value is always the metric load_balancing. It counts the choices of the
    whole minibatch; if that takes several passes, they are made once more without a gradient. It must stay 0 for a
    dense model."""
    mismatch_tolerance: float | Literal["auto"] | None = "auto"
    """Largest allowed mean of |learner - sampler| of log-probabilities; a single token may be a hundred times as far
    off. It is checked in the first minibatch, on trajectories that the weights in training alone sampled (with a
    staleness of 1 or more these are few). Beyond it the learner ends before it updates. "auto": 3e-5, or 0.1 if `dtype`
    or `weights_dtype` is bfloat16 (`rocstar bench mismatch` measures what a model has). None: it is measured, but not
    judged."""
    replay_routing: bool | Literal["measure"] = False
    """Whether the learner sends each token of a mixture of experts to the experts that the sampler chose for it, in
    place of those that it would choose itself (`algo.learner.model.routing`). Where rounding lets the two choose
    differently, the ratios would be of two models. "measure": the learner chooses itself, and the metric
    routing_differs says for how many positions otherwise. With both, the replicas of the run report their routes
    (`ReplicaConfig.returns_routes`)."""
    minibatches: int = 2
    """Optimizer steps per batch."""
    micro_batch_tokens: int = 4096
    """Input tokens of one forward pass: the longest row of a rank, or of a group of ranks (`context_parallel`)."""
    context_parallel: int = 1
    """Ranks that share each row, for trajectories that are too long for one: each holds that share of the activations.
    A row of a group may so be that many times as long as one of a rank. It must divide the ranks and the model's query
    heads, and needs attention "packed". It changes results only by rounding (`algo.learner.model.context`)."""
    threads: int = 2
    """CPU threads of each rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the passes. Weights, optimizer state and the reduction of gradients are float32."""
    fp32_head: bool = False
    """With dtype "bfloat16", compute and keep logits in float32, as MiniMax-M1 needed (arXiv 2506.13585). Rounding them
    to bfloat16 is an error of 0.006 in a log-probability, more if logits are large. It costs a float32 copy of the head
    during a pass."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of all ranks; with "cuda" each rank has a GPU of its own."""
    attention: str = "packed"
    """Kind of attention: "packed" (`algo.learner.model.attention`), or a name that transformers knows ("sdpa",
    "flash_attention_2")."""
    flash_attention: FlashAttention = "FA2"
    """Kernels of packed attention on a GPU: "FA2", PyTorch's own; or "FA3", which is faster on Hopper GPUs (H100,
    H200) and needs its package `flash_attn_interface` (FlashAttention's folder hopper/) and a PyTorch that can use it
    (2.13 can). It has not yet run."""
    share_prefix: bool = True
    """Compute the common beginning of all trajectories of a minibatch (system message, tools, prompt) once a row, if it
    has 64 tokens or more and attention is "packed". It changes results only by rounding."""
    sharding: Literal["full", "hybrid"] = "full"
    """How weights are sharded if ranks are on several hosts: "full", over all of them; "hybrid", over the ranks of a
    host, so that each host has a whole copy and only gradients cross the network."""
    activation_checkpointing: Checkpointing = "none"
    """What a layer computes again in the backward pass instead of keeping it: "none"; "selective", all but attention
    and matrix products; "attention", the MLP's two wide products too; "full", all but its input. The more, the less
    memory and the slower: `recipes/rstar2/fit.py` says what fits and what it costs."""
    activation_offload: bool = False
    """Keep the layers' inputs in the host's memory, for long trajectories on a GPU: one takes 2 bytes times its width
    for each token, so 36 layers of width 2,560 leave 6 GB of the GPU free at 32 K tokens. Needs
    activation_checkpointing "full". On the CPU it changes nothing."""
    offload_optimizer: bool = False
    """Move the optimizer's state off the device from the publishing of weights until the next step, for a GPU that the
    replicas share."""
    lora_rank: int = 0
    """Rank of the adapters that are trained; 0 trains all weights."""
    lora_alpha: float = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the layers that get adapters."""
    trace: str = ""
    """Folder for a trace of the second batch by PyTorch's own profiler, and a table of its operators; "": no trace."""
    peak_flops: float | None = None
    """Peak operations per second of one rank, for MFU. None: known by the GPU's name; on the CPU there is no MFU."""
    weight_transfer: str = "shm"
    """How weights reach the replicas, as in ReplicaConfig: "shm", "gloo" or "nccl"; or "adapter", which hands on the
    adapter alone, megabytes that no replica pauses for."""
    weights_dtype: str = "float32"
    """Dtype of the published weights, which is the replicas' own."""

    def __post_init__(self) -> None:
        for name in ("betas", "lora_targets"):
            if isinstance(value := getattr(self, name), list):  # as the wire has them
                object.__setattr__(self, name, tuple(value))
        try:
            loss = from_plain(self.loss)
            object.__setattr__(self, "loss", to_plain(loss))
        except ValueError as error:
            raise ValueError(f"LearnerConfig.loss: {error}") from error
        if not callable(loss):
            raise ValueError(f"LearnerConfig.loss: {loss!r} must be callable (algo.loss.interface.Loss)")
        for name in ("reference_kl_coef", "load_balancing_coef"):
            if getattr(loss, "normalizes", False) and getattr(self, name):
                raise ValueError(
                    f"LearnerConfig.{name} must be 0 with a loss whose correction has normalize=True, got "
                    f"{getattr(self, name)}"
                )
        auto = Rule("'auto', None or positive", lambda value: value in ("auto", None) or value > 0)
        betas = Rule("two numbers in [0, 1)", lambda value: len(value) == 2 and all(0 <= x < 1 for x in value))
        targets = Rule("one name or more", lambda value: isinstance(value, tuple) and value != ())
        switches = ("share_prefix", "activation_offload", "offload_optimizer", "fp32_head", "train_router")
        replay = Rule("True, False or 'measure'", lambda value: value == "measure" or isinstance(value, bool))
        rules = (
            (positive, ("lr", "adam_eps", "grad_clip", "lora_alpha")),
            (finite, ("lr", "adam_eps", "weight_decay", "lora_alpha", "reference_kl_coef", "load_balancing_coef")),
            (at_least(0), ("weight_decay", "reference_kl_coef", "load_balancing_coef")),
            (none_or(positive), ("steps", "peak_flops")),
            (auto, ("mismatch_tolerance",)),
            (within("[0, 1)"), ("decay_from",)),
            (within("[0, 1]"), ("decay_to",)),
            (betas, ("betas",)),
            (whole(0), ("warmup_steps", "lora_rank")),
            (whole(1), ("minibatches", "micro_batch_tokens", "context_parallel", "threads")),
            (true_or_false, switches),
            (replay, ("replay_routing",)),
            (targets, ("lora_targets",)),
            (one_of(*get_args(Schedule)), ("schedule",)),
            (one_of(*get_args(Checkpointing)), ("activation_checkpointing",)),
            (one_of(*get_args(FlashAttention)), ("flash_attention",)),
            (one_of("float32", "bfloat16"), ("dtype", "weights_dtype")),
            (one_of("cpu", "cuda"), ("device",)),
            (one_of(*get_args(ReferenceKl)), ("reference_kl",)),
            (one_of("full", "hybrid"), ("sharding",)),
            (one_of(*TRANSFERS), ("weight_transfer",)),
        )
        for rule, names in rules:
            for name in names:
                require(f"LearnerConfig.{name}", getattr(self, name), rule)
        if self.steps is not None and self.schedule == "constant":
            raise ValueError(f"LearnerConfig.steps must be None for schedule 'constant', got {self.steps}")
        if self.weight_transfer == "adapter" and not self.lora_rank:
            raise ValueError("LearnerConfig.lora_rank must be positive with weight_transfer 'adapter', got 0")
        if self.weight_transfer == "adapter" and "lm_head" in self.lora_targets:
            raise ValueError("LearnerConfig.lora_targets must not hold 'lm_head' with weight_transfer 'adapter'")
        if self.activation_offload and self.activation_checkpointing != "full":
            raise ValueError(
                "LearnerConfig.activation_checkpointing must be 'full' with activation_offload, got "
                f"{self.activation_checkpointing!r}"
            )
        if self.context_parallel > 1 and self.attention != "packed":
            raise ValueError(
                f"LearnerConfig.attention must be 'packed' with context_parallel={self.context_parallel}, got "
                f"{self.attention!r}"
            )
        if (self.device, self.attention, self.dtype) == ("cuda", "packed", "float32"):
            raise ValueError("LearnerConfig.dtype must be 'bfloat16' for packed attention on a GPU, got 'float32'")

    @property
    def mismatch_bound(self) -> float | None:
        """`mismatch_tolerance` with its default by dtype; None if it is not judged."""
        if self.mismatch_tolerance != "auto":
            return self.mismatch_tolerance
        return MISMATCH["bfloat16" if "bfloat16" in (self.dtype, self.weights_dtype) else "float32"]

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError for so many ranks, if they cannot be divided into groups that share rows."""
        if ranks % self.context_parallel:
            raise ValueError(
                f"LearnerConfig.context_parallel must divide the learner's {ranks} ranks (learner_ranks, on each of "
                f"learner_hosts), got {self.context_parallel}. Fix: {divisors(ranks)}, or other learner_ranks"
            )

    def check_model(self, fields: Mapping[str, Any]) -> None:
        """Raises ValueError for options that the model of a Hugging Face config.json cannot have.

        fields: what that file holds. The learner judges by the model itself when it loads it; this is asked before
        anything starts, and lets pass what the file leaves open.
        """
        check_quantized(fields)
        fields = fields.get("text_config") or fields
        kind = repr(fields.get("model_type"))
        if fields.get("model_type") == "gpt_oss" and self.attention != "packed":
            raise ValueError(
                f"LearnerConfig.attention must be 'packed' for {kind}, whose attention has sinks, got "
                f"{self.attention!r}"
            )
        heads = fields.get("num_attention_heads")
        if isinstance(heads, int) and heads % self.context_parallel:
            raise ValueError(
                f"LearnerConfig.context_parallel must divide the {heads} query heads of the model, got "
                f"{self.context_parallel}. Fix: {divisors(heads)}"
            )
        mixture = any(isinstance(count := fields.get(name), int) and count > 1 for name in _EXPERTS)
        if heads and not mixture and not any("expert" in name for name in fields):
            for name, wanted in (("replay_routing", False), ("train_router", True), ("load_balancing_coef", 0)):
                if (value := getattr(self, name)) != wanted:
                    raise ValueError(
                        f"LearnerConfig.{name} must be {wanted} for {kind}, which is no mixture of experts, got "
                        f"{value!r}"
                    )
        dense = fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1
        fused = fields.get("model_type") in _FUSED and not dense
        if self.lora_rank and fused and any(name in _MLP for name in self.lora_targets):
            kept = [name for name in self.lora_targets if name not in _MLP] or ["q_proj", "k_proj", "v_proj", "o_proj"]
            raise ValueError(
                f"LearnerConfig.lora_targets must not hold {', '.join(_MLP)} for {kind}, whose experts get no "
                f"adapters, got {','.join(self.lora_targets)}. Fix: learner.lora_targets={','.join(kept)}"
            )

    def for_run(self, steps: int) -> LearnerConfig:
        """Returns the configuration for a run of `steps` batches, over which a schedule without steps of its own falls.

        >>> LearnerConfig(schedule="cosine").for_run(40).steps, LearnerConfig().for_run(40).steps
        (40, None)
        """
        if self.schedule == "constant" or self.steps is not None:
            return self
        return replace(self, steps=steps)

    def lr_at(self, batch: int) -> float:
        """Returns the learning rate of a batch, from 1. Raises ValueError if a schedule that falls has no steps.

        >>> config = LearnerConfig(lr=1.0, warmup_steps=10, schedule="linear", steps=100, decay_from=0.6)
        >>> [round(config.lr_at(batch), 3) for batch in (1, 10, 61, 81, 100, 200)]
        [0.1, 1.0, 1.0, 0.5, 0.05, 0.05]
        >>> config = LearnerConfig(lr=1.0, warmup_steps=10, schedule="cosine", steps=110, decay_to=0.1)
        >>> [round(config.lr_at(batch), 3) for batch in (5, 11, 36, 61, 111, 200)]
        [0.5, 1.0, 0.868, 0.55, 0.1, 0.1]
        """
        warm = min(1.0, batch / max(1, self.warmup_steps))
        if self.schedule == "constant":
            return self.lr * warm
        if self.steps is None:
            raise ValueError(
                f"LearnerConfig.steps must be the run's batches for schedule {self.schedule!r}, got None. Fix: the "
                "recipe calls LearnerConfig.for_run"
            )
        decay_from = max(self.decay_from, self.warmup_steps / self.steps)
        remaining = (self.steps - batch + 1) / max(1.0, self.steps * (1 - decay_from))
        if self.schedule == "linear":
            share = max(self.decay_to, min(1.0, remaining))
        else:
            wave = (1 - math.cos(math.pi * min(1.0, max(0.0, remaining)))) / 2
            share = self.decay_to + (1 - self.decay_to) * wave
        return self.lr * (warm * share)
