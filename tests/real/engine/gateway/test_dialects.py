"""What clients of both vendors look for in an answer, over real connections and by their own packages."""

import asyncio
import json
import random
import re
from contextlib import suppress

import aiohttp
import anthropic
import openai
import pytest
from aiohttp.abc import AbstractStreamWriter
from aiohttp.test_utils import make_mocked_request
from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI

from engine.gateway.http import openai_api, server
from engine.gateway.session import SessionRules
from engine.replica.config import prepare_environment
from engine.types import StopReason
from tests.support.fakes import a_prompt, settle
from tests.support.node import CHAT, END, call, served

QUESTION = {"role": "user", "content": "What is 6 * 7?"}
THOUGHT = "<think>\nI multiply.\n</think>\n\n"
TOOL = {"name": "python", "description": "Runs Python.", "input_schema": {"type": "object", "properties": {}}}
ROOM = 400


def of_openai(node, path="/sessions/mine"):
    return AsyncOpenAI(base_url=f"{node.address}{path}/v1", api_key="none", max_retries=0)


def of_anthropic(node, path="/sessions/mine"):
    return AsyncAnthropic(base_url=f"{node.address}{path}", api_key="none", max_retries=0)


def trajectory_of(node):
    return node.gateway.session("mine").trajectory(a_prompt(), StopReason.ANSWER)


@pytest.mark.smoke
async def test_thoughts_come_apart_and_a_client_may_send_them_back_or_not():
    turns = [[THOUGHT + f"turn {number}" + END] for number in range(5)]
    async with served(*turns) as node, of_openai(node) as one, of_anthropic(node) as other:
        answer = await one.chat.completions.create(model="tiny", messages=[QUESTION])
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ("turn 0", "I multiply.")
        messages = [QUESTION, {"role": "assistant", "content": message.content}, QUESTION]
        stream = await one.chat.completions.create(model="tiny", messages=messages, stream=True)
        text, thought = "", ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            thought += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        assert (text, thought) == ("turn 1", "I multiply.")
        messages += [{"role": "assistant", "content": f"<think>{thought}</think>{text}"}, QUESTION]
        blocks = (await other.messages.create(model="tiny", max_tokens=90, messages=messages)).content
        assert [block.type for block in blocks] == ["thinking", "text"]
        assert (blocks[0].thinking, blocks[1].text) == ("I multiply.", "turn 2")
        messages += [{"role": "assistant", "content": blocks}, QUESTION]
        async with other.messages.stream(model="tiny", max_tokens=90, messages=messages) as events:
            blocks = (await events.get_final_message()).content
        assert (blocks[0].thinking, blocks[1].text) == ("I multiply.", "turn 3")
        messages += [{"role": "assistant", "content": [blocks[1]]}, QUESTION]
        await other.messages.create(model="tiny", max_tokens=90, messages=messages)
        trajectory = trajectory_of(node)
        assert (trajectory.segments, len(trajectory.turns)) == ((), 5)
        assert trajectory.text == "".join(turn for [turn] in turns)


async def test_the_tool_runner_of_anthropic_goes_on_without_a_thread():
    ran = []

    @beta_async_tool
    async def python(code: str) -> str:
        """Runs Python."""
        ran.append(code)
        return "42"

    async with served([THOUGHT + call("6 * 7") + END], ["It is 42." + END]) as node, of_anthropic(node) as client:
        runner = client.beta.messages.tool_runner(model="tiny", max_tokens=100, messages=[QUESTION], tools=[python])
        message = await runner.until_done()
        assert (message.content[-1].text, ran) == ("It is 42.", ["6 * 7"])
        assert (len(trajectory_of(node).turns), trajectory_of(node).segments) == (2, ())
        assert node.gateway.counts.refused == 0, "that was no fault of the client"


@pytest.mark.parametrize("path", ["", "/sessions/mine"])
async def test_models_are_listed_as_both_vendors_clients_expect(path):
    async with served(also=("other/name",)) as node, of_openai(node, path) as one, of_anthropic(node, path) as other:
        assert [model.id async for model in one.models.list()] == ["tiny", "other/name"]
        assert [model.id async for model in other.models.list()] == ["tiny", "other/name"]
        page = await other.models.list()
        assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "other/name")
        found = await one.models.retrieve("other/name")
        assert (found.object, found.owned_by, found.max_model_len) == ("model", "rocstar", ROOM)
        found = await other.models.retrieve("tiny")
        assert (found.type, found.display_name, found.max_input_tokens) == ("model", "tiny", ROOM)
        assert found.created_at.year == 1970
        with pytest.raises(openai.NotFoundError) as refused:
            await one.models.retrieve("gpt-4o-mini")
        assert refused.value.code == "model_not_found"
        with pytest.raises(anthropic.NotFoundError) as refused:
            await other.models.retrieve("claude")
        assert (refused.value.type, refused.value.body["type"]) == ("not_found_error", "error")
        assert "claude" in refused.value.api_message


async def test_an_unknown_model_is_an_error_that_both_clients_know_and_none_in_training():
    async with served(["hi" + END]) as node, of_openai(node) as one, of_anthropic(node) as other:
        with pytest.raises(openai.NotFoundError) as refused:
            await one.chat.completions.create(model="gpt-4o-mini", messages=[QUESTION])
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        assert "does not exist" in refused.value.message
        with pytest.raises(anthropic.NotFoundError):
            await other.messages.create(model="claude", max_tokens=9, messages=[QUESTION])
    async with served(["hi" + END], rules=SessionRules(max_tokens=ROOM, fixed=True)) as node, of_openai(node) as one:
        node.gateway.session("mine")  # as a rollout opens it
        assert (await one.models.retrieve("gpt-4o-mini")).id == "gpt-4o-mini"
        await one.chat.completions.create(model="gpt-4o-mini", messages=[QUESTION])
        assert node.gateway.counts.renamed > 0


LONG = [{"role": "user", "content": "long " * 900}]


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_without_room_is_refused_in_the_words_of_each_vendor(stream, tools):
    tokens = len(CHAT.prompt_ids(LONG))
    async with served(tools=tools) as node, of_openai(node) as one, of_anthropic(node) as other:
        with pytest.raises(openai.BadRequestError) as refused:
            await one.chat.completions.create(model="tiny", messages=LONG, stream=stream)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        assert f"This model's maximum context length is {ROOM} tokens" in refused.value.message
        assert f"{tokens} tokens" in refused.value.message
        with pytest.raises(anthropic.BadRequestError) as refused:
            await other.messages.create(model="tiny", max_tokens=9, messages=LONG, stream=stream)
        assert refused.value.type == "invalid_request_error"
        assert refused.value.api_message == f"prompt is too long: {tokens} tokens > {ROOM} maximum"
        assert node.gateway.counts.refused == 0, "an agent that compacts its history does nothing wrong"


async def test_an_answer_has_the_id_that_each_vendors_client_reads():
    async with served(["hi" + END]) as node, of_openai(node) as one, of_anthropic(node) as other:
        answer = await one.chat.completions.create(model="tiny", messages=[QUESTION])
        assert answer._request_id.startswith("req_")
        message = await other.messages.create(model="tiny", max_tokens=9, messages=[QUESTION])
        assert message._request_id.startswith("req_")
        with pytest.raises(anthropic.BadRequestError) as refused:
            await other.messages.create(model="tiny", max_tokens=9, messages=[QUESTION], extra_body={"wat": 1})
        assert refused.value.request_id.startswith("req_")


async def test_tokens_are_counted_as_the_next_turn_will_read_them_and_nothing_is_opened():
    turns = [[THOUGHT + "one" + END], ["two" + END]]
    async with served(*turns) as node, of_anthropic(node) as client:
        counted = await client.messages.count_tokens(model="tiny", messages=[QUESTION])
        assert len(node.gateway) == 0
        first = await client.messages.create(model="tiny", max_tokens=90, messages=[QUESTION])
        assert first.usage.input_tokens + first.usage.cache_read_input_tokens == counted.input_tokens
        messages = [QUESTION, {"role": "assistant", "content": [first.content[1]]}, QUESTION]
        counted = await client.messages.count_tokens(model="tiny", messages=messages)
        second = await client.messages.create(model="tiny", max_tokens=90, messages=messages)
        assert second.usage.input_tokens + second.usage.cache_read_input_tokens == counted.input_tokens
        assert trajectory_of(node).segments == ()


async def test_requests_as_claude_code_sends_them_are_one_conversation():
    """Its billing header changes, reminders are system messages, and cache marks wander."""
    async with served([call("1") + END], ["done" + END]) as node, of_anthropic(node) as client:

        def request(number, messages):
            mark = {"cache_control": {"type": "ephemeral"}}
            header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number}"}
            return client.beta.messages.create(
                model="tiny",
                max_tokens=100,
                system=[header, {"type": "text", "text": "You write code.", **mark}],
                messages=[*messages[:-1], {**messages[-1], "content": [{**messages[-1]["content"][0], **mark}]}],
                tools=[{**TOOL, **(mark if number else {})}],
                betas=["mid-conversation-system-2026-04-07"],
                metadata={"user_id": "u"},
                thinking={"type": "adaptive"},
                context_management={"edits": []},
                cache_control={"type": "ephemeral"},
            )

        reminder = {"role": "system", "content": [{"type": "text", "text": "The date is known."}]}
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, reminder]
        first = await request(0, messages)
        result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "1"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        await request(1, messages)
        trajectory = trajectory_of(node)
        assert (len(trajectory.turns), trajectory.segments) == (2, ())
        shown = CHAT.decode(trajectory.token_ids_T.tolist())
        assert "billing" not in shown
        assert shown.startswith("<|im_start|>system\nYou write code.")
        assert "<|im_start|>system\nThe date is known." in shown


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch
def test_the_defaults_of_vllms_requests_are_taken():
    """Some clients send every field."""
    prepare_environment()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    chat = ChatCompletionRequest(messages=[QUESTION]).model_dump(mode="json")
    assert openai_api.parse_chat(json.dumps(chat).encode()).messages == [QUESTION]
    text = CompletionRequest(prompt="hi").model_dump(mode="json")
    assert openai_api.parse_completion(json.dumps(text).encode()).prompt == "hi"


CALLED = {"id": "a", "type": "function", "function": {"name": "python", "arguments": "{}"}}
REFUSED = {  # a result of a call that the turn before it does not have, and what else is found out late
    "chat/completions": {
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "b", "content": "1"},
        ]
    },
    "completions": {"prompt": [-1]},
    "messages": {
        "max_tokens": 9,
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "python", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b", "content": "1"}]},
        ],
    },
    "responses": {"input": [QUESTION], "previous_response_id": "resp_none"},
    "responses/input_tokens": {"input": [QUESTION], "previous_response_id": "resp_none"},
    "messages/count_tokens": {"messages": [{"role": "wat"}]},
}


@pytest.mark.parametrize("dialect", REFUSED)
async def test_a_refused_request_leaves_no_session_behind_and_a_good_one_goes_on(dialect):
    async with served(["hi" + END]) as node, of_openai(node) as client, aiohttp.ClientSession() as any_client:

        async def refused():
            url = f"{node.address}/sessions/mine/v1/{dialect}"
            async with any_client.post(url, json={"model": "tiny", **REFUSED[dialect]}) as response:
                assert response.status == 400, await response.text()

        await refused()
        assert (len(node.gateway), node.gateway.counts.refused) == (0, 1)
        await client.chat.completions.create(model="tiny", messages=[QUESTION])
        await refused()
        assert node.gateway.session("mine").cost["refused"] == 1
        assert node.gateway.session("mine").turns == 1


async def test_input_is_counted_as_the_next_turn_will_read_it_and_nothing_is_opened():
    turns = [[THOUGHT + "one" + END], ["two" + END]]
    async with served(*turns) as node, of_openai(node) as client:
        await client.responses.input_tokens.count(model="tiny", input=[QUESTION])
        assert len(node.gateway) == 0
        first = await client.responses.create(model="tiny", input=[QUESTION])
        more = {"model": "tiny", "input": [QUESTION], "previous_response_id": first.id}
        counted = await client.responses.input_tokens.count(**more)
        second = await client.responses.create(**more)
        assert second.usage.input_tokens == counted.input_tokens
        without = [QUESTION, {"role": "assistant", "content": "one"}, QUESTION]
        assert (await client.responses.input_tokens.count(model="tiny", input=without)).input_tokens == (
            counted.input_tokens
        ), "the model reads its thought, which this client leaves out"


async def test_a_client_that_leaves_while_its_stream_begins_is_no_error():
    class Gone(AbstractStreamWriter):
        async def write_headers(self, status_line, headers):
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

        async def write(self, chunk):
            raise AssertionError

        write_eof = drain = write

        def enable_compression(self, encoding="deflate", strategy=None):
            raise AssertionError

        def enable_chunking(self):
            pass

    async def chunks():
        try:
            yield b"first"
        finally:
            ended.append(True)

    ended = []
    await server._stream(make_mocked_request("POST", "/", writer=Gone()), chunks(), lambda problem: b"")
    assert ended == [True]


class Agent:
    """Asks three times over the dialects by turns, and may leave before an answer or in the middle of it.

    path: the session's, "" for requests that name none. answered, kept: how many answers it got, and how many of those
    the Responses API keeps.
    """

    def __init__(self, client, address, number):
        self.client = client
        self.number = number
        self.draw = random.Random(number)
        self.path = f"{address}/sessions/s{number}" if number % 8 else address
        self.messages = [{"role": "user", "content": f"question {number}"}]
        self.previous = None
        self.answered = self.kept = 0

    def request(self, turn):
        kind = ("chat/completions", "messages", "responses")[(self.number + turn) % 3]
        body = {"model": "tiny", "stream": self.draw.random() < 0.5}
        if kind != "responses":
            return kind, {**body, "max_tokens": 12, "messages": self.messages}
        if self.previous is None:
            return kind, {**body, "max_output_tokens": 12, "input": self.messages}
        more = {"input": "Go on.", "previous_response_id": self.previous}
        return kind, {**body, "max_output_tokens": 12, **more}

    async def ask(self, turn):
        kind, body = self.request(turn)
        leaves = self.draw.choice([0.0, 0.01, 0.1, 1.0]) if self.draw.random() < 0.3 else 150.0
        with suppress(TimeoutError):
            async with asyncio.timeout(leaves), self.client.post(f"{self.path}/v1/{kind}", json=body) as response:
                assert response.status == 200, await response.text()
                answer = await response.text()
                self.answered += 1
                if kind == "responses":
                    self.kept += 1
                    self.previous = re.search(r"resp_[0-9a-f]{32}", answer)[0]
                    self.messages = [*self.messages, {"role": "assistant", "content": "otherwise"}]

    async def live(self):
        for turn in range(3):
            await self.ask(turn)
            self.messages = [
                *self.messages,
                {"role": "assistant", "content": f"I said {turn}"},
                {"role": "user", "content": "Go on."},
            ]
        return self


@pytest.mark.timeout(200)
async def test_512_sessions_over_all_dialects_of_which_some_go_away_leave_nothing():

    def prepare(replica):
        replica._script, replica.usable_blocks = None, 1 << 17  # room for all lineages: the clock stands still here

    async with served(prepare=prepare, replicas=2) as node:
        before = asyncio.all_tasks()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client, asyncio.TaskGroup() as tasks:
            agents = [Agent(client, node.address, number) for number in range(512)]
            running = [tasks.create_task(agent.live()) for agent in agents]
        del running
        for _ in range(1000):
            if asyncio.all_tasks() <= before and not any(replica.in_flight for replica in node.replicas.made):
                break
            await asyncio.sleep(0.01)
        await settle()
        left = [task.get_name() for task in asyncio.all_tasks() - before]
        assert left == [], "a task outlived its request"
        assert node.fleet._turns == {}, "a request holds its place"
        assert not any(replica.in_flight for replica in node.replicas.made)
        named = [agent for agent in agents if agent.number % 8]
        sessions = [node.gateway.find(f"s{agent.number}") for agent in named]
        found = [(agent, session) for agent, session in zip(named, sessions, strict=True) if session is not None]
        assert not any(session.in_flight or session.users for _, session in found)
        assert all(agent.answered <= session.turns <= 3 for agent, session in found)
        assert all(agent.answered == 0 for agent, session in zip(named, sessions, strict=True) if session is None)
        assert len(node.gateway) == len(found), "a session that no client began"
        answered = sum(agent.answered for agent in agents)
        assert 512 < answered < 3 * 512, "nobody went away, or all did, so this shows nothing"
        for agent, session in found:
            others = agent.answered - agent.kept
            assert agent.kept <= len(session.responses) <= session.turns - others, "one that was left is kept"
        assert node.gateway.counts.refused == 0
        for agent, _ in found:
            node.gateway.close(f"s{agent.number}")
        assert node.fleet._homes == {}, "a session that has ended holds KV blocks"
