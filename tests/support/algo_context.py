"""What ranks that share rows make of them, on any number of ranks: `algo_context.py CHECKPOINTS RESULT SHARING`.

Rank 0 writes what it found, by case: the gradient of the first minibatch, and after five steps metrics, notes, weights,
log-probabilities of a batch and of the canary. CHECKPOINTS is a folder that `write_checkpoints` made.
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
from engine.types import Batch
from tests.support.algo_fakes import CANARY, batch, with_prefix, write_checkpoint

STEPS = 5
PREFIX = list(range(1, 72))
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
}
# On more than two ranks, which take long on two cores, these alone.
FEW = ("packed", "windows", "sinks")
SPEED = ("train_s", "tokens_per_s", "peak_bytes")


def write_checkpoints(folder):
    """A model with 4 heads of queries and 2 of keys; and two with 12 and 3, half of whose layers look back 8 tokens.

    One of these has attention sinks.
    """
    write_checkpoint(folder / "tiny")
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


def batch_of(kind, step):
    match kind:
        case "plain":
            return batch(13, step=step)
        case "long":
            return batch(1, step=step, longest=200)
        case "prefixed":
            return with_prefix(batch(7, step=step), PREFIX)
        case "taught":
            return _taught(batch(7, step=step))
    raise ValueError(kind)


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
    kept = {}

    def keep(*_):
        if not kept:
            for name, parameter in trainer.scorer.named_parameters():
                if parameter.grad is not None:
                    kept[name] = parameter.grad.full_tensor().clone()

    handle = trainer.optimizer.register_step_pre_hook(keep)
    metrics = [trainer.train(batch_of(kind, step), version=step + 1, rows=(0,)) for step in range(STEPS)]
    handle.remove()
    return {
        "gradients": kept,
        "metrics": [{name: value for name, value in row.items() if name not in SPEED} for row in metrics],
        "notes": {name: torch.from_numpy(values) for name, values in trainer.noted.items()},
        "scores": torch.from_numpy(trainer.score(batch_of(kind, STEPS))),
        "canary": torch.from_numpy(trainer.score_canary()),
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
