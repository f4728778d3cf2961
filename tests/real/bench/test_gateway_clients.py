"""The clients of the gateway's bench, which must ask every server for the same and count what it has sampled."""

import pytest

from bench.benches.gateway.clients import talk
from bench.benches.gateway.script import FUNCTION, MAX_TURNS, reply
from tests.support.openai_server import USAGE, Server, call

ANSWER = [{"content": "It is 13."}, "stop"]
CALLS = [{"content": "I compute."}, *call("print(1)"), "tool_calls"]


async def talked(server, **options):
    given = {"api": "chat", "sessions": 1, "count": 1, "max_tokens": 1000, "tools": True, "stream": False, "seed": 1}
    async with server.running():
        return await talk(server.url, "served", **{**given, **options})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_with_its_calls_and_replies(stream):
    server = Server(CALLS, ANSWER)
    counted = await talked(server, stream=stream)
    assert (counted.turns, counted.sampled_tokens) == (2, 2 * USAGE["completion_tokens"])
    question, said, replied = server.requests[1]["messages"]
    assert [question] == server.requests[0]["messages"]
    assert said["content"] == "I compute."
    assert replied["tool_call_id"] == said["tool_calls"][0]["id"]
    assert replied["content"] == reply(said["tool_calls"][0]["function"]["arguments"])
    assert [request["tools"] for request in server.requests] == [[{"type": "function", "function": FUNCTION}]] * 2


async def test_its_turns_and_tokens_are_bounded():
    server = Server(*[CALLS] * (MAX_TURNS + 1))
    assert (await talked(server)).turns == MAX_TURNS
    server = Server(CALLS, ANSWER)
    assert (await talked(server, max_tokens=100)).turns == 1, "the first answer says that they are used up"


async def test_a_model_that_is_shown_no_tool_is_asked_without_any():
    server = Server(ANSWER)
    await talked(server, tools=False)
    assert "tools" not in server.requests[0]


async def test_a_server_that_refuses_ends_the_bench_and_is_quoted():
    with pytest.raises(ExceptionGroup) as failed:
        await talked(Server(failure=(400, "no room")))
    assert "no room" in str(failed.value.exceptions[0])
