"""Are a learner's log-probabilities and gradients those of plain transformers, for each family of mixtures of experts?

Tiny random models. Exact is transformers in float32 with its plain attention and loop over experts, a trajectory at a
time, and plain is the same in the learner's dtype: what rounding alone may do. A learner that is right is about as far
from exact as plain is. Its rows hold several trajectories, which begin alike and are longer than windows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.hosts import listen_on
from algo.learner.trainer import Trainer
from algo.loss.policy_losses import PpoClip
from bench.benches.shapes import fields_of
from engine.types import Batch

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 64, "tie_word_embeddings": True},  # no mixture
    "Qwen3Moe": {**EXPERTS, "num_experts": 16, "head_dim": 64, "norm_topk_prob": True},
    "Qwen2Moe": {**EXPERTS, "num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 64},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 64},
    "Glm4Moe": {**EXPERTS, **SHARED, "n_routed_experts": 16, "head_dim": 64, "use_qk_norm": True},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 64},
    "DeepseekV3": {**EXPERTS, **SHARED, **LATENT, "n_routed_experts": 16, "num_key_value_heads": 4},
}
REHEARSED = ("Qwen3Moe", "GptOss")  # on the CPU
ATTENTION = {"DeepseekV3": "sdpa"}  # else packed
BEGINNING, LENGTHS = 100, (310, 150, 420, 233, 190)
LAYER_TOKENS, ROUNDS = 16384, 5
LOSS = PpoClip(clip_low=1.0, clip_high=1e9, dual_clip=None)  # ratio times advantage, which has no steps

Passed = tuple[np.ndarray[Any, Any], dict[str, Tensor]]  # log-probabilities of sampled tokens, gradients by name


def compared_families(device: str) -> dict[str, Any]:
    """Returns how far the learner is from exact in the worst family, and how many times as far as plain transformers.

    For log-probabilities the distance is the mean of |difference|, for gradients the norm of the difference over that
    of the gradient, all weights together; each family has both under "families". In float32, which the learner takes
    on the CPU, plain is exact. A family that raises has its error under "failed".
    """
    listen_on("lo")
    rows: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{name}/store", rank=0, world_size=1)
        try:
            for family in FAMILIES if device == "cuda" else REHEARSED:
                try:
                    rows[family] = _compared(family, device, Path(name))
                except Exception as error:  # of whatever kind: the others are measured all the same
                    failed[family] = " ".join(f"{type(error).__name__}: {error}".split())
        finally:
            dist.destroy_process_group()
    worst = {name: max(row[name] for row in rows.values()) for name in next(iter(rows.values()), {})}
    return {**worst, "families": rows, "failed": failed}


def _compared(family: str, device: str, folder: Path) -> dict[str, float]:
    source, dtype = _write(family, folder / family), torch.bfloat16 if device == "cuda" else torch.float32
    unscored = np.zeros(sum(LENGTHS), np.float32)
    scored, _ = by_transformers(source, device, torch.float32, _batch(unscored), gradients=False)
    batch = _batch(scored)
    exact = by_transformers(source, device, torch.float32, batch)
    plain = by_transformers(source, device, dtype, batch)
    learner = by_the_learner(source, device, dtype, batch, folder, attention=ATTENTION.get(family, "packed"))
    figures = _apart(learner, exact, batch)
    if dtype is torch.bfloat16:
        rounded = _apart(plain, exact, batch)
        figures |= {f"{name}_over_plain": figures[name] / rounded[name] for name in rounded}
    return figures


def _write(family: str, folder: Path) -> Path:
    """Writes a random model whose weights are large enough for a wrong layer to show. In bfloat16 rounding sends some
    5 % of the positions to other experts in some layer.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _batch(logprobs_N: np.ndarray[Any, Any]) -> Batch:
    rng = np.random.default_rng(0)
    beginning = rng.integers(3, VOCABULARY, BEGINNING)
    ids = [np.concatenate((beginning, rng.integers(3, VOCABULARY, length - BEGINNING))) for length in LENGTHS]
    sampled_N = np.concatenate([np.arange(length) >= BEGINNING for length in LENGTHS])
    return Batch(
        step=0,
        token_ids_N=np.concatenate(ids).astype(np.int32),
        sampled_N=sampled_N,
        logprobs_N=np.where(sampled_N, logprobs_N, 0.0).astype(np.float32),
        versions_N=np.where(sampled_N, 0, -1).astype(np.int32),
        lengths_B=np.array(LENGTHS, np.int32),
        advantages_B=rng.normal(size=len(LENGTHS)).astype(np.float32),
    )


def by_transformers(source: Path, device: str, dtype: torch.dtype, batch: Batch, *, gradients: bool = True) -> Passed:
    """Returns what transformers gives for each trajectory alone; log-probabilities are on the N axis of the batch."""
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kinds).eval().to(device)
    logprobs_N, ends_B = np.zeros(len(batch.token_ids_N), np.float32), np.cumsum(batch.lengths_B)
    for end, length, advantage in zip(ends_B, batch.lengths_B, batch.advantages_B, strict=True):
        ids_T = torch.from_numpy(batch.token_ids_N[end - length : end]).long().to(device)
        sampled_T, old_T = (
            torch.from_numpy(each[end - length + 1 : end]).to(device) for each in (batch.sampled_N, batch.logprobs_N)
        )
        with torch.set_grad_enabled(gradients):
            logits_TV = model(ids_T[None, :-1], use_cache=False).logits[0].float()
            new_T = logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None]).squeeze(-1)
            if gradients:
                loss = -((new_T - old_T)[sampled_T].exp() * float(advantage)).sum() / int(batch.sampled_N.sum())
                loss.backward()
        logprobs_N[end - length + 1 : end] = new_T.detach().cpu().numpy()
    weights = [(name, weight.grad) for name, weight in model.named_parameters()]
    return logprobs_N, {name: gradient.float().cpu() for name, gradient in weights if gradient is not None}


def by_the_learner(
    source: Path, device: str, dtype: torch.dtype, batch: Batch, folder: Path, *, attention: str
) -> Passed:
    """Returns what the learner gives, its gradients those of one step."""
    config = LearnerConfig(
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16" if dtype is torch.bfloat16 else "float32",
        attention=attention,
        loss=LOSS,
        minibatches=1,
        grad_clip=1e9,
        mismatch_tolerance=None,
    )
    trainer = Trainer(config, source, [], folder, seed=0)
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for name, weight in trainer.scorer.named_parameters():
            if weight.grad is not None:
                gradients[name.removeprefix("model.")] = weight.grad.full_tensor().float().cpu()

    scored = trainer.score(batch)
    trainer.optimizer.register_step_pre_hook(keep)
    trainer.train(batch)
    return scored, gradients


def _apart(passed: Passed, exact: Passed, batch: Batch) -> dict[str, float]:
    sampled = batch.sampled_N
    differences = {name: passed[1][name] - value for name, value in exact[1].items()}
    return {
        "logprobs": float(np.abs(passed[0][sampled] - exact[0][sampled]).mean()),
        "gradients": _norm(differences) / _norm(exact[1]),
    }


def _norm(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.stack([value.norm() for value in gradients.values()]).norm())


def compared_products(device: str) -> dict[str, Any]:
    """Returns how many times as long a loop over the experts of a layer takes as grouped products, forward and backward
    with the router, and how far apart they are: the norm of the difference of the outputs over that of the outputs.
    """
    on_gpu = device == "cuda"
    layer = fields_of("30b-a3b-4l" if on_gpu else "small-moe") | {"num_hidden_layers": 1, "vocab_size": 8}
    dtype = torch.bfloat16 if on_gpu else torch.float32
    blocks = {}
    for kind in ("eager", "grouped_mm"):
        config = AutoConfig.for_model(**layer)  # each model changes its own
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=kind)
        blocks[kind] = model.model.layers[0].mlp.to(device, dtype)
        assert model.model.layers[0].mlp.experts.config._experts_implementation == kind
    given = torch.randn(1, LAYER_TOKENS if on_gpu else 128, layer["hidden_size"], device=device, dtype=dtype)

    def run(kind: str) -> Tensor:
        output: Tensor = blocks[kind](given.clone().requires_grad_())
        output.float().square().sum().backward()
        return output.detach().float()

    outputs = {kind: run(kind) for kind in blocks}
    times_s: dict[str, list[float]] = {kind: [] for kind in blocks}
    for kind in [*blocks] * ROUNDS:
        synchronize(device)
        began = time.perf_counter()
        run(kind)
        synchronize(device)
        times_s[kind].append(time.perf_counter() - began)
    loop_s, grouped_s = (statistics.median(times_s[kind]) for kind in ("eager", "grouped_mm"))
    apart = float((outputs["grouped_mm"] - outputs["eager"]).norm() / outputs["eager"].norm())
    return {"grouped_s": grouped_s, "loop_s": loop_s, "loop_over_grouped": loop_s / grouped_s, "difference": apart}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
