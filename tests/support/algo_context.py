"""What ranks that share rows make of them, on any number of ranks: `algo_context.py CHECKPOINTS RESULT SHARING`.

Rank 0 writes what it found, by case: the gradient of the first minibatch, and after five steps metrics, notes, weights,
log-probabilities of a batch and of the canary, and the experts of a mixture's first layer that each rank sent a
position to in its first pass. CHECKPOINTS is a folder that `write_checkpoints` made.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import GraniteSWAConfig, GraniteSWAForCausalLM, Qwen3Config, Qwen3ForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.learner import leave
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer, join_group
from algo.loss.distillation import TopK
from algo.loss.policy_losses import Correction, Gspo
from engine.routes import absent
from engine.types import Batch
from tests.support import algo_mixtures
from tests.support.algo_fakes import CANARY, batch, with_prefix, write_checkpoint

STEPS = 5
PREFIX = list(range(1, 72))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NARROW = "narrow/Qwen3Moe"  # two experts, one of them a token: some random routes are the model's own
BALANCED = {"load_balancing_coef": 0.5, "micro_batch_tokens": 150, "adam_eps": 1e-4}
# Of each: the checkpoint, the batch and the learner's fields.
CASES = {
    "packed": ("tiny", "plain", {}),
    "one trajectory": ("tiny", "long", {"minibatches": 1}),
    "common beginning": ("tiny", "prefixed", {"micro_batch_tokens": 150}),
    "windows": ("windows", "prefixed", {"micro_batch_tokens": 150}),
    "sinks": ("sinks", "prefixed", {"micro_batch_tokens": 150}),
    "everything again": ("tiny", "plain", {"activation_checkpointing": "full", "activation_offload": True}),
    "some products again": ("windows", "plain", {"activation_checkpointing": "attention"}),
    "products kept": ("tiny", "prefixed", {"activation_checkpointing": "selective"}),
    "adapters": ("tiny", "plain", {"lora_rank": 4, "lora_targets": ("q_proj", "down_proj"), "reference_kl_coef": 1.0}),
    "reference": ("tiny", "plain", {"reference_kl_coef": 1.0}),
    "teacher": ("tiny", "taught", {"loss": TopK(direction="forward", coef=0.5)}),
    "sequences": ("tiny", "prefixed", {"loss": Gspo(proximal=True, correction=Correction())}),
    "mixture": ("Qwen3Moe", "plain", {"load_balancing_coef": 0.5}),
    "mixture, one trajectory": ("Qwen3Moe", "short", {"load_balancing_coef": 0.5, "minibatches": 1}),
    "mixture, shared expert": ("Qwen2Moe", "prefixed", BALANCED),
    "mixture, dense layer": ("Glm4Moe", "prefixed", BALANCED),
    "mixture, wide queries": ("DeepseekV3", "prefixed", BALANCED),
    "mixture, replay": (NARROW, "routed", {**BALANCED, "replay_routing": True}),
    "mixture, shared expert, replay": ("Qwen2Moe", "prefixed, routed", {**BALANCED, "replay_routing": True}),
    "mixture, routes compared": (NARROW, "routed", BALANCED),
    "mixture, replay, everything again": (
        "Qwen3Moe",
        "prefixed, routed",
        {**BALANCED, "replay_routing": True, "activation_checkpointing": "full", "activation_offload": True},
    ),
    "mixture, some products again": ("Qwen2Moe", "routed", {**BALANCED, "activation_checkpointing": "attention"}),
    "mixture, products kept": (
        "Qwen3Moe",
        "routed",
        {**BALANCED, "replay_routing": True, "activation_checkpointing": "selective"},
    ),
    "mixture, sinks, replay": ("GptOss", "prefixed, routed", {**BALANCED, "replay_routing": True}),
    "mixture, adapters": (
        "Qwen3Moe",
        "plain",
        {"lora_rank": 4, "lora_targets": ATTENTION, "reference_kl_coef": 1.0, "load_balancing_coef": 0.5},
    ),
    "mixture, frozen router": ("Qwen3Moe", "prefixed", {**BALANCED, "train_router": False, "reference_kl_coef": 1.0}),
}
# On more than two ranks, which take long on two cores, these alone.
FEW = ("packed", "windows", "sinks", "mixture, replay", "mixture, shared expert")
SPEED = ("train_s", "tokens_per_s", "peak_bytes")


def write_checkpoints(folder):
    """A model with 4 heads of queries and 2 of keys; two with 12 and 3, half of whose layers look back 8 tokens, one of
    them with attention sinks; and mixtures of experts.
    """
    write_checkpoint(folder / "tiny")
    for family in ("Qwen3Moe", "Qwen2Moe", "Glm4Moe", "DeepseekV3", "GptOss"):
        algo_mixtures.write(folder, family)
    algo_mixtures.write(folder / "narrow", "Qwen3Moe", num_experts=2, num_experts_per_tok=1, norm_topk_prob=False)
    torch.manual_seed(1)
    fields = {
        "vocab_size": 512,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "intermediate_size": 64,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    windows = Qwen3ForCausalLM(Qwen3Config(**fields, head_dim=8, use_sliding_window=True))
    with_sinks = GraniteSWAForCausalLM(GraniteSWAConfig(**fields))
    for layer in with_sinks.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    for name, model in (("windows", windows), ("sinks", with_sinks)):
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer_config.json").write_text(json.dumps({}))


def batch_of(kind, step, config):
    """config: that of the model."""
    match kind:
        case "short":
            return batch(1, step=step, longest=14)
        case "routed":
            return _routed(batch(13, step=step), config, common=0)
        case "prefixed, routed":
            return _routed(with_prefix(batch(7, step=step), PREFIX), config, common=len(PREFIX))
        case "plain":
            return batch(13, step=step)
        case "long":
            return batch(1, step=step, longest=200)
        case "prefixed":
            return with_prefix(batch(7, step=step), PREFIX)
        case "taught":
            return _taught(batch(7, step=step))
    raise ValueError(kind)


def _routed(whole, config, common):
    """Random experts for each position, equal in the common beginning; one position of five has none."""
    experts, per_token, layers = config.num_experts, config.num_experts_per_tok, config.num_hidden_layers
    rng, tokens = np.random.default_rng(4), len(whole.token_ids_N)
    routes_NXE = np.argsort(rng.random((tokens, layers, experts)), -1)[..., :per_token].astype(np.uint8)
    routes_NXE[rng.random(tokens) < 0.2] = absent(routes_NXE.dtype)
    for start in np.cumsum(whole.lengths_B) - whole.lengths_B:
        routes_NXE[start : start + common] = routes_NXE[:common]
    return Batch(step=whole.step, **(whole.arrays() | {"routes_NXE": routes_NXE}))


def _taught(whole):
    rng = np.random.default_rng(3)
    tokens = len(whole.token_ids_N)
    taught = {
        "token_advantages_N": rng.normal(size=tokens).astype(np.float32),
        "teacher_ids_NK": np.argsort(rng.random((tokens, 512)), 1)[:, :4].astype(np.int32),
        "teacher_logprobs_NK": np.log(rng.dirichlet(np.ones(5), tokens)[:, :4]).astype(np.float32),
    }
    return Batch(step=whole.step, **(whole.arrays() | taught))


def found(trainer, kind):
    kept, reached, config = {}, set(), trainer.scorer.model.config

    def keep(*_):
        if not kept:
            for weight, parameter in trainer.scorer.named_parameters():
                if parameter.grad is not None:
                    kept[weight] = parameter.grad.full_tensor().clone()

    def reach(_router, _inputs, output):
        if not reached:
            reached.update(output[2].flatten().tolist())

    for layer in trainer.mixtures[:1]:
        layer.router.register_forward_hook(reach)
    handle = trainer.optimizer.register_step_pre_hook(keep)
    metrics = [trainer.train(batch_of(kind, step, config), version=step + 1, rows=(0,)) for step in range(STEPS)]
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, sorted(reached))
    handle.remove()
    return {
        "gradients": kept,
        "metrics": [{key: value for key, value in row.items() if key not in SPEED} for row in metrics],
        "notes": {key: torch.from_numpy(values) for key, values in trainer.noted.items()},
        "scores": torch.from_numpy(trainer.score(batch_of(kind, STEPS, config))),
        "canary": torch.from_numpy(trainer.score_canary()),
        "canary's sequences": trainer.canary.further,
        "experts": by_rank,
        "weights": full_state(trainer.scorer),
    }


def main(checkpoints, result, sharing):
    join_group()
    results = {}
    for case in CASES if dist.get_world_size() <= 2 else FEW:
        name, kind, fields = CASES[case]
        fixed = {"threads": 1, "lr": 1e-4, "micro_batch_tokens": 100, "context_parallel": sharing}
        config = LearnerConfig(**fixed | fields)
        trainer = Trainer(config, checkpoints / name, CANARY, result.parent, seed=5)
        results[case] = found(trainer, kind)
    if dist.get_rank() == 0:
        torch.save(results, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    leave(0)
