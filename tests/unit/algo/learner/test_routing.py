"""The learner replays the routes of the sampler, and computes what transformers does with the same experts."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.measure.divergence import Mismatched
from algo.learner.model.routing import RowRoutes, follow_routes
from algo.learner.pack import EMPTY
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from engine.routes import absent
from engine.types import Batch
from tests.support.algo_fakes import write_checkpoint

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
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16},
}
ROUTERS = ("gate", "router")
LENGTHS = (90, 75, 88)
SHARED = 70  # tokens that all sequences begin with
CONFIG = {"threads": 1, "lr": 1e-3, "minibatches": 1, "weights_dtype": "float32", "mismatch_tolerance": None}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")

    def make(family, *, undecided=False):
        path = folder / f"{family}-{undecided}"
        if not path.exists():
            torch.manual_seed(3)
            config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.normal_(0, 0.2) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.05)
                    if name.endswith("embed_tokens.weight"):
                        weight.mul_(5)
                    if undecided and name.endswith("gate.weight"):
                        weight.mul_(0.01)
            model.save_pretrained(path)
        return path

    return make


@pytest.fixture
def trainer(group, checkpoints, tmp_path):
    def make(family="qwen3_moe", **fields):
        path = checkpoints(family) if isinstance(family, str) else family
        return Trainer(LearnerConfig(**CONFIG | fields), path, [[1, 2, 3]], tmp_path, seed=5)

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
    routers = [m for name, m in model.named_modules() if hasattr(m, "top_k") and name.endswith(ROUTERS)]
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
    if kind.startswith("GptOss"):
        return (logits + router.bias).gather(-1, ids).softmax(-1)
    if kind.startswith("Glm4"):
        scores = logits.sigmoid().gather(-1, ids)
        return scores / (scores.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    scores = logits.softmax(-1).gather(-1, ids)
    return scores / scores.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else scores


def scored_by_hand(path, batch, routes_NXE):
    """Log-probabilities of the sampled tokens, and gradients of their sum, of plain transformers with these routes."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    routers = [m for name, m in model.named_modules() if hasattr(m, "top_k") and name.endswith(ROUTERS)]
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


def with_logprobs(batch, logprobs_N):
    return dataclasses.replace(batch, logprobs_N=np.where(batch.sampled_N, logprobs_N, 0.0).astype(np.float32))


def weights(subject):
    return torch.cat([tensor.flatten() for tensor in full_state(subject.scorer).values()])


@pytest.mark.parametrize("checkpointing", ["none", "selective", "attention", "full"])
def test_its_own_routes_change_no_bit_of_an_update(trainer, checkpoints, checkpointing):
    data = a_batch(own_routes(checkpoints("qwen3_moe"), a_batch()))
    free, replayed = trainer(), trainer(replay_routing=True, activation_checkpointing=checkpointing)
    expected = free.train(dataclasses.replace(data, routes_NXE=None), 1)
    metrics = replayed.train(data, 1)
    if checkpointing == "none":
        assert metrics["loss"] == expected["loss"]
        assert torch.equal(weights(replayed), weights(free))
    assert torch.allclose(weights(replayed), weights(free), rtol=1e-4, atol=1e-6)
    assert metrics["routing_differs"] == metrics["routing_unknown"] == 0
    assert metrics["route_bytes"] == 3 * 2
    assert expected["routing_unknown"] == 1
    assert "routing_differs" not in expected


def test_measuring_routes_counts_where_they_differ_and_changes_no_bit(trainer):
    data = a_batch(random_routes("qwen3_moe", 3))
    free, measured = trainer(share_prefix=False), trainer(replay_routing="measure", share_prefix=False)
    assert 0.5 < measured.train(data, 1)["routing_differs"] <= 1
    assert "routing_differs" not in free.train(dataclasses.replace(data, routes_NXE=None), 1)
    assert torch.equal(weights(measured), weights(free))


def test_layers_that_are_computed_again_have_the_same_routes(trainer):
    data = a_batch(random_routes("qwen3_moe", 3))
    kept, again = trainer(replay_routing=True), trainer(replay_routing=True, activation_checkpointing="full")
    other = trainer()
    for subject in (kept, again, other):
        subject.train(data, 1)
    assert torch.allclose(weights(again), weights(kept), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(weights(other), weights(kept), rtol=1e-2, atol=1e-4)


def test_a_position_without_a_route_is_routed_freely_and_counted(trainer, checkpoints):
    routes = own_routes(checkpoints("qwen3_moe"), a_batch())
    holes = np.arange(len(routes)) % 3 == 0
    routes[holes] = absent(routes.dtype)
    data = a_batch(routes)
    free, subject = trainer(), trainer(replay_routing=True)
    assert np.array_equal(subject.score(data), free.score(dataclasses.replace(data, routes_NXE=None)))
    assert 0.3 < subject.train(data, 1)["routing_unknown"] < 0.4


def test_a_shared_prompt_ends_where_routes_differ(trainer):
    routes = random_routes("qwen3_moe", 3)
    routes[LENGTHS[0] + 66] = routes[LENGTHS[0] + 66][:, ::-1]  # of the second sequence
    subject = trainer(replay_routing=True)
    (minibatch,) = subject.plan(a_batch(routes), 1)
    [micro] = minibatch.micros
    assert micro.shared == 66
    alone = trainer(replay_routing=True, share_prefix=False).score(a_batch(routes))
    assert np.abs(subject.score(a_batch(routes)) - alone).max() < 2e-5


def test_routes_of_another_model_are_refused(trainer):
    routes = random_routes("qwen3_moe", 3)
    subject = trainer(replay_routing=True)
    with pytest.raises(ValueError, match=r"2 layers of 2 experts, the learner's model has 3 of 2"):
        subject.train(a_batch(routes[:, :2]), 1)
    routes[5, 1, 0] = 8
    with pytest.raises(ValueError, match=r"names expert 8, and a layer .* has 8"):
        subject.train(a_batch(routes), 1)


def test_replay_without_a_mixture_is_refused(group, tmp_path):
    path = write_checkpoint(tmp_path / "dense")
    with pytest.raises(ValueError, match="replay_routing must be False for 'qwen3'"):
        Trainer(LearnerConfig(**CONFIG, replay_routing=True), path, [[1, 2]], tmp_path, seed=0)


def test_a_router_that_chooses_in_another_way_is_refused(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints("qwen3_moe"), attn_implementation="eager")
    router = follow_routes(model)[1].router

    def sorting(hidden):
        logits = hidden.reshape(-1, 32) @ router.weight.T
        values, ids = logits.softmax(-1).sort(-1, descending=True)
        return logits, values[:, :2], ids[:, :2]

    router.forward.__self__._forward = sorting
    routes = RowRoutes(random_routes("qwen3_moe", 3)[:5], torch.device("cpu"), replay=True)
    with pytest.raises(ValueError, match="by 0 calls of topk over 8 scores"):
        model(torch.ones(1, 5, dtype=torch.int64), sampler_routes=routes)


@pytest.mark.parametrize("routing", ["the cause", "not the cause", "unknown", "replayed"])
def test_a_mismatch_says_whether_routing_is_the_cause(trainer, checkpoints, routing):
    """The sampler chose other experts for some tokens, as rounding in bfloat16 does; or it has other weights."""
    routes = own_routes(checkpoints("qwen3_moe"), a_batch())
    routes[::4] = random_routes("qwen3_moe", 3)[::4]
    for index, start in enumerate(np.cumsum(LENGTHS) - LENGTHS):
        routes[start : start + SHARED] = routes[:SHARED] if index else routes[start : start + SHARED]
    sampled = a_batch(routes)
    sampler = trainer(replay_routing=True)
    data = with_logprobs(sampled, sampler.score(sampled))
    if routing in ("not the cause", "replayed"):
        data = with_logprobs(data, data.logprobs_N + np.float32(3.0))
    if routing == "unknown":
        data = dataclasses.replace(data, routes_NXE=None)
    learner = trainer(mismatch_tolerance=3e-5, replay_routing=routing == "replayed")
    expected = {
        "the cause": r"of the positions to other experts .* that is the cause: .* Fix: learner\.replay_routing=true",
        "not the cause": r"so that is not the cause\. Fix: if the model's own rounding",
        "unknown": r"Which experts the sampler chose is not known.*learner\.replay_routing=true",
        "replayed": "used the sampler's experts, so routing is not the cause",
    }
    with pytest.raises(Mismatched, match=expected[routing]):
        learner.train(data, 1)


def test_a_mismatch_with_a_sampler_in_bfloat16_comes_from_routing(trainer, checkpoints):
    """Routers that are nearly undecided, as those of a large model are for many tokens."""
    path = checkpoints("qwen3_moe", undecided=True)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.bfloat16)
    data = a_batch()
    routes, logprobs = [], []
    chosen = [[] for _ in range(3)]
    for into, layer in zip(chosen, model.model.layers, strict=True):
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output, into=into: into.append(output[2]))
    with torch.no_grad():
        for ids_T in torch.from_numpy(data.token_ids_N.astype(np.int64)).split(LENGTHS):
            logits = model(ids_T[None]).logits[0].float().log_softmax(-1)
            logprobs.append(torch.cat([torch.zeros(1), logits[:-1].gather(-1, ids_T[1:, None])[:, 0]]))
    routes = np.stack([torch.cat(each).numpy() for each in chosen], 1).astype(np.uint8)
    data = with_logprobs(dataclasses.replace(data, routes_NXE=routes), torch.cat(logprobs).numpy())
    with pytest.raises(Mismatched, match=r"that is the cause: .* Fix: learner\.replay_routing=true"):
        trainer(path, mismatch_tolerance=3e-5).train(data, 1)
    replayed = trainer(path, replay_routing=True).train(data, 1)
    free = trainer(path).train(data, 1)
    assert min(replayed["routing_differs"], free["routing_differs"]) > 0.02
    assert replayed["mismatch_fresh_mean"] < free["mismatch_fresh_mean"] / 2


def test_a_model_whose_layers_do_not_get_the_routes_is_refused():
    routes = RowRoutes(random_routes("qwen3_moe", 3)[:5], torch.device("cpu"), replay=True)
    routes.note(1, routes.ids_LE(1))
    with pytest.raises(ValueError, match="2 of 3 layers did not get the sampler's routes"):
        routes.differing_L()


def test_a_rank_with_filler_in_place_of_a_row_counts_the_same_names(trainer):
    subject = trainer(replay_routing=True)
    (minibatch,) = subject.plan(a_batch(random_routes("qwen3_moe", 3)), 1)
    counts, _ = subject.passes(dataclasses.replace(minibatch, micros=(*minibatch.micros, EMPTY)))
    assert counts[0].keys() == counts[1].keys()
    assert [int(each["routed"] + each["unrouted"]) for each in counts] == [minibatch.micros[0].tokens, 0]
