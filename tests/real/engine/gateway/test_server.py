"""The gateway over real connections, by the clients that people use: what they get is what the replica sampled."""

import asyncio
import io
import json
import re
from contextlib import aclosing, suppress
from types import SimpleNamespace

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import MAX_BODY, ServerConfig, serve
from engine.gateway.session import SessionRules
from engine.replica.port import ReplicaDied
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights, StopReason
from sandbox.http.connections import Connections
from sandbox.http.listener import Address, CannotListen
from tests.support.fakes import Die, Gate, ScriptedReplica, a_prompt, settle
from tests.support.node import CHAT, END, call, served

RULES = SessionRules(max_tokens=400, seed=3)
QUESTION = {"role": "user", "content": "What is 6 * 7?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
ANTHROPIC_TOOL = {
    "name": "python",
    "description": "Runs Python.",
    "input_schema": TOOL["function"]["parameters"],
}
TURNS_OF_AGENT = ([call("1") + END], [f"It is 42.{END}"])
TURNS = (["I compute. " + call("1") + END], [f"It is 42.{END}"])


def of_openai(node, key="none", path=""):
    return AsyncOpenAI(base_url=f"{node.address}{path}/v1", api_key=key, max_retries=0)


def of_anthropic(node, key="none", path=""):
    return AsyncAnthropic(base_url=f"{node.address}{path}", api_key=key, max_retries=0)


async def until(condition):
    """Connections take their time, of which no event tells."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)


@pytest.mark.smoke
async def test_a_conversation_of_openais_client_leaves_the_exact_trajectory():
    async with served(*TURNS) as node, of_openai(node, path="/sessions/mine") as client:
        messages = [QUESTION]
        first = await client.chat.completions.create(
            model="tiny", messages=messages, tools=[TOOL], logprobs=True, extra_body={"return_token_ids": True}
        )
        [choice] = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I compute.")
        [called] = choice.message.tool_calls
        assert (called.function.name, json.loads(called.function.arguments)) == ("python", {"code": "1"})
        messages += [choice.message, {"role": "tool", "tool_call_id": called.id, "content": "1"}]
        second = await client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It is 42.")
        assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens
        trajectory = node.gateway.session("mine").trajectory(a_prompt(), StopReason.ANSWER)
        start, end = trajectory.turns[0].start, trajectory.turns[0].end
        assert choice.token_ids == trajectory.token_ids_T[start:end].tolist()
        assert first.prompt_token_ids == trajectory.token_ids_T[:start].tolist()
        assert [each.logprob for each in choice.logprobs.content] == trajectory.logprobs_T[start:end].tolist()
        assert trajectory.segments == ()
        assert [use.response for use in trajectory.tool_uses] == ["1"]


async def test_a_stream_of_openais_client_has_the_same_text_calls_and_ids():
    async with served(TURNS[0]) as node, of_openai(node) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[QUESTION],
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        text, calls, ids, reasons, usage = "", [], [], [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                ids += getattr(choice, "token_ids", None) or []
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert (text, reasons) == ("I compute.", ["tool_calls"])
        assert [(each.index, each.function.name) for each in calls] == [(0, "python")]
        assert CHAT.decode(ids) == TURNS[0][0]
        assert usage.completion_tokens == len(ids)


@pytest.mark.smoke
async def test_a_conversation_of_anthropics_client_leaves_the_exact_trajectory():
    async with served(*TURNS) as node, of_anthropic(node, path="/sessions/mine") as client:
        messages = [QUESTION]
        first = await client.messages.create(model="tiny", max_tokens=100, messages=messages, tools=[ANTHROPIC_TOOL])
        text, used = first.content
        assert (first.stop_reason, text.text, used.name, used.input) == (
            "tool_use",
            "I compute.",
            "python",
            {"code": "1"},
        )
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "1", "is_error": True}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(model="tiny", max_tokens=100, messages=messages, tools=[ANTHROPIC_TOOL])
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 42.")
        assert second.usage.cache_read_input_tokens > 0
        trajectory = node.gateway.session("mine").trajectory(a_prompt(), StopReason.ANSWER)
        assert trajectory.segments == ()
        assert [(use.response, use.outcome) for use in trajectory.tool_uses] == [("1", "error")]


async def test_a_stream_of_anthropics_client_is_the_same_message():
    async with served(TURNS[0]) as node, of_anthropic(node) as client:
        arguments = {"model": "tiny", "max_tokens": 100, "messages": [QUESTION], "tools": [ANTHROPIC_TOOL]}
        async with client.messages.stream(**arguments) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
        text, used = message.content
        assert ("".join(texts), text.text, used.input) == ("I compute.", "I compute.", {"code": "1"})
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(CHAT._encode(TURNS[0][0]))
        counted = await client.messages.count_tokens(model="tiny", messages=[QUESTION], tools=[ANTHROPIC_TOOL])
        assert counted.input_tokens == len(CHAT.prompt_ids([QUESTION]))


@pytest.mark.parametrize(
    "arguments", ['{"code": }', '{"code": "half of \\ud83d"}', '{"code": NaN}', '{"code": -Infinity}']
)
async def test_a_malformed_call_goes_on_in_each_dialect_as_the_client_sends_it_back(arguments):
    bad = f'<tool_call>{{"name": "python", "arguments": {arguments}}}</tool_call>'
    async with served([bad + END], [f"Sorry.{END}"]) as node:
        async with of_openai(node, path="/sessions/one") as client:
            first = await client.chat.completions.create(model="tiny", messages=[QUESTION], tools=[TOOL])
            [called] = first.choices[0].message.tool_calls
            assert called.function.arguments == arguments
            reply = {"role": "tool", "tool_call_id": called.id, "content": "no JSON"}
            messages = [QUESTION, first.choices[0].message, reply]
            await client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
        async with of_anthropic(node, path="/sessions/two") as client:
            options = {"model": "tiny", "max_tokens": 100, "tools": [ANTHROPIC_TOOL]}
            first = await client.messages.create(messages=[QUESTION], **options)
            assert ([block.type for block in first.content], first.stop_reason) == (["text"], "end_turn")
            messages = [
                QUESTION,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": "no JSON"},
            ]
            await client.messages.create(messages=messages, **options)
        for key in ("one", "two"):
            trajectory = node.gateway.session(key).trajectory(a_prompt(), StopReason.ANSWER)
            assert trajectory.segments == (), key
            assert [use.outcome for use in trajectory.tool_uses] == ["malformed"]


async def test_several_samples_of_a_request_are_turns_of_their_own():
    async with served([f"same{END}"]) as node, of_openai(node) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[QUESTION], n=3, seed=5)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert sorted(sampling.seed for _, sampling, _ in node.replicas.made[0].requests) == [5, 6, 7]
        stream = await client.chat.completions.create(model="tiny", messages=[QUESTION], n=2, stream=True)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == {0: "same", 1: "same"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_samples_may_end_in_different_steps_of_the_engine(path, stream):
    gates = [Gate() for _ in range(3)]

    def prepare(replica):
        replica._script = lambda token_ids, sampling: ["one", gates[sampling.seed], f" sample {sampling.seed}{END}"]

    what = {"messages": [QUESTION]} if path.startswith("chat") else {"prompt": "go", "max_tokens": 50}
    async with served(prepare=prepare) as node, aiohttp.ClientSession() as client:
        replica = node.replicas.made[0]

        async def end_one_after_the_other():
            for number, gate in enumerate(gates):
                await gate.started.wait()
                gate.release()
                await until(lambda number=number: replica.in_flight == len(gates) - 1 - number)

        body = {"model": "tiny", "n": 3, "seed": 0, "stream": stream, **what}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(end_one_after_the_other())
            async with client.post(f"{node.address}/v1/{path}", json=body) as response:
                assert response.status == 200
                lines = (await response.text()).splitlines()
    texts = [""] * 3
    for line in lines if stream else [f"data: {lines[0]}"]:
        if line and line != "data: [DONE]":
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                shown = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
                texts[choice["index"]] += shown.get("content") or ""
    assert texts == [f"one sample {number}" for number in range(3)]


async def test_a_client_that_leaves_in_the_middle_of_several_samples_ends_them_all(caplog):
    gate = Gate()

    def prepare(replica):
        replica._script = lambda token_ids, sampling: ["one"] + [gate] * (sampling.seed > 5) + [END]

    async with served(prepare=prepare) as node:
        client = of_openai(node)
        stream = await client.chat.completions.create(model="tiny", messages=[QUESTION], n=3, seed=5, stream=True)
        await gate.started.wait()
        async for _ in stream:
            break
        await client.close()
        await until(lambda: not node.replicas.made[0].in_flight)
        assert node.replicas.made[0].in_flight == 0
    assert caplog.records == []


async def test_text_and_ids_are_completed():
    async with served([f"It is 42.{END}"]) as node, of_openai(node) as client:
        ids = CHAT.prompt_ids([QUESTION])
        answer = await client.completions.create(model="tiny", prompt=ids, logprobs=1, max_tokens=50)
        assert answer.choices[0].text == "It is 42."
        assert answer.usage.prompt_tokens == len(ids)
        both = await client.completions.create(model="tiny", prompt=[CHAT.decode(ids)] * 2, max_tokens=2, stream=True)
        texts = {0: "", 1: ""}
        async for chunk in both:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts[0] == texts[1] == "It is 42."[: len(texts[0])] != ""
        several = await client.completions.create(model="tiny", prompt=[ids, ids], n=3, max_tokens=2)
        assert (several.usage.prompt_tokens, len(several.choices)) == (2 * len(ids), 6)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt", {"prompt": [1_000_000_000]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": ["a", 1]}),
        ("n", {"prompt": ["a"] * 400, "n": 256}),
    ],
)
async def test_a_completion_that_nobody_could_sample_is_refused(field, body):
    async with (
        served() as node,
        aiohttp.ClientSession() as client,
        client.post(f"{node.address}/v1/completions", json=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == field


async def test_the_key_of_a_session_may_be_the_api_key():
    async with served(*TURNS) as node, of_openai(node, key="session-7") as client:
        await client.chat.completions.create(model="tiny", messages=[QUESTION])
        assert node.gateway.session("session-7").turns == 1


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b"[" * 100_000, 400, "nested"),
        (b"{}", 400, "messages"),
        (b'{"messages": []}', 400, "messages"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "wat": 1}', 400, "wat"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "n": 0}', 400, "$.n"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}', 400, "$.temperature"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "presence_penalty": 1}', 400, "presence_penalty"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "tool_choice": "required"}', 400, "tool_choice"),
        (b'{"messages": [{"role": "wizard", "content": "hi"}]}', 400, "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "messages[0].content[0]"),
        (b'{"messages": [{"role": "assistant", "tool_calls": 5}]}', 400, "messages[0].tool_calls"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "model": "other"}', 404, "other"),
        (b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"x" * MAX_BODY), 413, ""),
    ],
)
async def test_a_wrong_request_is_refused_in_the_dialects_form(body, status, named):
    async with served() as node, aiohttp.ClientSession() as client:
        headers = {"Content-Type": "application/json"}
        async with client.post(
            f"{node.address}/v1/chat/completions", data=io.BytesIO(body), headers=headers
        ) as response:
            error = (await response.json())["error"]
            assert (response.status, error.keys()) == (status, {"message", "type", "param", "code"})
            assert named in error["message"]
        async with client.post(f"{node.address}/v1/messages", data=io.BytesIO(body), headers=headers) as response:
            found = await response.json()
            assert (response.status in (status, 400), found["type"]) == (True, "error")
            assert found["error"].keys() == {"type", "message"}


async def test_fields_that_clients_send_by_habit_are_taken():
    async with served([f"hi{END}"]) as node, of_openai(node) as client:
        await client.chat.completions.create(
            model="tiny", messages=[QUESTION], user="me", metadata={"a": "b"}, store=False, presence_penalty=0
        )


async def answer_of(node, path, body, **headers):
    """(status, body, headers) of a request as any program may send it."""
    headers = {"Content-Type": "application/json", **headers}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{node.address}{path}", data=data, headers=headers) as response,
    ):
        return response.status, await response.read(), response.headers


CHATS = ("/v1/chat/completions", {"messages": [QUESTION]})
COMPLETIONS = ("/v1/completions", {"prompt": "go"})
MESSAGES = ("/v1/messages", {"messages": [QUESTION], "max_tokens": 9})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 1 << 64),
        ("seed", 1 << 63),
        ("seed", -(1 << 64)),
        ("temperature", 1e308),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("n", 1 << 64),
    ],
)
@pytest.mark.parametrize("route", [CHATS, COMPLETIONS, MESSAGES], ids=["chat", "completion", "message"])
async def test_a_number_that_no_engine_takes_is_refused_and_named(route, field, value):
    path, body = route
    if path == "/v1/messages" and field in ("seed", "n"):
        pytest.skip("no field of this dialect")
    async with served([f"hi{END}"]) as node:
        status, answer, _ = await answer_of(node, path, {**body, field: value})
        assert (status, node.replicas.made[0].requests) == (400, [])
        assert field in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("stops", [["x"] * 33, ["x" * 257]])
@pytest.mark.parametrize("route", [CHATS, COMPLETIONS, MESSAGES], ids=["chat", "completion", "message"])
async def test_stop_texts_are_bounded(route, stops):
    field = "stop_sequences" if route is MESSAGES else "stop"
    async with served([f"hi{END}"]) as node:
        status, answer, _ = await answer_of(node, route[0], {**route[1], field: stops})
        assert (status, field in json.loads(answer)["error"]["message"]) == (400, True)


@pytest.mark.parametrize("seed", [0, (1 << 63) - 1, -(1 << 63), -1])
async def test_every_seed_of_64_bits_is_one_for_each_sample(seed):
    async with served([f"hi{END}"]) as node:
        status, _, _ = await answer_of(node, CHATS[0], {**CHATS[1], "seed": seed, "n": 3})
        seeds = {sampling.seed for _, sampling, _ in node.replicas.made[0].requests}
        assert (status, len(seeds)) == (200, 3)
        assert all(0 <= each < 1 << 63 for each in seeds)


async def test_a_request_that_kills_replicas_gets_no_third_one_and_is_not_sent_again():
    def prepare(replica):
        replica._script = lambda token_ids, sampling: [Die()] if sampling.seed == 7 else [f"hi{END}"]

    async with served(prepare=prepare, replicas=3) as node:
        status, answer, headers = await answer_of(node, CHATS[0], {**CHATS[1], "seed": 7})
        assert (status, headers["x-should-retry"]) == (422, "false")
        assert "died" in json.loads(answer)["error"]["message"]
        assert (await answer_of(node, CHATS[0], CHATS[1]))[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_conversation_that_is_too_long_is_refused_in_the_words_that_clients_look_for(path):
    async with served() as node:
        long = [{"role": "user", "content": "long " * 900}]
        status, answer, _ = await answer_of(node, path, {"messages": long, "max_tokens": 9})
        error = json.loads(answer)["error"]
        assert status == 400
        if path == "/v1/messages":
            assert re.fullmatch(r"prompt is too long: \d+ tokens > 400 maximum", error["message"])
        else:
            assert error["code"] == "context_length_exceeded"
            assert re.search(r"maximum context length is 400 tokens.*resulted in \d+ tokens", error["message"])


async def test_anthropics_stream_says_at_its_start_how_long_the_prompt_is():
    async with served([f"hi{END}"]) as node:
        body = {**MESSAGES[1], "stream": True}
        _, answer, _ = await answer_of(node, MESSAGES[0], body)
        events = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: ")]
        usage = events[0]["message"]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(CHAT.prompt_ids([QUESTION]))


async def test_system_messages_are_taken_where_they_stand_and_bills_are_left_out():
    bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=57f;"}
    rule = {"type": "text", "text": "Be brief."}
    async with served([f"hi{END}"], [f"ho{END}"]) as node:
        middle = {"role": "system", "content": [bill, {"type": "text", "text": "Use metric units."}]}
        body = {"system": [bill, rule], "messages": [QUESTION, middle, QUESTION], "max_tokens": 9}
        assert (await answer_of(node, MESSAGES[0], body))[0] == 200
        read = CHAT.decode(node.replicas.made[0].requests[0][0])
        assert "billing" not in read
        assert 0 <= read.index("Be brief.") < read.index("6 * 7") < read.index("metric") < read.rindex("6 * 7")
        only_bill = {**MESSAGES[1], "system": [bill]}
        assert (await answer_of(node, MESSAGES[0], only_bill))[0] == 200
        assert CHAT.decode(node.replicas.made[0].requests[1][0]) == CHAT.decode(CHAT.prompt_ids([QUESTION]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ignore_eos", False),
        ("min_tokens", 0),
        ("skip_special_tokens", True),
        ("use_beam_search", False),
        ("priority", 0),
        ("request_id", "mine"),
        ("cache_salt", "mine"),
        ("prompt_cache_retention", "24h"),
        ("functions", []),
        ("never_heard_of", {}),
        ("never_heard_of", None),
    ],
)
async def test_a_field_that_changes_nothing_is_taken(field, value):
    async with served([f"hi{END}"]) as node:
        assert (await answer_of(node, CHATS[0], {**CHATS[1], field: value}))[0] == 200
        assert (await answer_of(node, CHATS[0], {**CHATS[1], field: [1]}))[0] in (200, 400)
        assert (await answer_of(node, CHATS[0], {**CHATS[1], "never_heard_of": 1}))[0] == 400


async def test_the_bytes_of_tokens_are_those_of_the_text():
    async with served([f"a \N{GRINNING FACE}\N{ROMAN NUMERAL ONE}{END}"]) as node:
        _, answer, _ = await answer_of(node, CHATS[0], {**CHATS[1], "logprobs": True})
        tokens = json.loads(answer)["choices"][0]["logprobs"]["content"]
        assert len(tokens) > 5
        text = b"".join(bytes(token["bytes"]) for token in tokens)
        assert text.decode() == f"a \N{GRINNING FACE}\N{ROMAN NUMERAL ONE}{END}"


async def test_each_answer_has_the_id_of_its_request_and_a_busy_server_says_when_to_ask_again():
    async with served([f"hi{END}"]) as node:
        for body in (CHATS[1], {**CHATS[1], "stream": True}, {"messages": 1}):
            assert (await answer_of(node, CHATS[0], body, **{"x-request-id": "mine"}))[2]["x-request-id"] == "mine"
            assert (await answer_of(node, CHATS[0], body))[2]["x-request-id"].startswith("req_")
        node.fleet.on_none_left(ReplicaDied("all gone"))
        status, _, headers = await answer_of(node, CHATS[0], CHATS[1])
        assert (status, int(headers["Retry-After"]) > 0) == (503, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": "localhost:1"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_what_a_web_page_can_send_is_refused_where_there_is_no_token(headers, status):
    async with served([f"hi{END}"]) as node:
        assert (await answer_of(node, CHATS[0], CHATS[1], **headers))[0] == status
        assert len(node.replicas.made[0].requests) == (status == 200)
    async with served([f"hi{END}"], token="secret") as node:
        with_token = {**headers, "Authorization": "Bearer secret"}
        assert (await answer_of(node, CHATS[0], CHATS[1], **with_token))[0] == 200


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (b'{"messages": [{"role": "user", "content": "\xff"}], "max_tokens": 9}', {}),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}], "max_tokens": 9}', {}),
        (b"no gzip at all", {"Content-Encoding": "gzip"}),
        (b"nor deflate", {"Content-Encoding": "deflate"}),
        (b"[]", {}),
        (b'"text"', {}),
        (b"null", {}),
        (b"", {}),
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"]
)
async def test_a_body_that_cannot_be_read_is_the_clients_error(path, data, headers, caplog):
    async with served() as node:
        status, answer, _ = await answer_of(node, path, data, **headers)
        assert (status, "message" in json.loads(answer)["error"]) == (400, True)
    assert [record for record in caplog.records if record.exc_info] == []


async def closed(reader):
    """What comes until the server closes the connection."""
    async with asyncio.timeout(20):
        with suppress(ConnectionResetError):
            return await reader.read()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/messages HTTP/1.1\r\nHost: localh",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["nothing", "half of the headers", "half of a body", "one request"],
)
async def test_a_client_that_does_not_go_on_is_closed(sent):
    async with served(connections=Connections(most=100, patience_s=0.2)) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(node.address.rpartition(":")[2]))
        writer.write(sent)
        await closed(reader)
        writer.close()


async def test_silent_strangers_keep_no_client_out_and_a_slow_turn_is_not_silence():
    gate = Gate()
    connections = Connections(most=8, patience_s=0.3)
    async with served(["one", gate, f" two{END}"], [f"hi{END}"], connections=connections) as node:
        port = int(node.address.rpartition(":")[2])
        slow = asyncio.ensure_future(answer_of(node, CHATS[0], CHATS[1]))
        await gate.started.wait()
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for _, writer in strangers:
            writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: local")
        history = [QUESTION, {"role": "assistant", "content": "x"}, QUESTION]
        assert (await answer_of(node, CHATS[0], {"messages": history}))[0] == 200
        await asyncio.gather(*(closed(reader) for reader, _ in strangers))
        gate.release()
        assert (await slow)[0] == 200
        for _, writer in strangers:
            writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_whole_agents_answer_has_usage_and_trace_in_each_form(stream):
    async with served(*TURNS_OF_AGENT, tools=True) as node, of_anthropic(node) as client:
        arguments = {"model": "tiny", "max_tokens": 100, "messages": [QUESTION]}
        if not stream:
            found = (await client.messages.create(**arguments)).model_dump()
            usage, trace, text = found["usage"], found["trace"], found["content"][0]["text"]
        else:
            _, answer, _ = await answer_of(node, MESSAGES[0], {**arguments, "stream": True})
            events = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: ")]
            [end] = [event for event in events if event["type"] == "message_delta"]
            usage, trace = end["usage"], end["trace"]
            text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        assert text == "It is 42."
        assert [turn["tokens"] for turn in trace["turns"]] == [len(CHAT._encode(each[0])) for each in TURNS_OF_AGENT]
        assert usage["output_tokens"] == sum(turn["tokens"] for turn in trace["turns"])


async def test_another_name_of_the_model_is_known_where_it_was_given():
    async with served([f"hi{END}"], also=("other",)) as node:
        assert (await answer_of(node, CHATS[0], {**CHATS[1], "model": "other"}))[0] == 200
        assert (await answer_of(node, CHATS[0], {**CHATS[1], "model": "third"}))[0] == 404


async def test_a_token_keeps_others_out_and_a_bind_beyond_loopback_needs_one():
    async with served([f"hi{END}"], token="secret") as node:
        async with of_openai(node, key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with of_anthropic(node, key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="tiny", max_tokens=5, messages=[QUESTION])
        async with of_openai(node, key="secret") as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
    with pytest.raises(ValueError, match="token"):
        Address(host="0.0.0.0")


async def test_a_session_that_is_not_open_is_named_where_clients_may_not_begin_one():
    async with served(rules=None) as node, of_openai(node, path="/sessions/nobody") as client:
        with pytest.raises(openai.NotFoundError, match="nobody"):
            await client.chat.completions.create(model="tiny", messages=[QUESTION])


async def test_a_client_that_vanishes_ends_its_request():
    gate = Gate()
    async with served(["one", gate, f" two{END}"]) as node:
        client = of_openai(node)
        stream = await client.chat.completions.create(model="tiny", messages=[QUESTION], stream=True)
        async for _ in stream:
            break
        await client.close()
        replica = node.replicas.made[0]
        await until(lambda: not replica.in_flight)
        assert replica.in_flight == 0
        assert node.gateway.counts.wasted_tokens == 2, "'one' is two tokens"


async def test_replicas_that_die_in_the_middle_of_a_stream_are_an_error_event():
    gate = Gate()
    async with served(["one", gate, f" two{END}"]) as node, of_openai(node) as client:
        stream = await client.chat.completions.create(model="tiny", messages=[QUESTION], stream=True)
        await gate.started.wait()
        node.fleet.on_none_left(ReplicaDied("all of them are gone"))
        node.replicas.made[0].die()
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError) as failure:
            await client.chat.completions.create(model="tiny", messages=[QUESTION])
        assert failure.value.status_code == 503


async def test_health_and_metrics_tell_of_replicas_and_sessions():
    async with served([f"hi{END}"]) as node, of_openai(node, path="/sessions/a") as client:
        await client.chat.completions.create(model="tiny", messages=[QUESTION])
        async with aiohttp.ClientSession() as other:
            async with other.get(f"{node.address}/health") as response:
                assert (response.status, await response.json()) == (
                    200,
                    {"replicas": [0], "weight_version": 0, "sessions": 1},
                )
            async with other.get(f"{node.address}/metrics") as response:
                page = await response.text()
                assert "rocstar_gateway_requests_total 1.0" in page
                assert "rocstar_gateway_sessions 1.0" in page
            async with other.get(f"{node.address}/nothing") as response:
                assert response.status == 404


async def test_a_port_in_use_is_named():
    async with served() as node:
        port = int(node.address.rpartition(":")[2])
        with pytest.raises(CannotListen, match=str(port)):
            async with serve(node.gateway, ServerConfig(model="tiny", address=Address(port=port))):
                pass


async def test_a_thousand_connections_are_answered_and_leave_nothing():
    async with served([f"hi{END}"]) as node:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:

            async def ask():
                body = {"model": "tiny", "messages": [QUESTION]}
                async with client.post(f"{node.address}/v1/chat/completions", json=body) as response:
                    return response.status

            assert await asyncio.gather(*(ask() for _ in range(1000))) == [200] * 1000
        await settle()
        assert node.replicas.made[0].in_flight == 0
        assert len(node.gateway) == 0


class Recorded(ScriptedReplica):
    """Remembers each request: what it was asked, and what it sampled under which version."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sampled = {}

    async def generate(self, token_ids, sampling, request_id):
        prompt, tokens, logprobs, spans = tuple(token_ids), [], [], ()
        try:
            async with aclosing(super().generate(token_ids, sampling, request_id)) as deltas:
                async for delta in deltas:
                    tokens += delta.token_ids
                    logprobs += delta.logprobs
                    spans = delta.spans or spans
                    yield delta
        finally:
            versions = [version for version, begin, end in spans for _ in range(begin, end)]
            self.sampled.setdefault((prompt, tuple(tokens)), []).append((logprobs, versions))


async def openai_agent(node, key, stream):
    """Three turns of an agent that rewrites its question before the last one."""
    messages = [{"role": "user", "content": f"question of {key}"}]
    async with of_openai(node, path=f"/sessions/{key}") as client:
        for turn in range(3):
            answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=9, stream=stream)
            if stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])
            else:
                text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn}"}]
            if turn == 1:
                messages[0] = {"role": "user", "content": "edited"}


async def anthropic_agent(node, key, stream):
    messages = [{"role": "user", "content": f"question of {key}"}]
    async with of_anthropic(node, path=f"/sessions/{key}") as client:
        for turn in range(3):
            arguments = {"model": "tiny", "max_tokens": 9, "messages": messages, "tools": [ANTHROPIC_TOOL]}
            if stream:
                async with client.messages.stream(**arguments) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**arguments)
            content = [block.model_dump() for block in message.content] or ""
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"go on {turn}"}]


@pytest.mark.timeout(200)
async def test_256_sessions_at_once_leave_what_was_sampled_also_over_a_weight_update():
    made = []

    def make(index, core, on_step):
        made.append(Recorded(index, on_step, chat=CHAT))
        return made[-1]

    timeline = Timeline()
    async with Fleet(FleetConfig(replicas=2), make, KvAware(max_tokens=400), timeline) as fleet:
        gateway = Gateway(fleet, CHAT, timeline, GatewayConfig(rules=RULES))
        async with serve(gateway, ServerConfig(model="tiny")) as address:
            node = SimpleNamespace(address=address)
            keys = [f"k{number}" for number in range(256)]
            async with asyncio.TaskGroup() as tasks:
                for number, key in enumerate(keys):
                    agent = (openai_agent, anthropic_agent)[number % 2]
                    tasks.create_task(agent(node, key, stream=number % 4 < 2))
                await until(lambda: gateway.counts.sampled_tokens > 600)
                await fleet.update_weights(PublishedWeights("/w/1", 1, np.zeros(0, np.float32)))
            assert gateway.counts.requests == 3 * 256
            trajectories = [gateway.session(key).trajectory(a_prompt(), StopReason.ANSWER) for key in keys]
    sampled = {}
    for replica in made:
        for key, found in replica.sampled.items():
            sampled.setdefault(key, []).extend(found)
    seen = set()
    for number, trajectory in enumerate(trajectories):
        assert len(trajectory.parts) == (1 if number % 2 else 2)
        assert len(trajectory.all_turns) == 3
        for part in trajectory.parts:
            for turn in part.turns:
                ids = part.token_ids_T.tolist()
                [*_, (logprobs, versions)] = [
                    each
                    for each in sampled[tuple(ids[: turn.start]), tuple(ids[turn.start : turn.end])]
                    if each[1] == part.versions_T[turn.start : turn.end].tolist()
                ]
                np.testing.assert_allclose(part.logprobs_T[turn.start : turn.end], logprobs, rtol=1e-6)
                seen.update(versions)
    assert seen == {0, 1}
