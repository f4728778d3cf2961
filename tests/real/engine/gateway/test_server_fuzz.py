"""Whatever a client sends, in any dialect, is answered in its form: no 500, and no traceback in the log.

Clients send several requests at once and leave some of them; nothing of those is kept, nor a session without a turn.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import logging
import random
import re
from contextlib import suppress

import aiohttp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.gateway.session import SessionRules
from tests.support.examples import examples
from tests.support.fakes import Gate, settle
from tests.support.node import END, call, served

RULES = SessionRules(max_tokens=300, seed=3)
ANSWERS = {200, 400, 403, 404, 405, 413, 415}
AT_ONCE = 3
REQUESTS = 25  # in an example: the server and its sessions outlive them

TEXT = st.text(max_size=12) | st.sampled_from(["", "hi", "<think>", "</tool_call>", "<|im_end|>", "x" * 300, "\u2028"])
NUMBERS = st.sampled_from([0, 1, -1, 2, 0.5, 1e308, 5e-324, 1 << 31, 1 << 63, 1 << 64, -(1 << 64), 10**40])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)


def near(*valid: object) -> st.SearchStrategy[object]:
    """Mostly one of these."""
    return st.one_of(*[st.just(each) for each in valid] * 2, ANYTHING)


def objects(**fields: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.fixed_dictionaries({}, optional=fields) | ANYTHING


IDS = near("call_last", "resp_last", "item_last", "call_1", "", None)  # the last ones that the client was given
ARGUMENTS = near("{}", '{"code": "1"}', '{"code": }', '{"a": "\\ud800"}', "[" * 5000, {"code": "1"}, "")
CALL = objects(id=IDS, type=near("function"), function=objects(name=near("python", ""), arguments=ARGUMENTS))
PART = objects(
    type=near("text", "tool_use", "tool_result", "thinking", "image_url"),
    text=TEXT,
    id=IDS,
    tool_use_id=IDS,
    name=near("python"),
    input=near({}, {"code": "1"}),
    content=TEXT | ANYTHING,
    is_error=near(True),
)
CONTENT = TEXT | st.lists(PART, max_size=3) | ANYTHING
MESSAGE = objects(
    role=near("user", "assistant", "tool", "system", "developer"),
    content=CONTENT,
    tool_calls=st.lists(CALL, max_size=3) | ANYTHING,
    tool_call_id=IDS,
    is_error=near(False),
    name=ANYTHING,
)
TOOL = objects(
    type=near("function", "custom"),
    function=objects(name=near("python"), description=TEXT, parameters=ANYTHING),
    name=near("python"),
    input_schema=ANYTHING,
)
ITEM = objects(
    type=near("message", "function_call", "function_call_output", "custom_tool_call", "reasoning", "item_reference"),
    role=near("user", "assistant", "developer"),
    content=CONTENT,
    call_id=IDS,
    name=near("python"),
    arguments=ARGUMENTS,
    input=TEXT,
    output=CONTENT,
    id=IDS,
)
NAMED = {"type": "function", "function": {"name": "python"}}
SCHEMA = objects(
    **{"type": near("object", "array"), "items": ANYTHING, "properties": ANYTHING, "minItems": NUMBERS, "not": ANYTHING}
)
FIELDS = {
    "input": st.lists(ITEM, max_size=4) | CONTENT,
    "instructions": CONTENT,
    "previous_response_id": IDS,
    "include": near(["reasoning.encrypted_content"]),
    "text": near({"format": {"type": "text"}}, {"format": {"type": "json_schema", "schema": {}}}),
    "store": near(True, False),
    "messages": st.lists(MESSAGE, max_size=4) | ANYTHING,
    "prompt": CONTENT | st.lists(near(1, 5, -1, 10**9), max_size=4),
    "system": CONTENT,
    "tools": st.lists(TOOL, max_size=2) | ANYTHING,
    "tool_choice": near("auto", "none", "required", {"type": "auto"}, {"type": "any"}, NAMED),
    "model": near("tiny"),
    "stream": near(True, False),
    "stream_options": near({"include_usage": True}),
    "stop": near("x", ["x", ""], [""]),
    "stop_sequences": near(["x"]),
    "logprobs": near(True, 1),
    "return_token_ids": near(True),
    "response_format": near({"type": "text"}, {"type": "json_object"})
    | objects(type=near("json_schema"), json_schema=objects(schema=SCHEMA, strict=near(True))),
    "output_config": objects(format=objects(type=near("json_schema"), schema=SCHEMA)),
    **dict.fromkeys(("n", "seed", "temperature", "top_p", "top_k", "max_tokens"), NUMBERS),
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), NUMBERS),
    **dict.fromkeys(("metadata", "ignore_eos", "thinking", "presence_penalty", "thread"), ANYTHING),
}
PIECES = [
    "<think>\nhm",
    "</think>\n\n",
    "I say ",
    "\u00e9\u4e2d",
    call("1"),
    call("2", "patch"),
    "<tool_call>",
    '{"name": "python"',
]
PIECES += ['<tool_call>{"name": "python", "arguments": {"code": }}</tool_call>']
QUESTION = [{"role": "user", "content": "hi"}]
SCHEMA_OF_CODE = {"type": "object", "properties": {"code": {"type": "string"}}}
FUNCTION = {"name": "python", "description": "Runs Python.", "parameters": SCHEMA_OF_CODE}
CALLED = {"id": "call_last", "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}
USE = {"type": "tool_use", "id": "call_last", "name": "python", "input": {"code": "1"}}
OUTPUT = {"type": "function_call_output", "call_id": "call_last", "output": "1"}
OFFERED = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "patch"}]
CALLS = {"type": "function_call", "call_id": "call_last", "name": "python", "arguments": '{"code": "1"}'}
VALID = {  # what a client would send: a question, the result of a call, and what else there is
    "/v1/chat/completions": [
        {"messages": QUESTION, "max_tokens": 40, "tools": [{"type": "function", "function": FUNCTION}]},
        {"messages": QUESTION, "max_tokens": 4, "n": 2, "logprobs": True, "stop": ["x"]},
        {
            "messages": [
                *QUESTION,
                {"role": "assistant", "content": "I say", "tool_calls": [CALLED], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "call_last", "content": "1", "is_error": True},
            ],
            "max_completion_tokens": 40,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ],
    "/v1/completions": [{"prompt": "hi", "max_tokens": 4}, {"prompt": [[1, 5], [7]], "max_tokens": 9, "stream": True}],
    "/v1/messages": [
        {"messages": QUESTION, "max_tokens": 40, "tools": [{"name": "python", "input_schema": SCHEMA_OF_CODE}]},
        {
            "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                *QUESTION,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_last", "content": "1"}]},
            ],
            "max_tokens": 40,
            "stream": True,
        },
    ],
    "/v1/responses": [
        {"input": QUESTION, "max_output_tokens": 40, "tools": OFFERED, "stream": True},
        {"input": "hi", "instructions": "You help.", "max_output_tokens": 40},
        {"input": "go on", "previous_response_id": "resp_last", "max_output_tokens": 40, "tools": OFFERED},
        {"input": [OUTPUT], "previous_response_id": "resp_last", "tools": OFFERED, "stream": True},
        {"input": [*QUESTION, {"type": "reasoning", "summary": []}, CALLS, OUTPUT], "store": False},
        {"input": [{"type": "item_reference", "id": "item_last"}, *QUESTION], "max_output_tokens": 4},
    ],
}
VALID["/v1/responses/input_tokens"] = VALID["/v1/responses"]
VALID["/v1/messages/count_tokens"] = VALID["/v1/messages"]
OTHERS = [
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/a%2Fb",
    "/health",
    "/metrics",
    "/nothing",
    "/v1/%ff%ed%a0%80",
    "",
]
PATHS = st.sampled_from([*VALID] * 3 + OTHERS)
SESSIONS = ["", "/sessions/a", "/sessions/b", "/sessions/%00"]
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "Authorization",
            "x-api-key",
            "x-request-id",
            "Content-Type",
            "Content-Encoding",
            "Accept",
            "anthropic-version",
        ]
    ),
    st.sampled_from(
        ["Bearer session-1", "session-2", "gzip", "deflate", "br", "zstd", "identity", "text/plain", "\xff", "x" * 5000]
        + ["application/json; charset=utf-7"] * 2
    ),
    max_size=2,
)


def one_in(draw, number):
    return draw(st.sampled_from([False] * (number - 1) + [True]))  # integers would be small ones too often


def change(draw, body):
    """Replaces, removes or doubles one value somewhere in a body."""
    at = body
    while isinstance(at, dict | list) and at:
        key = draw(st.sampled_from([*at] if isinstance(at, dict) else range(len(at))))
        if isinstance(at[key], dict | list) and at[key] and not one_in(draw, 4):
            at = at[key]
            continue
        match draw(st.integers(0, 3)):
            case 0:
                del at[key]
            case 1 if isinstance(at, list):
                at.append(at[key])
            case _:
                at[key] = copy.deepcopy(draw(IDS | ANYTHING))
        return


@st.composite
def requests(draw):
    """(method, path, headers, body, whether the client leaves)."""
    path = draw(PATHS)
    body = copy.deepcopy(draw(st.sampled_from(VALID.get(path, [{}]))))
    for name in draw(st.lists(st.sampled_from([*FIELDS]), max_size=draw(st.sampled_from([0, 0, 1, 4])))):
        body[name] = copy.deepcopy(draw(FIELDS[name]))  # the drawn one is shared
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        change(draw, body)
    whole = draw(ANYTHING) if one_in(draw, 20) else body
    data = json.dumps(whole).encode()
    if one_in(draw, 16):
        data = draw(st.binary(max_size=20)) + data[: draw(st.integers(0, len(data)))]
    if one_in(draw, 16):
        data = gzip.compress(data)
    headers = {"Content-Type": "application/json", **(draw(HEADERS) if one_in(draw, 4) else {})}
    if path in OTHERS:
        method = draw(st.sampled_from(["GET"] * 8 + ["POST", "DELETE"]))
    else:
        method = draw(st.sampled_from(["POST"] * 8 + ["GET", "PUT"]))
    return method, draw(st.sampled_from(SESSIONS)) + path, headers, data, one_in(draw, 6)


GIVEN = {b"resp_last": rb"resp_[0-9a-f]{32}", b"item_last": rb"(?:fc|msg)_[0-9a-f]{35}", b"call_last": rb"call_\w{9,}"}


async def ask(client, address, given, method, path, headers, data):
    for name, last in given.items():
        data = data.replace(name, last)
    async with client.request(method, f"{address}{path}", data=data, headers=headers) as response:
        answer = await response.read()
        assert response.status in ANSWERS, (method, path, headers, data, answer)
        streamed = response.content_type == "text/event-stream"
    given.update((name, found[-1]) for name, form in GIVEN.items() if (found := re.findall(form, answer)))
    if streamed or response.status != 200:
        assert b"an error of the gateway" not in answer, (path, data)
    if response.status >= 400:
        if response.content_type == "text/plain":  # by aiohttp, which knows no such encoding
            assert (response.status, "Content-Encoding" in headers) == (400, True), (headers, answer)
            return
        error = json.loads(answer)
        assert error["error"]["message"], (path, answer)
        of_models = method == "GET" and "/v1/models" in path
        wanted = "anthropic-version" in headers if of_models else "/v1/messages" in path and method == "POST"
        assert ("type" in error) == (wanted and response.status != 405), (path, answer)


def said(token_ids, sampling):
    """Says anything, in pieces: a turn that thinks, calls, calls badly, or never ends."""
    drawn = random.Random(repr((token_ids, sampling.seed)))
    for _ in range(drawn.randrange(6)):
        gate = Gate()
        gate.release()
        yield gate
        yield drawn.choice(PIECES)
    yield END if drawn.random() < 0.9 else "more " * 90 + END


async def leave(client, address, given, method, path, headers, data):
    """Sends a request and goes away soon: before its answer, or in the middle of it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(len(data) % 7 / 1000):
            await ask(client, address, given, method, path, headers, data)


async def send(sent, tools):
    async with (
        served(rules=RULES, tools=tools, prepare=lambda replica: setattr(replica, "_script", said)) as node,
        aiohttp.ClientSession() as client,
    ):
        given = {}
        for at in range(0, len(sent), AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for *request, leaves in sent[at : at + AT_ONCE]:
                    tasks.create_task((leave if leaves else ask)(client, node.address, given, *request))
        await nothing_runs(node)
        sessions = node.gateway._sessions.values()
        assert all(session.lineages.all for session in sessions), "a session that no turn was finished in"
        assert all(len(session.responses) <= session.turns for session in sessions)


async def nothing_runs(node):
    """Waits until no request is under way. What a client has left ends when its connection's end is heard."""
    for _ in range(10_000):
        if not node.fleet._turns and not any(replica.in_flight for replica in node.replicas.made):
            break
        await asyncio.sleep(0.001)
    await settle()
    assert not any(session.in_flight or session.users for session in node.gateway._sessions.values())


@pytest.mark.parametrize("tools", [False, True])
@settings(examples(10, search=100), phases=[Phase.explicit, Phase.reuse, Phase.generate])  # none shrinks: a server each
@given(sent=st.lists(requests(), min_size=REQUESTS, max_size=REQUESTS))
def test_no_request_is_answered_with_an_error_of_ours(tools, sent):
    errors = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record) if record.exc_info else None
    logging.getLogger().addHandler(handler)
    try:
        asyncio.run(send(sent, tools))
    finally:
        logging.getLogger().removeHandler(handler)
    assert errors == []
