"""The agent behind one request: budgets, samples, the trace, and what is no answer."""

import asyncio
import json

import pytest

from engine.gateway.requests import BadRequest, ChatRequest, SamplingOverrides
from engine.gateway.tool_loop import ToolLoop, Unavailable
from engine.replica.port import ReplicaDied
from engine.types import Boundary
from sandbox.wire import ToolResult
from tests.support.fakes import Gate, ScriptedRunner, settle
from tests.support.node import ANSWER, CHAT, END, Setup, call

QUESTION = {"role": "user", "content": "What is 6 * 7?"}


def asking(*messages, **overrides):
    return ChatRequest(messages=messages or (QUESTION,), overrides=SamplingOverrides(**overrides))


async def answers(node, request=None, **options):
    return await ToolLoop(node.rollouts, **options.pop("loop", {})).answer(request or asking(), **options)


def scripted(turns):
    """Prepares a replica to play these turns, in the order of the requests."""
    return lambda replica: setattr(replica, "_script", lambda token_ids, sampling: next(turns))


async def test_calls_are_run_here_and_only_the_last_message_comes_back():
    first = f"I use python. {call('print(6*7)')}"
    runner = ScriptedRunner(lambda code: ToolResult(outcome="ok", stdout="42"))
    async with Setup([first + END], [ANSWER], runner=runner) as node:
        [answer] = await answers(node)
    assert [code for code, _, _ in runner.calls] == ["print(6*7)"]
    assert answer.finished.message == {"role": "assistant", "content": "<answer>42</answer>"}
    assert answer.finished.reason == "stop"
    assert CHAT.decode(answer.finished.token_ids) == ANSWER
    assert len(answer.finished.logprobs) == len(answer.finished.token_ids)
    messages = [QUESTION, {"role": "assistant", "content": first}, {"role": "tool", "content": "42"}]
    assert CHAT.decode(answer.finished.prompt_ids) == CHAT._render(messages, generate=True)


async def test_the_trace_has_the_turns_and_the_calls_with_their_replies():
    first = call("print(1)") + call("print(2)")
    async with Setup([first + END], [ANSWER]) as node:
        [answer] = await answers(node)
    trace = json.loads(json.dumps(answer.trace))
    assert trace["stop"] == "answer"
    assert [turn["text"] for turn in trace["turns"]] == [first, "<answer>42</answer>"]
    calls = trace["turns"][0]["calls"]
    assert [(one["name"], one["arguments"], one["outcome"], one["reply"]) for one in calls] == [
        ("python", {"code": f"print({n})"}, "ok", f"print({n})") for n in (1, 2)
    ]
    assert trace["turns"][1]["calls"] == []


async def test_usage_counts_the_tokens_of_all_turns():
    async with Setup([call("print(1)") + END], [ANSWER]) as node:
        [answer] = await answers(node)
    assert answer.sampled_tokens == sum(turn["tokens"] for turn in answer.trace["turns"])
    assert answer.sampled_tokens > len(answer.finished.token_ids)
    whole = len(answer.finished.prompt_ids) + len(answer.finished.token_ids)
    assert answer.prompt_tokens + answer.sampled_tokens == whole


async def test_samples_are_rolled_out_at_once_and_come_in_their_order():
    gates = [Gate(), Gate()]
    turns = iter([[gates[0], f"first{END}"], [gates[1], f"second{END}"]])
    async with Setup([], prepare=scripted(turns)) as node, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(answers(node, n=2))
        await asyncio.gather(*(gate.started.wait() for gate in gates))
        gates[1].release()
        await settle()
        assert not asked.done()
        gates[0].release()
    assert [answer.finished.message["content"] for answer in asked.result()] == ["first", "second"]


async def seeds_of(*requests, n):
    """Of the turns that the replica was asked for."""
    async with Setup([ANSWER]) as node:
        loop = ToolLoop(node.rollouts)
        for request in requests:
            await loop.answer(request, n=n)
        return [sampling.seed for _, sampling, _ in node.replicas.made[0].requests]


async def test_samples_differ_and_a_seed_makes_the_same_ones_again():
    seeds = await seeds_of(asking(seed=5), asking(seed=5), asking(seed=6), n=3)
    assert len(set(seeds)) == 6
    assert seeds[:3] == seeds[3:6]


async def test_without_a_seed_no_two_requests_are_the_same():
    seeds = await seeds_of(asking(), asking(), n=2)
    assert len(set(seeds)) == 4


async def test_the_last_allowed_turn_that_calls_ends_the_answer_for_length():
    async with Setup([call("print(1)") + END], [call("print(1)") + END], max_turns=2) as node:
        [answer] = await answers(node)
    assert (answer.finished.reason, answer.trace["stop"], len(answer.trace["turns"])) == ("length", "turns", 2)
    assert answer.finished.message["content"] == call("print(1)")


async def test_the_tokens_that_a_request_allows_are_of_all_its_turns():
    async with Setup([call("print(1)") + END]) as node:
        prompt = len(CHAT.prompt_ids([QUESTION]))
        turn = len(CHAT._encode(call("print(1)") + END))
        [answer] = await answers(node, asking(max_tokens=turn + 1))
        [sampling] = [sampling for _, sampling, _ in node.replicas.made[0].requests]
    assert sampling.max_tokens == turn + 1
    assert (answer.finished.reason, answer.trace["stop"], answer.prompt_tokens) == ("length", "length", prompt)


async def test_a_request_gets_no_more_tokens_than_the_server_allows():
    async with Setup([ANSWER], max_response_tokens=20) as node:
        await answers(node, asking(max_tokens=300))
        [sampling] = [sampling for _, sampling, _ in node.replicas.made[0].requests]
    assert sampling.max_tokens == 20


async def test_the_temperature_is_the_requests_or_the_servers():
    async with Setup([ANSWER], temperature=0.5) as node:
        await answers(node, asking(temperature=0.0))
        await answers(node)
        asked = [sampling.temperature for _, sampling, _ in node.replicas.made[0].requests]
    assert asked == [0.0, 0.5]


async def test_a_stop_text_cuts_the_last_message_only():
    first = f"Question: {call('print(1)')}"
    async with Setup([first + END], [f"42. Question: next{END}"]) as node:
        [answer] = await answers(node, asking(stop=("\n\n", "Question:")))
    assert answer.finished.message["content"] == "42. "
    assert answer.finished.stop == "Question:"
    assert answer.trace["turns"][0]["text"] == first


async def test_a_sandbox_that_loses_a_call_is_no_answer():
    runner = ScriptedRunner(lambda code: ToolResult(outcome="lost", stderr="the jail is gone"))
    async with Setup([call("print(1)") + END], [ANSWER], runner=runner) as node:
        with pytest.raises(Unavailable) as failed:
            await answers(node, n=3)
    assert failed.value.boundary is Boundary.SANDBOX


async def test_one_lost_sample_ends_the_others():
    gate = Gate()
    scripts = iter([[gate, ANSWER], [call("print(1)") + END]])
    runner = ScriptedRunner(lambda code: ToolResult(outcome="lost"))
    async with Setup([], runner=runner, prepare=scripted(scripts)) as node:
        with pytest.raises(Unavailable):
            await answers(node, n=2)
        assert node.replicas.made[0].in_flight == 0
        assert len(node.replicas.made[0].aborted) == 1


async def test_without_a_replica_there_is_no_answer():
    async with Setup([ANSWER]) as node:
        node.fleet.on_none_left(ReplicaDied("the last one is gone"))
        with pytest.raises(Unavailable) as failed:
            await answers(node)
    assert failed.value.boundary is Boundary.REPLICA


async def test_a_client_that_goes_away_frees_the_replica_and_ends_the_call():
    runner = ScriptedRunner(hold=True)
    async with Setup([call("print(1)"), Gate(), END], runner=runner) as node:
        asked = asyncio.ensure_future(answers(node, n=2))
        await runner.started.wait()
        await settle()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert node.replicas.made[0].in_flight == 0
        assert runner.cancelled >= 1


async def test_a_prompt_that_leaves_no_room_is_the_clients_error():
    long = {"role": "user", "content": "word " * 500}
    async with Setup([ANSWER]) as node:
        with pytest.raises(BadRequest) as refused:
            await answers(node, asking(long))
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "\ud800"},
    ],
)
async def test_messages_that_the_loop_cannot_read_are_the_clients_error(message):
    async with Setup([ANSWER]) as node:
        with pytest.raises(BadRequest) as refused:
            await answers(node, asking(QUESTION, message))
    assert refused.value.field == "messages"


@pytest.mark.parametrize("n", [0, 5])
async def test_the_number_of_samples_is_bounded(n):
    async with Setup([ANSWER]) as node:
        with pytest.raises(BadRequest) as refused:
            await answers(node, n=n, loop={"max_samples": 4})
    assert refused.value.field == "n"


async def test_turns_are_sampled_as_the_request_asks():
    async with Setup([call("1") + END], [ANSWER]) as node:
        await answers(node, asking(top_p=0.9, temperature=0.5))
        sampled = [(sampling.top_p, sampling.temperature) for _, sampling, _ in node.replicas.made[0].requests]
    assert sampled == [(0.9, 0.5)] * 2
