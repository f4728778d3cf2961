"""The learner replays the routes of the sampler, and computes what transformers does with the same experts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.model.routing import follow_routes
from algo.learner.trainer import Trainer
from engine.routes import absent
from engine.types import Batch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 16},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}
LENGTHS = (90, 75, 88)
SHARED = 70  # tokens that all sequences begin with
CONFIG = {"threads": 1, "lr": 1e-3, "minibatches": 1, "weights_dtype": "float32", "mismatch_tolerance": None}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")

    def make(family):
        path = folder / family
        if not path.exists():
            torch.manual_seed(3)
            config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.normal_(0, 0.2) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.05)
                    if name.endswith("embed_tokens.weight"):
                        weight.mul_(5)
            model.save_pretrained(path)
        return path

    return make


@pytest.fixture
def trainer(group, checkpoints, tmp_path):
    def make(family="qwen3_moe", **fields):
        return Trainer(LearnerConfig(**CONFIG | fields), checkpoints(family), [[1, 2, 3]], tmp_path, seed=5)

    return make


def a_batch(routes_NXE=None, step=0):
    generator = np.random.default_rng(1)
    prompt = generator.integers(3, 64, SHARED)
    ids = np.concatenate([np.concatenate([prompt, generator.integers(3, 64, size - SHARED)]) for size in LENGTHS])
    sampled = np.concatenate([np.arange(size) >= SHARED for size in LENGTHS])
    return Batch(
        step=step,
        token_ids_N=ids.astype(np.int32),
        sampled_N=sampled,
        logprobs_N=np.where(sampled, -4.0, 0.0).astype(np.float32),
        versions_N=np.where(sampled, 0, -1).astype(np.int32),
        lengths_B=np.asarray(LENGTHS, np.int32),
        advantages_B=np.asarray([1.0, -0.5, 0.25], np.float32),
        routes_NXE=routes_NXE,
    )


def own_routes(path, batch):
    """The choices of the plain model of transformers, by hooks on its routers: [N, X, E]."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    routers = [m for name, m in model.named_modules() if hasattr(m, "top_k") and name.endswith("gate")]
    chosen = [[] for _ in routers]
    for router, into in zip(routers, chosen, strict=True):
        router.register_forward_hook(lambda _m, _i, output, into=into: into.append(output[2]))
    with torch.no_grad():
        for ids_T in torch.from_numpy(batch.token_ids_N.astype(np.int64)).split(LENGTHS):
            model(ids_T[None])
    return np.stack([torch.cat(each).numpy() for each in chosen], 1).astype(np.uint8)


def random_routes(family, layers):
    experts, k = (FAMILIES[family].get(name) for name in ("num_experts", "num_experts_per_tok"))
    experts = experts or FAMILIES[family].get("num_local_experts") or FAMILIES[family]["n_routed_experts"]
    generator = np.random.default_rng(4)
    prompt = generator.permuted(np.tile(np.arange(experts), (SHARED, layers, 1)), axis=-1)[..., :k]
    each = [generator.permuted(np.tile(np.arange(experts), (s - SHARED, layers, 1)), axis=-1)[..., :k] for s in LENGTHS]
    return np.concatenate([part for own in each for part in (prompt, own)]).astype(np.uint8)


def weights_by_hand(router, hidden, ids):
    """The formula of each family, written down from its paper: gate scores of the given experts."""
    logits = hidden.float() @ router.weight.T.float()
    kind = type(router).__name__
    if kind.startswith("Glm4"):
        scores = logits.sigmoid().gather(-1, ids)
        return scores / (scores.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    scores = logits.softmax(-1).gather(-1, ids)
    return scores / scores.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else scores


def scored_by_hand(path, batch, routes_NXE):
    """Log-probabilities of the sampled tokens, and gradients of their sum, of plain transformers with these routes."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    routers = [m for name, m in model.named_modules() if hasattr(m, "top_k") and name.endswith("gate")]
    now = {}

    def forward(router, index):
        def routed(hidden):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            ids = now["ids"][:, index]
            return None, weights_by_hand(router, hidden, ids), ids

        return routed

    for index, router in enumerate(routers):
        router.forward = forward(router, index)
    starts = np.cumsum(LENGTHS) - LENGTHS
    logprobs = []
    for start, size in zip(starts, LENGTHS, strict=True):
        now["ids"] = torch.from_numpy(routes_NXE[start : start + size].astype(np.int64))
        ids_T = torch.from_numpy(batch.token_ids_N[start : start + size].astype(np.int64))
        logits = model(ids_T[None]).logits[0].float()
        logprobs.append(logits.log_softmax(-1)[:-1].gather(-1, ids_T[1:, None])[SHARED - 1 :, 0])
    logprobs_M = torch.cat(logprobs)
    logprobs_M.sum().backward()
    return logprobs_M.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_transformers_with_the_same_experts(trainer, checkpoints, family):
    subject = trainer(family, replay_routing=True)
    routes = random_routes(family, len(subject.mixtures))
    data = a_batch(routes)
    expected, gradients = scored_by_hand(checkpoints(family), data, routes)
    free = own_routes(checkpoints(family), data)
    assert (np.sort(routes, -1) != np.sort(free, -1)).any((1, 2)).mean() > 0.9  # other experts than the model's own

    assert np.abs(subject.score(data)[data.sampled_N] - expected.numpy()).max() < 2e-5
    (minibatch,) = subject.plan(data, 1)
    assert minibatch.micros[0].shared == SHARED
    for micro in minibatch.micros:
        logprobs_M, _ = subject.forward(micro, routes=subject._routes(micro))
        logprobs_M.sum().backward()
    for name, parameter in subject.scorer.model.named_parameters():
        own = parameter.grad.full_tensor()
        assert torch.allclose(own, gradients[name], rtol=1e-4, atol=2e-5), name
