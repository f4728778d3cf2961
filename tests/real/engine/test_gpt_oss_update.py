"""What a replica does with new weights of gpt-oss before vLLM gets them. The whole way: test_moe_sync.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine.replica.config import prepare_environment

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the import of vLLM


@pytest.fixture
def transfer():
    prepare_environment()
    from engine.replica import weight_transfer

    return weight_transfer


def test_experts_go_to_vllm_one_by_one_and_sinks_are_kept(transfer):
    layer, sinks = "model.layers.1", {}
    weights = {
        f"{layer}.self_attn.sinks": torch.arange(4.0),
        f"{layer}.self_attn.q_proj.bias": torch.zeros(3),
        f"{layer}.mlp.router.weight": torch.zeros(2, 5),
        f"{layer}.mlp.experts.gate_up_proj": torch.randn(2, 5, 6),
        f"{layer}.mlp.experts.down_proj_bias": torch.randn(2, 5),
    }
    found = dict(transfer.each_expert(weights.items(), sinks))
    assert found.keys() == {
        f"{layer}.self_attn.q_proj.bias",
        f"{layer}.mlp.router.weight",
        *(f"{layer}.mlp.experts.{expert}.{part}" for expert in (0, 1) for part in ("w13_weight", "w2_bias")),
    }
    assert torch.equal(found[f"{layer}.mlp.experts.1.w13_weight"], weights[f"{layer}.mlp.experts.gate_up_proj"][1])
    assert list(sinks) == [f"{layer}.attn.sinks"]
    weights[f"{layer}.self_attn.sinks"].zero_()  # as when the memory that they came in is used again
    assert sinks[f"{layer}.attn.sinks"].tolist() == [0, 1, 2, 3]


def test_an_update_without_all_sinks_fails(transfer):
    attention = nn.Module()
    attention.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(RuntimeError, match="1 layers with sinks, and 0 came"):
        transfer.copy_sinks(nn.ModuleDict({"attn": attention}), {})


class GptOssForCausalLM(nn.Module):
    """As in a vLLM that cannot load experts one by one."""

    def __init__(self):
        super().__init__()
        self.model = nn.Linear(2, 2)


def test_a_vllm_that_cannot_load_experts_one_by_one_is_refused(transfer):
    subject = object.__new__(transfer.ShmWeightTransfer)
    subject.model, subject.device = GptOssForCausalLM(), torch.device("cpu")
    subject.parallel_config = SimpleNamespace(world_size=1)
    with pytest.raises(RuntimeError, match=r"no new weights of gpt-oss.*Fix: install vLLM 0\.32"):
        subject.start_weight_update()
