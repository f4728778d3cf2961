"""Items of the Responses API and messages: what is sent comes back as what it was, and events come in order."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.gateway import GatewayConfig
from engine.gateway.http.errors import Problem
from engine.gateway.http.responses_api import parse
from engine.gateway.http.responses_items import messages_of
from engine.gateway.http.responses_reply import Reply
from engine.gateway.http.responses_tools import Offered
from engine.gateway.kept_responses import WITHOUT_SESSION, KeptResponses, NoSuchResponse
from engine.gateway.lineage import NormalizedMessage, with_text_for_malformed_calls
from engine.gateway.requests import BadRequest, Begun, Call, Finished, Text
from engine.gateway.tool_loop import Answer
from engine.rollout.tool_call_messages import normalize
from tests.support.examples import examples

QUESTION = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "1"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]}
TOOLS = [
    {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
    {"type": "namespace", "name": "disk", "tools": [{"type": "function", "name": "read"}]},
    {"type": "web_search_preview"},
]


def called(name, arguments, call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def nothing(item_id):
    return None


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [QUESTION]),
        ([QUESTION], [QUESTION]),
        ([{"role": "developer", "content": "be good"}], [{"role": "developer", "content": "be good"}]),
        ([{"role": "user", "content": [{"type": "input_text", "text": t} for t in "hi"]}], [QUESTION]),
        ([{"type": "reasoning", "id": "rs_1", "summary": []}, QUESTION], [QUESTION]),
        (
            [SAID, CALL, OUTPUT],
            [
                {"role": "assistant", "content": "I add.", "tool_calls": [called("add", '{"a": 1}')]},
                {"role": "tool", "content": "1", "tool_call_id": "c1", "is_error": False},
            ],
        ),
        (
            [CALL, {**CALL, "call_id": "c2"}, SAID],
            [
                {
                    "role": "assistant",
                    "content": "I add.",
                    "tool_calls": [called("add", '{"a": 1}'), called("add", '{"a": 1}', "c2")],
                }
            ],
        ),
        ([SAID, SAID], [{"role": "assistant", "content": "I add."}] * 2),
        (
            [{"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'}],
            [{"role": "assistant", "content": "", "tool_calls": [called("patch", '{"input": "a \\"b\\""}')]}],
        ),
        (
            [{**CALL, "name": "read", "namespace": "disk"}],
            [{"role": "assistant", "content": "", "tool_calls": [called("disk__read", '{"a": 1}')]}],
        ),
        (
            [{**OUTPUT, "output": [{"type": "input_text", "text": "1"}]}],
            [{"role": "tool", "content": "1", "tool_call_id": "c1", "is_error": False}],
        ),
        (
            [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
            [{"role": "assistant", "content": "No."}],
        ),
    ],
)
def test_items_are_messages(items, messages):
    assert messages_of(items, nothing) == messages


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (1, "input[0]"),
        ({}, "input[0]"),
        ({"type": "computer_call"}, "computer_call"),
        ({"role": "wizard", "content": "hi"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "input[0].content[0]"),
        ({**CALL, "name": None}, "input[0].name"),
        ({**CALL, "call_id": 1}, "input[0].call_id"),
        ({**CALL, "arguments": {}}, "input[0].arguments"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": None}, "input[0].input"),
        ({**OUTPUT, "output": 1}, "input[0].output"),
        ({"type": "item_reference", "id": "msg_1"}, "msg_1"),
        ({"id": "msg_1"}, "msg_1"),
        ({"type": "item_reference", "id": ["msg_1"]}, "msg_1"),
    ],
)
def test_an_item_that_is_none_is_refused_and_named(item, named):
    with pytest.raises(BadRequest) as refused:
        messages_of([item], nothing)
    assert named in str(refused.value)


def test_many_parts_of_one_turn_take_no_longer_each():
    size = 20_000
    [message] = messages_of([CALL, *[SAID] * size], nothing)
    assert len(message["content"]) == size * len("I add.")


def test_tools_become_functions_that_a_template_shows():
    offered = Offered.of(TOOLS)
    shown = [tool["function"] for tool in offered.functions]
    assert [function["name"] for function in shown] == ["add", "patch", "disk__read"]
    assert shown[1]["parameters"]["required"] == ["input"]
    assert "start: /a/" in shown[1]["description"]
    assert offered.left_out == ("web_search",)


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        (1, "tools[0]"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "name": ""}, "tools[0].name"),
        ({"type": "file_search"}, "file_search"),
        ({"type": ["function"], "name": "add"}, "tools[0]"),
        ({"type": "namespace", "name": "disk"}, "tools[0]"),
        ({"type": "namespace", "name": "disk", "tools": [{"type": "mcp"}]}, "tools[0].tools[0]"),
        ({"type": "custom", "name": "patch", "format": 1}, "tools[0]"),
        ({"type": "custom", "name": "patch", "description": 1}, "tools[0]"),
    ],
)
def test_a_tool_that_nobody_could_call_is_refused_and_named(tool, named):
    with pytest.raises(BadRequest) as refused:
        Offered.of([tool])
    assert named in str(refused.value)


def a_reply(body=None, kept=None):
    body = parse(json.dumps({"input": "hi", "tools": TOOLS, **(body or {})}).encode())
    kept = KeptResponses(4) if kept is None else kept
    return Reply("tiny", body, body.request(kept), kept)


def finished(text, calls, reason="stop"):
    message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    return Finished(
        reason=reason,
        message=message,
        prompt_ids=(1, 2, 3),
        token_ids=(4, 5),
        logprobs=(-0.5, -0.25),
        cached_tokens=2,
    )


def events_of(reply, end, cut=3):
    """The stream's events of a turn whose text comes in pieces of `cut` characters."""
    text, calls = end.message["content"], end.message.get("tool_calls", ())
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    data = reply.event(Begun(prompt_tokens=3, cached_tokens=2))
    data += b"".join(reply.event(Text(text=each, token_ids=(), logprobs=())) for each in [*pieces, ""])
    for index, call in enumerate(calls):
        data += reply.event(Call(index=index, id=call["id"], **call["function"]))
    return sent(data + reply.event(end))


def sent(data):
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        kind, _, rest = block.partition("\n")
        events.append(json.loads(rest.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def without_ids(value):
    """A value without what differs from one response to the next."""
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name not in ("id", "created_at")}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


ARGUMENTS = st.one_of(
    st.dictionaries(st.sampled_from(["input", "a"]), st.text(max_size=4) | st.integers(), max_size=2).map(json.dumps),
    st.sampled_from(['{"input": "*** Begin\\n"}', '{"input": "\\ud800"}', '{"input": NaN}', "{", "", "[1]", "null"]),
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "patch", "disk__read", "odd"]), ARGUMENTS), max_size=3)
TURNS = st.builds(
    lambda text, calls, cut: finished(
        text,
        [called(name, arguments, f"c{at}") for at, (name, arguments) in enumerate(calls)],
        "length" if cut else "tool_calls" if calls else "stop",
    ),
    st.text(max_size=9),
    CALLS,
    st.booleans(),
)


def as_compared(message):
    [plain] = normalize([with_text_for_malformed_calls(message)])
    return NormalizedMessage.of(plain)


@examples(60, search=500)
@given(end=TURNS)
def test_the_items_of_a_turn_come_back_as_its_message(end):
    response = json.loads(msgspec.json.encode(a_reply().whole(end)))
    [message] = messages_of(response["output"], nothing)
    assert as_compared(message) == as_compared(end.message)
    assert (response["status"] == "incomplete") == (end.reason == "length")


@examples(60, search=500)
@given(end=TURNS, cut=st.integers(1, 9))
def test_a_stream_is_the_same_response_in_openais_order(end, cut):
    events = events_of(a_reply(), end, cut)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"].removeprefix("response.") for event in events]
    last = "incomplete" if end.reason == "length" else "completed"
    assert (kinds[:2], kinds[-1], kinds.count(last)) == (["created", "in_progress"], last, 1)
    done: list[dict] = []
    for event in events[2:-1]:
        assert event["output_index"] == len(done), "an item begins when the one before is done"
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            item, filled, part = event["item"], [], []
        elif kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            assert "".join(filled) == part[0]
            done.append(event["item"])
        else:
            assert event["item_id"] == item["id"]
            filled += [event["delta"]] if kind.endswith(".delta") else []
            text = event.get("text", event.get("arguments", event.get("input")))
            part += [text] if kind.endswith(("text.done", "arguments.done", "input.done")) else []
    assert done == events[-1]["response"]["output"]
    assert len({item["id"] for item in done}) == len(done)
    whole = json.loads(msgspec.json.encode(a_reply().whole(end)))
    assert without_ids(events[-1]["response"]) == without_ids(whole)


def test_a_failure_ends_the_stream_where_clients_look_for_it():
    problem = Problem(status=400, message="too long", code="context_length_exceeded")
    events = sent(a_reply().failed(problem))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": "context_length_exceeded", "message": "too long"}
    begun = a_reply()
    begun.event(Begun(prompt_tokens=3, cached_tokens=2))
    [event] = sent(begun.failed(Problem(status=503, message="a replica died")))
    assert (event["response"]["status"], event["response"]["error"]["code"]) == ("failed", "server_error")


async def test_the_answer_of_a_whole_agent_is_the_same_as_a_stream():
    answer = Answer(finished=finished("42", ()), prompt_tokens=9, sampled_tokens=7, trace={"stop": "answer"})
    whole = json.loads(msgspec.json.encode(a_reply().of_agent(answer)))
    events = sent(b"".join([chunk async for chunk in a_reply().as_stream(answer)]))
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert (whole["trace"], whole["usage"]["total_tokens"]) == ({"stop": "answer"}, 16)


def test_a_response_is_kept_with_its_conversation_but_not_its_instructions():
    kept = KeptResponses(4)
    reply = a_reply({"instructions": "Be brief."}, kept)
    reply.whole(finished("I add.", [called("add", "{}")]))
    body = parse(json.dumps({"input": [OUTPUT], "previous_response_id": reply.id, "tools": TOOLS}).encode())
    messages = body.request(kept).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    [item] = [{"type": "item_reference", "id": f"fc_{reply.id.removeprefix('resp_')}001"}]
    assert messages_of([item], kept.item)[0]["tool_calls"][0]["function"]["name"] == "add"
    unkept = a_reply({"store": False}, kept)
    unkept.whole(finished("hi", ()))
    with pytest.raises(NoSuchResponse):
        kept.messages(unkept.id)


def test_the_oldest_response_goes_first_and_its_items_with_it():
    kept = KeptResponses(3)
    for number in range(5):
        kept.add(f"r{number}", [QUESTION] * number, [{"id": f"i{number}"}])
    assert len(kept) == 3
    assert [kept.item(f"i{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert len(kept.messages("r4")) == 4
    with pytest.raises(NoSuchResponse, match=r"^previous_response_id: Previous response with id 'r1' not found\."):
        kept.messages("r1")


TEXT = st.text(max_size=6) | st.sampled_from(["", "hi", "msg_1", "add", "c1"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1, -1, 0.5, 1 << 64, 10**40]) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
CALL_KINDS = ["function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"]
OTHER_KINDS = ["message", "reasoning", "item_reference", "input_text", "output_text", "refusal"]
TOOL_KINDS = ["function", "custom", "namespace", "web_search", "mcp"]
KINDS = st.sampled_from([*CALL_KINDS, *OTHER_KINDS, *TOOL_KINDS])
OF_ITEMS = ["role", "content", "call_id", "name", "arguments", "input", "output", "id", "text", "refusal", "is_error"]
OF_TOOLS = ["namespace", "tools", "parameters", "format", "description"]


def some(inner):
    values = dict.fromkeys([*OF_ITEMS, *OF_TOOLS], inner | TEXT)
    return st.fixed_dictionaries({}, optional={"type": KINDS | ANYTHING, **values})


INNER = some(ANYTHING)
OBJECTS = some(ANYTHING | INNER | st.lists(INNER, max_size=2)) | ANYTHING
BODIES = st.fixed_dictionaries(
    {"input": st.lists(OBJECTS, max_size=3) | OBJECTS | TEXT},
    optional={
        "tools": st.lists(OBJECTS, max_size=3) | ANYTHING,
        "instructions": TEXT | ANYTHING,
        "tool_choice": OBJECTS | st.sampled_from(["auto", "none", "required"]),
        "text": st.fixed_dictionaries({}, optional={"format": OBJECTS, "verbosity": TEXT}) | ANYTHING,
        "previous_response_id": TEXT | ANYTHING,
        "include": st.lists(TEXT, max_size=2) | ANYTHING,
        "max_output_tokens": ANYTHING,
        "metadata": ANYTHING,
        "return_token_ids": ANYTHING,
        "offered": ANYTHING,
        "others": ANYTHING,
        "temperature": ANYTHING,
    },
)


@examples(60, search=2000)
@given(body=BODIES)
def test_whatever_a_body_holds_it_is_a_request_or_refused(body):
    kept = KeptResponses(4)
    kept.add("msg_1", [QUESTION], [{"id": "msg_1", **SAID}])
    try:
        parsed = parse(json.dumps(body).encode())
        request = parsed.request(kept)
    except (BadRequest, msgspec.ValidationError):
        return
    assert request.messages
    end = finished("hi", [called("add", "{}")])
    events = events_of(Reply("tiny", parsed, request, kept), end)
    assert events[-1]["type"] == "response.completed"


def test_as_many_clients_as_there_may_be_can_go_on_from_their_last_responses_at_once():
    assert GatewayConfig().max_sessions <= WITHOUT_SESSION
