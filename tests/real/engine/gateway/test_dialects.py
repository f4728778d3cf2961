"""What clients of both vendors look for in an answer, over real connections and by their own packages."""

import asyncio
import json
from contextlib import suppress

import aiohttp
import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI

from engine.gateway.http import openai_api
from engine.gateway.session import SessionRules
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
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    chat = ChatCompletionRequest(messages=[QUESTION]).model_dump(mode="json")
    assert openai_api.parse_chat(json.dumps(chat).encode()).messages == [QUESTION]
    text = CompletionRequest(prompt="hi").model_dump(mode="json")
    assert openai_api.parse_completion(json.dumps(text).encode()).prompt == "hi"


@pytest.mark.timeout(200)
async def test_512_sessions_at_once_of_which_some_go_away_leave_nothing():

    def prepare(replica):
        replica._script, replica.usable_blocks = None, 1 << 17  # room for all lineages: the clock stands still here

    async with served(prepare=prepare, replicas=2) as node:
        connector = aiohttp.TCPConnector(limit=0)

        async def agent(client, number):
            messages, answered = [{"role": "user", "content": f"question {number}"}], 0
            dialect = ("chat/completions", "messages")[number % 2]
            url = f"{node.address}/sessions/s{number}/v1/{dialect}"
            for turn in range(3):
                body = {"model": "tiny", "max_tokens": 12, "messages": messages, "stream": (number + turn) % 3 == 0}
                leaves = (number + turn) % 5 == 0
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02 if leaves else 150), client.post(url, json=body) as response:
                        assert response.status == 200, await response.text()
                        await response.read()
                        answered += 1
                messages += [{"role": "assistant", "content": f"I said {turn}"}, {"role": "user", "content": "Go on."}]
            return answered

        async with aiohttp.ClientSession(connector=connector) as client, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(agent(client, number)) for number in range(512)]
        for _ in range(500):
            if not any(replica.in_flight for replica in node.replicas.made):
                break
            await asyncio.sleep(0.01)
        await settle()
        answered = sum(task.result() for task in running)
        sessions = [node.gateway.find(f"s{number}") for number in range(512)]
        turns = sum(session.turns for session in sessions if session is not None)
        assert answered <= turns <= 3 * 512
        assert turns < 3 * 512, "nobody went away, so this shows nothing"
        assert not any(session.in_flight for session in sessions if session is not None)
        assert node.gateway.counts.refused == 0
