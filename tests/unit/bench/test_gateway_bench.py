"""The bench of the gateway: the same conversations for all ways, and what its ratios are of."""

from bench.benches.gateway.gateway import Mode, case_of, figures, modes_of
from bench.benches.gateway.script import SAMPLES, WORKLOADS, Scripted, conversations, reply
from bench.benches.gateway.servers import Measured


def measured(cpu_s, tokens=1000, turns=10):
    return Measured(turns=turns, sampled_tokens=tokens, prompt_tokens=400, cached_tokens=100, cpu_s=cpu_s, wall_s=1.0)


def test_a_ratio_is_of_the_costs_of_one_round_and_alike_otherwise():
    measured_of = {
        Mode("agent", 64, "built_in"): measured(0.5),
        Mode("agent", 64, "gateway", "chat", False): measured(1.0),
        Mode("agent", 64, "gateway", "chat", True): measured(2.0),
        Mode("agent", 64, "gateway", "continued", True): measured(2.2),
        Mode("agent", 64, "vllm", "chat", False): measured(6.0, tokens=2000),
        Mode("agent", 64, "vllm", "chat", True): measured(16.0),
        Mode("agent", 256, "gateway", "chat", True): measured(7.0),
    }
    rows = {case_of(mode): figures(measured_of, mode) for mode in measured_of}
    assert rows["agent/64/vllm/chat"]["over_gateway"] == 3.0
    assert rows["agent/64/vllm/chat/streamed"]["over_gateway"] == 8.0
    assert rows["agent/64/built_in"]["over_gateway"] == 0.5
    assert rows["agent/64/gateway/continued/streamed"]["over_chat"] == 1.1
    assert "over_chat" not in rows["agent/64/built_in"]
    assert (rows["agent/64/built_in"]["token_s"], rows["agent/64/built_in"]["turn_s"]) == (500e-6, 50e-3)
    assert rows["agent/256/gateway/chat/streamed"]["prefix_hits"] == 0.25


def test_without_the_gateway_there_is_no_ratio_to_it():
    mode = Mode("agent", 64, "vllm")
    assert "over_gateway" not in figures({mode: measured(1.0)}, mode)


def test_long_turns_are_measured_by_the_fewest_clients():
    sizes = {
        workload: {mode.sessions for mode in modes_of(workload, ("gateway",), (256, 64))} for workload in WORKLOADS
    }
    assert sizes == {"agent": {64, 256}, "long": {64}}


async def test_conversations_are_those_of_the_seed_and_a_reply_is_that_of_the_code():
    drawn = conversations(SAMPLES + 3, seed=4)
    assert [prompt.id for prompt in drawn] == [prompt.id for prompt in conversations(SAMPLES + 3, seed=4)]
    assert len({prompt.id for prompt in drawn}) == 2
    assert {prompt.id for prompt in drawn}.isdisjoint(prompt.id for prompt in conversations(SAMPLES, seed=5))
    assert (await Scripted().run("print(1)")).stdout == reply("print(1)") != reply("print(2)")
