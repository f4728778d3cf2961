"""The bench of the gateway: the same conversations for all ways, and what its ratios are of."""

from bench.benches.gateway.gateway import metrics_of
from bench.benches.gateway.script import SAMPLES, Scripted, conversations, reply
from bench.benches.gateway.servers import Measured


def measured(cpu_s, tokens=1000, turns=10):
    return Measured(turns=turns, sampled_tokens=tokens, prompt_tokens=400, cached_tokens=100, cpu_s=cpu_s, wall_s=1.0)


def test_a_ratio_is_of_the_costs_of_one_round_and_one_way_of_answering():
    rounds = [
        {
            ("long", "built_in", False): measured(0.5),
            ("long", "gateway", False): measured(1.0),
            ("long", "gateway", True): measured(2.0),
            ("long", "vllm", False): measured(3.0 * speed, tokens=2000),
            ("long", "vllm", True): measured(8.0 * speed),
        }
        for speed in (1, 2, 4)
    ]
    found = metrics_of(rounds)
    assert (found["long_vllm_over_gateway"], found["long_stream_vllm_over_gateway"]) == (3.0, 8.0)
    assert (found["long_built_in_us_per_token"], found["long_built_in_ms_per_turn"]) == (500.0, 50.0)
    assert found["long_gateway_stream_prefix_hits"] == 0.25


def test_without_a_peer_there_is_no_ratio():
    assert not [name for name in metrics_of([{("agent", "gateway", False): measured(1.0)}]) if "over" in name]


async def test_conversations_are_those_of_the_seed_and_a_reply_is_that_of_the_code():
    drawn = conversations(SAMPLES + 3, seed=4)
    assert [prompt.id for prompt in drawn] == [prompt.id for prompt in conversations(SAMPLES + 3, seed=4)]
    assert len({prompt.id for prompt in drawn}) == 2
    assert {prompt.id for prompt in drawn}.isdisjoint(prompt.id for prompt in conversations(SAMPLES, seed=5))
    assert (await Scripted().run("print(1)")).stdout == reply("print(1)") != reply("print(2)")
