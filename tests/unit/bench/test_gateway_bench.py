"""The bench of the gateway: the same conversations for all ways, and what its ratios are of."""

from bench.benches.gateway.gateway import case_of, figures
from bench.benches.gateway.script import SAMPLES, Scripted, conversations, reply
from bench.benches.gateway.servers import Measured


def measured(cpu_s, tokens=1000, turns=10):
    return Measured(turns=turns, sampled_tokens=tokens, prompt_tokens=400, cached_tokens=100, cpu_s=cpu_s, wall_s=1.0)


def test_a_ratio_is_of_the_costs_of_one_round_and_one_way_of_answering():
    measured_of = {
        ("long", "built_in", False): measured(0.5),
        ("long", "gateway", False): measured(1.0),
        ("long", "gateway", True): measured(2.0),
        ("long", "vllm", False): measured(6.0, tokens=2000),
        ("long", "vllm", True): measured(16.0),
    }
    rows = {case_of(mode): figures(measured_of, mode) for mode in measured_of}
    assert rows["long/vllm"]["over_gateway"] == 3.0
    assert rows["long/vllm/streamed"]["over_gateway"] == 8.0
    assert rows["long/built_in"]["over_gateway"] == 0.5
    assert (rows["long/built_in"]["token_s"], rows["long/built_in"]["turn_s"]) == (500e-6, 50e-3)
    assert rows["long/gateway/streamed"]["prefix_hits"] == 0.25


def test_without_the_gateway_there_is_no_ratio():
    mode = ("agent", "vllm", False)
    assert "over_gateway" not in figures({mode: measured(1.0)}, mode)


async def test_conversations_are_those_of_the_seed_and_a_reply_is_that_of_the_code():
    drawn = conversations(SAMPLES + 3, seed=4)
    assert [prompt.id for prompt in drawn] == [prompt.id for prompt in conversations(SAMPLES + 3, seed=4)]
    assert len({prompt.id for prompt in drawn}) == 2
    assert {prompt.id for prompt in drawn}.isdisjoint(prompt.id for prompt in conversations(SAMPLES, seed=5))
    assert (await Scripted().run("print(1)")).stdout == reply("print(1)") != reply("print(2)")
