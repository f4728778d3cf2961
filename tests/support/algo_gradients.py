"""One gradient under several configurations, on any number of ranks: in this process, or as a program on
several ranks: `algo_gradients.py CHECKPOINT RESULT`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size

CASES = {
    "plain": {},
    "small rows": {"micro_batch_tokens": 50},
    "other order": {"seed": 1},
    "dense mask": {"attention": "sdpa"},
    "checkpointing": {"activation_checkpointing": "full", "micro_batch_tokens": 200},
    "all but the MLP kept": {"activation_checkpointing": "attention", "micro_batch_tokens": 200},
    "products kept": {"activation_checkpointing": "selective", "micro_batch_tokens": 200},
    "offload": {"activation_checkpointing": "full", "activation_offload": True, "micro_batch_tokens": 200},
    "bfloat16": {"dtype": "bfloat16", "micro_batch_tokens": 200},
    "reference": {"reference_kl_coef": 20.0, "micro_batch_tokens": 200},
    "adapters": {"lora_rank": 4},
    "adapters, reference": {"lora_rank": 4, "reference_kl_coef": 20.0},
    "adapters, small rows": {"lora_rank": 4, "micro_batch_tokens": 50, "activation_checkpointing": "full"},
    "adapters, products kept": {"lora_rank": 4, "micro_batch_tokens": 200, "activation_checkpointing": "selective"},
}


def build(checkpoint, folder, **fields):
    """Adapters are given a value: at zero, half of their gradients are zero. So is the KL to the reference, until the
    learner has moved.
    """
    from algo.learner.config import LearnerConfig
    from algo.learner.trainer import Trainer

    config = LearnerConfig(**{"threads": 1, "lr": 1e-3, "grad_clip": 1e9} | fields)
    trainer = Trainer(config, checkpoint, [[1, 2, 3, 4, 5]], folder, seed=5)
    for name, parameter in trainer.scorer.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.constant_(parameter, 0.01)
    if trainer.reference and not trainer.config.lora_rank:
        with torch.no_grad():
            for parameter in trainer.scorer.parameters():
                parameter.mul_(1.05)
    return trainer


def gradient(trainer, minibatch):
    """(loss, norm, unsharded gradient by name) of one minibatch, from the trainer's own update at rate 0."""
    for parameters in trainer.optimizer.param_groups:
        parameters["lr"] = 0.0
    kept = {}

    def keep(*_):
        for name, parameter in trainer.scorer.named_parameters():
            if parameter.grad is not None:
                kept[name] = parameter.grad.full_tensor().clone()

    handle = trainer.optimizer.register_step_pre_hook(keep)
    [result] = trainer.updates([minibatch], None)
    handle.remove()
    return result["loss"], result["grad_norm"], kept


def gradients(checkpoint, folder):
    """By case; and the weights that leave the learner in the last one, which has adapters."""
    from algo.learner.pack import plan
    from algo.learner.state.publish import full_state
    from tests.support.algo_fakes import batch

    found = {}
    for case, fields in CASES.items():
        fields = dict(fields)
        seed = fields.pop("seed", 0)
        trainer = build(checkpoint, folder, **fields)
        tokens, ranks = trainer.config.micro_batch_tokens, trainer.world_size
        (minibatch,) = plan(
            batch(13), minibatches=1, micro_batch_tokens=tokens, ranks=ranks, rank=trainer.rank, seed=seed
        )
        found[case] = gradient(trainer, minibatch)
    trainer.publisher.publish(0)
    assert _get_work_registry_size() == 0, "PyTorch keeps what was gathered until somebody has waited for it"
    return found, full_state(trainer.scorer)


if __name__ == "__main__":
    checkpoint, result = map(Path, sys.argv[1:])
    from algo.learner.trainer import join_group

    join_group()
    found = gradients(checkpoint, result.parent)
    if dist.get_rank() == 0:
        torch.save(found, result)
    else:
        assert found[1] == {}, "one rank keeps the weights of all"
    from algo.learner.learner import leave

    leave(0)
