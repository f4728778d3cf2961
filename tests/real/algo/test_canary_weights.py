"""The canary in bfloat16 on both sides, on the tiny agent: right weights pass in every version, wrong ones in none."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from engine.assembly.learner import CANARY
from engine.fleet.canary import CanaryFailed, compare, tolerance_of
from engine.rollout.chat_template import ChatConfig, ChatTemplate
from engine.types import PublishedWeights
from tests.support.algo_fakes import batch

AGENT = Path("recipes/tiny/agent")
CONFIG = LearnerConfig(threads=1, lr=1e-3, warmup_steps=0, dtype="bfloat16", weights_dtype="bfloat16")
EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.1."


class Versions:
    """Weights (by name, bfloat16) and the learner's canary of each version, and how replicas score the same prompts."""

    def __init__(self, folder):
        chat = ChatTemplate.load(AGENT, ChatConfig())
        self.canary = [chat.prompt_ids(({"role": "user", "content": text},)) for text in CANARY]
        learner = Trainer(CONFIG, AGENT, self.canary, folder, seed=5)
        self.weights, self.scored = [], []
        for version in range(6):
            if version:
                learner.train(batch(16, step=version))
            self.weights.append(full_state(learner.scorer, torch.bfloat16))
            self.scored.append(PublishedWeights("", version, learner.score_canary()))
        self.tolerance = tolerance_of(AGENT, "bfloat16")

    @torch.no_grad()
    def replica(self, weights, head=None):
        """Log-probabilities [tokens] of a model with these weights whose attention rounds to bfloat16 in other places
        than the learner's. head: in place of the embedding, which it is tied to.
        """
        config = AutoConfig.from_pretrained(AGENT)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        model.load_state_dict(weights, strict=False)
        if head is not None:
            model.lm_head.weight = torch.nn.Parameter(head)
        logits = [model(torch.tensor([ids])).logits[0, :-1].float() for ids in self.canary]
        following = [torch.tensor(ids[1:])[:, None] for ids in self.canary]
        parts = [each.log_softmax(-1).gather(-1, at)[:, 0] for each, at in zip(logits, following, strict=True)]
        return torch.cat(parts).numpy()


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner")
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield Versions(folder)
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def test_each_version_passes_with_room_to_spare(versions):
    for weights, scored in zip(versions.weights, versions.scored, strict=True):
        found = compare(0, versions.replica(weights), scored, versions.tolerance)
        assert 0 < found.mean_abs < versions.tolerance / 2


def stale(names, source, weights):
    return weights | {name: source[name] for name in weights if name.startswith(names)}


def swapped(weights, one, other):
    return weights | {one: weights[other], other: weights[one]}


WRONG = {
    "one replica of an older version": lambda old, new: old,
    "a stale embedding": lambda old, new: stale(EMBEDDING, old, new),
    "a stale layer": lambda old, new: stale(LAYER, old, new),
    "swapped names in a layer": lambda old, new: swapped(
        new, f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"
    ),
    "swapped layers": lambda old, new: {
        name.replace("layers.0", "layers.x").replace("layers.2", "layers.0").replace("layers.x", "layers.2"): weight
        for name, weight in new.items()
    },
    "a scaled tensor": lambda old, new: (
        new | {f"{LAYER}mlp.down_proj.weight": 1.5 * new[f"{LAYER}mlp.down_proj.weight"]}
    ),
    "a tensor that is zero": lambda old, new: (
        new | {f"{LAYER}self_attn.o_proj.weight": 0 * old[f"{LAYER}self_attn.o_proj.weight"]}
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_weights_fail(versions, kind):
    wrong = WRONG[kind](versions.weights[0], versions.weights[-1])
    with pytest.raises(CanaryFailed):
        compare(0, versions.replica(wrong), versions.scored[-1], versions.tolerance)


def test_a_stale_head_fails_where_it_is_tied_to_an_embedding_that_is_not(versions):
    found = versions.replica(versions.weights[-1], head=versions.weights[0][EMBEDDING])
    with pytest.raises(CanaryFailed):
        compare(0, found, versions.scored[-1], versions.tolerance)


def test_what_a_user_allows_counts(versions):
    found = versions.replica(versions.weights[0])
    compare(0, found, versions.scored[-1], 10.0)
    assert compare(0, found, versions.scored[-1], None).mean_abs > versions.tolerance
    with pytest.raises(CanaryFailed):
        compare(0, np.full_like(found, np.nan), versions.scored[-1], None)
    with pytest.raises(CanaryFailed):
        compare(0, versions.replica(versions.weights[-1]), versions.scored[-1], 1e-4)
