"""Conversations through a server: what it is sent, what is made of its answers, and what each failure says."""

import io
import socket

import pytest
from rich.console import Console

from engine.ports import ToolReply
from recipes.conversation import converse
from recipes.rstar2.parts.sampling.endpoint import PARSES, EndpointFailed, OnEndpoint, connect, model_of
from tests.support.openai_server import KEY, Server, call, raw_call

TOOLS = [{"type": "function", "function": {"name": "python", "description": "", "parameters": {"type": "object"}}}]
ANSWER = [{"content": "It is "}, {"content": "13."}, "stop"]


class Tool:
    name = "python"

    def __init__(self):
        self.codes = []

    async def __call__(self, arguments):
        self.codes.append(arguments["code"])
        return ToolReply(outcome="ok", text=f"reply {len(self.codes)}")


async def talk(server, *, max_calls_per_turn=None, questions=("Q?",), **options):
    """The speaker, the tool and what was shown, after the questions."""
    tool, console = Tool(), Console(file=io.StringIO(), width=1000)
    async with server.running(), connect(server.url) as client:
        speaker = OnEndpoint(client=client, model="served", tools=TOOLS, temperature=0.5, **options)
        for question in questions:
            await converse(
                question,
                speaker,
                {"python": tool},
                max_turns=4,
                max_calls_per_turn=max_calls_per_turn,
                console=console,
            )
    return speaker, tool, console.file.getvalue()


async def test_an_answer_streams_and_is_remembered():
    server = Server(ANSWER, [{"content": "As before."}, "stop"])
    _, _, shown = await talk(server, questions=("First?", "Second?"))
    assert shown == "It is 13.\nAs before.\n"
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "It is 13."},
        {"role": "user", "content": "Second?"},
    ]
    for request in server.requests:
        assert request["tools"] == TOOLS
        assert (request["model"], request["temperature"], request["stream"]) == ("served", 0.5, True)
        assert "max_tokens" not in request
        assert "chat_template_kwargs" not in request


async def test_calls_are_run_here_and_their_replies_sent_under_their_ids():
    server = Server([{"content": "I compute.\n"}, *call("print(1)"), *call("print(2)", at=1), "tool_calls"], ANSWER)
    _, tool, shown = await talk(server)
    assert tool.codes == ["print(1)", "print(2)"]
    _, said, *replies = server.requests[1]["messages"]
    assert said["content"] == "I compute.", "the template writes the newline before a call"
    assert [one["function"] for one in said["tool_calls"]] == [
        {"name": "python", "arguments": '{"code": "print(1)"}'},
        {"name": "python", "arguments": '{"code": "print(2)"}'},
    ]
    assert replies == [
        {"role": "tool", "tool_call_id": "call-python-0", "content": "reply 1"},
        {"role": "tool", "tool_call_id": "call-python-1", "content": "reply 2"},
    ]
    assert 'python {"code": "print(1)"}' in shown


async def test_calls_that_are_dropped_are_not_sent_again():
    server = Server([*call("1"), *call("2", at=1), "tool_calls"], ANSWER)
    _, tool, _ = await talk(server, max_calls_per_turn=1)
    assert tool.codes == ["1"]
    _, said, reply = server.requests[1]["messages"]
    assert [one["id"] for one in said["tool_calls"]] == [reply["tool_call_id"]]


@pytest.mark.parametrize("arguments", ['{"code": "1', '{"code": "1"}}', '{"code": 1e999}', '"1"'])
async def test_arguments_that_cannot_be_decoded_are_explained_to_the_model(arguments):
    server = Server([*raw_call(arguments), "tool_calls"], ANSWER)
    _, tool, _ = await talk(server)
    assert tool.codes == []
    assert server.requests[1]["messages"][-1]["content"].startswith("FormatError: ")


async def test_the_budget_of_tokens_is_the_conversations():
    server = Server([*call("1"), "tool_calls"], [{"content": "la"}, "length"], ANSWER)
    speaker, _, shown = await talk(server, max_tokens=150, questions=("Q?",))
    assert [request["max_tokens"] for request in server.requests] == [150, 50]
    assert speaker.used == 100
    assert "out of tokens" in shown


async def test_a_budget_that_is_used_up_asks_the_server_for_nothing():
    server = Server(ANSWER)
    await talk(server, max_tokens=100, questions=("First?", "Second?"))
    assert len(server.requests) == 1


async def test_arguments_of_the_template_go_to_the_server():
    server = Server(ANSWER)
    await talk(server, template_arguments={"reason": False})
    assert server.requests[0]["chat_template_kwargs"] == {"reason": False}


async def test_a_server_that_leaves_calls_in_the_text_is_named():
    text = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    with pytest.raises(EndpointFailed, match="--tool-call-parser hermes"):
        await talk(Server([{"content": text}, "stop"]))


async def test_the_key_of_the_environment_is_given(monkeypatch):
    server = Server(ANSWER, key=KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with pytest.raises(EndpointFailed, match=r"401.*OPENAI_API_KEY") as failed:
        await talk(server)
    assert server.url in str(failed.value)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    _, _, shown = await talk(server)
    assert "It is 13." in shown


async def test_a_server_that_refuses_a_request_is_quoted_in_one_line():
    server = Server(ANSWER, failure=(400, "the context is\n4096 tokens"))
    with pytest.raises(EndpointFailed, match="the context is") as failed:
        await talk(server)
    assert "\n" not in str(failed.value)
    assert server.url in str(failed.value)


async def test_a_server_that_dies_in_the_middle_of_an_answer_is_named():
    server = Server([{"content": "It is"}, Server.DIE])
    with pytest.raises(EndpointFailed) as failed:
        await talk(server)
    assert server.url in str(failed.value)


async def test_a_server_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        async with connect(url) as client:
            with pytest.raises(EndpointFailed, match=url) as failed:
                await model_of(client, "served")
    assert PARSES in str(failed.value), "how to start one"


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_the_api_is_found_with_and_without_its_path(path):
    async with Server().running() as server, connect(server.url + path) as client:
        assert await model_of(client, "") == await model_of(client, "served") == "served"


async def test_a_model_that_the_server_does_not_have_is_named_beside_those_that_it_has():
    async with Server().running() as server, connect(server.url) as client:
        with pytest.raises(EndpointFailed, match=r"'other'.*served"):
            await model_of(client, "other")
