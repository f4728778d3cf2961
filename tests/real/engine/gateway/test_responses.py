"""The Responses API over real connections, by OpenAI's client: tokens are as exact as those of a chat."""

import asyncio
import json

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from engine.gateway.kept_responses import IN_SESSION
from engine.gateway.session import SessionRules
from engine.types import StopReason
from tests.support.fakes import Die, a_prompt
from tests.support.node import CHAT, END, check, served
from tests.support.node import call as a_call

CALLS = "I compute. " + a_call("1") + END
TURNS = ([CALLS], [f"It is 42.{END}"])
TOOL = {
    "type": "function",
    "name": "python",
    "description": "Runs Python.",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    "strict": False,
}
IN_CHAT = {"type": "function", "function": {name: TOOL[name] for name in ("name", "description", "parameters")}}
QUESTION = "What is 6 * 7?"


def of_openai(node, path="/sessions/mine", key="none"):
    return AsyncOpenAI(base_url=f"{node.address}{path}/v1", api_key=key, max_retries=0)


def trajectory_of(node, key="mine"):
    trajectory = node.gateway.session(key).trajectory(a_prompt(), StopReason.ANSWER)
    check(trajectory)
    return trajectory


def output(call, text="1"):
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


async def posted(node, body, path="/v1/responses"):
    """(status, text) of a request as any program may send it."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{node.address}{path}", json=body) as response,
    ):
        return response.status, await response.text()


def events_in(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.smoke
async def test_a_conversation_leaves_the_exact_trajectory():
    async with served(*TURNS) as node, of_openai(node) as client:
        options = {"model": "tiny", "tools": [TOOL], "instructions": "Be brief."}
        items = [{"role": "user", "content": QUESTION}]
        first = await client.responses.create(input=items, extra_body={"return_token_ids": True}, **options)
        said, used = first.output
        assert (said.content[0].text, used.name, json.loads(used.arguments)) == ("I compute.", "python", {"code": "1"})
        assert (first.status, first.output_text, first.error) == ("completed", "I compute.", None)
        items += [item.model_dump(exclude_unset=True) for item in first.output] + [output(used)]
        second = await client.responses.create(input=items, **options)
        assert (second.output_text, second.usage.input_tokens_details.cached_tokens > 0) == ("It is 42.", True)
        trajectory = trajectory_of(node)
        turn = trajectory.turns[0]
        assert first.token_ids == trajectory.token_ids_T[turn.start : turn.end].tolist()
        assert first.prompt_token_ids == trajectory.token_ids_T[: turn.start].tolist()
        assert first.token_logprobs == pytest.approx(trajectory.logprobs_T[turn.start : turn.end].tolist())
        assert first.usage.total_tokens == turn.end
        assert (trajectory.segments, [use.response for use in trajectory.tool_uses]) == ((), ["1"])


async def test_a_request_without_a_session_goes_on_from_another_one():
    async with served(*TURNS) as node, of_openai(node, path="") as client:
        options = {"model": "tiny", "tools": [TOOL]}
        first, other = [await client.responses.create(input=QUESTION, **options) for _ in range(2)]
        calls = [response.output[1] for response in (first, other)]
        assert calls[0].call_id != calls[1].call_id, "clients take a call whose id has come before for answered"
        second = await client.responses.create(input=[output(calls[0])], previous_response_id=first.id, **options)
        assert second.output_text == "It is 42."


async def test_the_model_reads_the_same_tokens_as_in_a_chat():
    async with served(*TURNS) as node:
        async with of_openai(node, "/sessions/chat") as client:
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
            first = await client.chat.completions.create(model="tiny", messages=messages, tools=[IN_CHAT])
            message = first.choices[0].message
            messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}]
            await client.chat.completions.create(model="tiny", messages=messages, tools=[IN_CHAT])
        async with of_openai(node, "/sessions/responses") as client:
            options = {"model": "tiny", "tools": [TOOL], "instructions": "Be brief."}
            first = await client.responses.create(input=QUESTION, **options)
            call = first.output[-1]
            await client.responses.create(input=[output(call)], previous_response_id=first.id, **options)
        ids = [trajectory_of(node, key).token_ids_T.tolist() for key in ("chat", "responses")]
        assert ids[0] == ids[1]


@pytest.mark.smoke
async def test_openais_parser_reads_the_stream():
    async with served(*TURNS) as node, of_openai(node) as client:
        async with client.responses.stream(model="tiny", input=QUESTION, tools=[TOOL]) as stream:
            events = [event async for event in stream]
            response = await stream.get_final_response()
        assert [event.sequence_number for event in events] == [*range(len(events))]
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        said, used = response.output
        assert "".join(texts) == said.content[0].text == "I compute."
        assert arguments == [used.arguments]
        last = await client.responses.create(
            model="tiny", input=[output(used)], previous_response_id=response.id, tools=[TOOL], stream=True
        )
        kinds = [event.type async for event in last]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert trajectory_of(node).segments == ()


async def test_two_requests_may_go_on_from_one_response():
    async with served([f"One.{END}"], [f"Two.{END}"]) as node, of_openai(node) as client:
        first = await client.responses.create(model="tiny", input=QUESTION)
        both = [
            client.responses.create(model="tiny", input=text, previous_response_id=first.id) for text in ("And?", "So?")
        ]
        answers = await asyncio.gather(*both)
        assert [answer.output_text for answer in answers] == ["Two.", "Two."]
        trajectory = trajectory_of(node)
        sampled = trajectory.sampled_T.sum() + sum(segment.sampled_T.sum() for segment in trajectory.segments)
        assert (len(trajectory.segments), sampled) == (1, node.gateway.counts.sampled_tokens)


async def test_instructions_are_not_carried_over():
    async with served([f"One.{END}"], [f"Two.{END}"]) as node, of_openai(node) as client:
        first = await client.responses.create(model="tiny", input=QUESTION, instructions="Be a pirate.")
        await client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
        prompts = [CHAT.decode(prompt) for prompt, _, _ in node.replicas.made[0].requests]
        assert ["pirate" in prompt for prompt in prompts] == [True, False]


async def test_a_response_that_is_not_kept_is_refused_with_openais_code():
    async with (
        served([f"One.{END}"], [f"Two.{END}"]) as node,
        of_openai(node) as client,
        of_openai(node, "/sessions/other") as elsewhere,
    ):
        unkept = await client.responses.create(model="tiny", input=QUESTION, store=False)
        kept = await client.responses.create(model="tiny", input=QUESTION)
        for asked, response_id in ((client, unkept.id), (elsewhere, kept.id), (client, "resp_1")):
            with pytest.raises(openai.BadRequestError) as refused:
                await asked.responses.create(model="tiny", input="And?", previous_response_id=response_id)
            error = refused.value
            assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id")
        node.gateway.session("mine").responses.add("resp_old", [], [])
        for number in range(IN_SESSION):
            node.gateway.session("mine").responses.add(f"resp_{number}", [], [])
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="tiny", input="And?", previous_response_id="resp_old")


async def test_without_a_session_a_response_is_kept_too():
    async with served([f"One.{END}"], [f"Two.{END}"]) as node, of_openai(node, "") as client:
        first = await client.responses.create(model="tiny", input=QUESTION)
        second = await client.responses.create(
            model="tiny",
            input=[{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "And?"}],
            previous_response_id=None,
        )
        third = await client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
        assert (second.output_text, third.output_text) == ("Two.", "Two.")
        assert len(node.gateway) == 0


async def test_a_response_that_is_cut_off_is_incomplete():
    async with served([f"It is 42, and more.{END}"]) as node, of_openai(node) as client:
        response = await client.responses.create(model="tiny", input=QUESTION, max_output_tokens=2)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.output[0].status, response.usage.output_tokens) == ("incomplete", 2)
        stream = await client.responses.create(model="tiny", input=QUESTION, max_output_tokens=2, stream=True)
        [*_, last] = [event async for event in stream]
        assert (last.type, last.response.output[0].status) == ("response.incomplete", "incomplete")


async def test_a_conversation_that_is_too_long_fails_where_clients_look_for_it():
    async with served() as node:
        body = {"model": "tiny", "input": "long " * 900}
        status, text = await posted(node, body)
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")
        status, text = await posted(node, {**body, "stream": True})
        events = events_in(text)
        assert (status, events[-1]["type"]) == (200, "response.failed")
        assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
        assert node.gateway.counts.refused == 0, "that is a budget, and no fault"


async def test_a_failure_in_the_middle_of_a_stream_is_the_last_event():
    def prepare(replica):
        replica._script = lambda token_ids, sampling: ["It is", Die()]

    async with served(prepare=prepare, replicas=3) as node:
        status, text = await posted(node, {"input": QUESTION, "stream": True})
        last = events_in(text)[-1]
        assert (status, last["type"], last["response"]["status"]) == (200, "response.failed", "failed")


CODEX = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ],
    "tools": [
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "text"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__disk", "description": "", "tools": [{"type": "function", "name": "read"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1",
    "client_metadata": {"x": "y"},
    "text": {"verbosity": "low"},
}


async def test_a_coding_agent_calls_tools_of_free_text_and_of_namespaces():
    patch = json.dumps({"name": "apply_patch", "arguments": {"input": "*** Begin Patch"}})
    read = json.dumps({"name": "mcp__disk__read", "arguments": {"path": "/"}})
    calls = "".join(f"<tool_call>{each}</tool_call>" for each in (patch, read))
    rules = SessionRules(max_tokens=1000, seed=3)
    async with served([calls + END], [f"Done.{END}"], rules=rules) as node:
        _, text = await posted(node, CODEX, "/sessions/mine/v1/responses")
        items = [event["item"] for event in events_in(text) if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in items] == ["custom_tool_call", "function_call"]
        assert (items[0]["input"], items[1]["namespace"], items[1]["name"]) == ("*** Begin Patch", "mcp__disk", "read")
        outputs = [
            {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "x"},
            {"type": "custom_tool_call_output", "call_id": items[0]["call_id"], "output": "done"},
        ]
        body = {**CODEX, "input": [*CODEX["input"], *items, *outputs]}
        _, text = await posted(node, body, "/sessions/mine/v1/responses")
        assert events_in(text)[-1]["response"]["output"][0]["content"][0]["text"] == "Done."
        trajectory = trajectory_of(node)
        assert (trajectory.segments, [use.response for use in trajectory.tool_uses]) == ((), ["done", "x"])
        assert node.gateway.left_out == {"web_search": 2}


async def test_the_whole_agent_answers_where_the_server_has_tools():
    async with served([a_call("1") + END], [f"It is 42.{END}"], tools=True) as node, of_openai(node, "") as client:
        response = await client.responses.create(model="tiny", input=QUESTION)
        assert (response.output_text, response.trace["stop"]) == ("It is 42.", "answer")
        async with client.responses.stream(model="tiny", input=QUESTION) as stream:
            final = await stream.get_final_response()
        assert (final.output_text, len(final.trace["turns"])) == ("It is 42.", 2)


async def test_the_tokens_of_an_input_are_counted():
    async with served() as node, of_openai(node) as client:
        counted = await client.responses.input_tokens.count(model="tiny", input=QUESTION)
        assert counted.input_tokens == len(CHAT.prompt_ids([{"role": "user", "content": QUESTION}]))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": "hi", "messages": []}, "messages"),
        ({"input": "hi", "n": 2}, "n"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "temperature": "hot"}, "temperature"),
        ({"input": "hi", "top_logprobs": 3}, "top_logprobs"),
        ({"input": "hi", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": "hi", "tools": [{"type": "file_search"}]}, "tools[0]"),
    ],
)
async def test_a_wrong_request_is_refused_by_its_field(body, named):
    async with served() as node:
        status, text = await posted(node, body)
        assert (status, named in json.loads(text)["error"]["message"]) == (400, True)
