"""Whatever a client sends, in any dialect, is answered in its form: no 500, and no traceback in the log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import aiohttp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.gateway.session import SessionRules
from tests.support.examples import examples
from tests.support.node import served

RULES = SessionRules(max_tokens=90, seed=3)
ANSWERS = {200, 400, 403, 404, 405, 413, 415}
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


IDS = near("call_1", "call_2", "", None)
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
QUESTION = [{"role": "user", "content": "hi"}]
VALID = {
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 4},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": QUESTION},
    "/v1/messages/count_tokens": {"messages": QUESTION},
}
PATHS = st.sampled_from([*VALID] * 3 + ["/v1/models", "/health", "/metrics", "/nothing", "/v1/%ff%ed%a0%80"])
HEADERS = st.dictionaries(
    st.sampled_from(["Authorization", "x-api-key", "x-request-id", "Content-Type", "Content-Encoding", "Accept"]),
    st.sampled_from(
        ["Bearer session-1", "session-2", "gzip", "deflate", "br", "zstd", "identity", "text/plain", "\xff", "x" * 5000]
        + ["application/json; charset=utf-7"] * 2
    ),
    max_size=2,
)


@st.composite
def requests(draw):
    """(method, path, headers, body)."""
    path = draw(PATHS)
    body = dict(VALID.get(path, {}))
    for name in draw(st.lists(st.sampled_from([*FIELDS]), max_size=4)):
        body[name] = draw(FIELDS[name])
    for name in draw(st.lists(st.sampled_from([*body] or ["x"]), max_size=1)):
        body.pop(name, None)
    whole = body if draw(st.integers(0, 9)) else draw(ANYTHING)
    data = json.dumps(whole).encode()
    if not draw(st.integers(0, 7)):
        data = draw(st.binary(max_size=20)) + data[: draw(st.integers(0, len(data)))]
    if not draw(st.integers(0, 9)):
        data = gzip.compress(data)
    headers = {"Content-Type": "application/json", **draw(HEADERS)}
    method = draw(st.sampled_from(["POST"] * 8 + ["GET", "PUT"]))
    return method, draw(st.sampled_from(["", "/sessions/a", "/sessions/%00"])) + path, headers, data


async def send(sent, tools):
    async with (
        served(rules=RULES, tools=tools, prepare=lambda replica: setattr(replica, "_script", None)) as node,
        aiohttp.ClientSession() as client,
    ):
        for method, path, headers, data in sent:
            url = f"{node.address}{path}"
            async with client.request(method, url, data=data, headers=headers) as response:
                answer = await response.read()
                assert response.status in ANSWERS, (method, path, headers, data, answer)
                streamed = response.content_type == "text/event-stream"
            if streamed or response.status != 200:
                assert b"an error of the gateway" not in answer, (path, data)
            if response.status >= 400:
                if response.content_type == "text/plain":  # by aiohttp, which knows no such encoding
                    assert (response.status, "Content-Encoding" in headers) == (400, True), (headers, answer)
                    continue
                error = json.loads(answer)
                assert error["error"]["message"], (path, answer)
                assert ("type" in error) == ("/v1/messages" in path and response.status != 405 and method == "POST")


@pytest.mark.parametrize("tools", [False, True])
@settings(examples(6, search=100), phases=[Phase.explicit, Phase.reuse, Phase.generate])  # none shrinks: a server each
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
