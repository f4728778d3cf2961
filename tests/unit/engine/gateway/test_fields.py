"""Which fields of a request are taken, which are overruled in training, and which are refused by name."""

import json

import pytest

from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http import anthropic_api, openai_api
from engine.gateway.http.errors import problem_of
from engine.gateway.requests import BadRequest
from engine.gateway.session import SessionRules
from engine.gateway.tool_loop import ToolLoop
from tests.support.node import CHAT, END, Setup

QUESTION = {"role": "user", "content": "What is 6 * 7?"}
PARSE = {"chat": openai_api.parse_chat, "completion": openai_api.parse_completion, "messages": anthropic_api.parse}
ASKED = {
    "chat": lambda body: body.requests(),
    "completion": lambda body: body.requests(CHAT),
    "messages": lambda body: body.request(),
}
BODY = {
    "chat": {"messages": [QUESTION]},
    "completion": {"prompt": "hi"},
    "messages": {"messages": [QUESTION], "max_tokens": 9},
}

# Values that ask for nothing: defaults of vLLM's requests, and what clients send by habit.
NEUTRAL = {
    "chat": [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0},
        {"top_k": -1, "min_p": 0.0, "min_tokens": 0, "ignore_eos": False, "use_beam_search": False},
        {"logit_bias": {}, "bad_words": [], "stop_token_ids": [], "stop": None, "allowed_token_ids": None},
        {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
        {"skip_special_tokens": False, "add_special_tokens": False, "add_generation_prompt": True},
        {"continue_final_message": False, "echo": False, "priority": 0, "request_id": "a", "session_id": "b"},
        {"cache_salt": "x", "include_reasoning": True, "mm_payload": "tensors", "routed_experts_prompt_start": 0},
        {"return_token_offsets": False, "stream_interval": 1, "chat_template_kwargs": {}, "documents": []},
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        {"reasoning_effort": "low", "verbosity": "low", "modalities": ["text"], "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "function_call": "auto", "functions": [], "top_logprobs": 0},
        {"prediction": {"type": "content", "content": "x"}, "n": None, "tools": None, "stream": None},
        {"unheard_of": False, "unheard_of_2": {}, "unheard_of_3": [], "unheard_of_4": None},
    ],
    "completion": [
        {"add_special_tokens": True, "best_of": 1, "suffix": "", "echo": False, "logprobs": None},
        {"min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True, "top_k": 0, "use_beam_search": False},
    ],
    "messages": [
        {"thread": None, "cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "u"}, "service_tier": "auto"},
        {"betas": ["x"], "container": "c", "context_management": {"edits": []}, "thinking": {"type": "enabled"}},
        {"speed": "fast", "inference_geo": "eu", "diagnostics": {"a": 1}, "fallbacks": "default"},
        {"user_profile_id": "u", "workspace_id": "w", "billing_policy": {"type": "billing_policy"}},
        {"anthropic_version": "vertex-2023-10-16", "top_k": None, "mcp_servers": [], "unheard_of": False},
        {"top_k": -1},
        {"top_k": 0},
    ],
}


def asked(dialect, fields):
    """What a request with these fields asks the gateway for."""
    return ASKED[dialect](PARSE[dialect](json.dumps({**BODY[dialect], **fields}).encode()))


@pytest.mark.parametrize(("dialect", "fields"), [(dialect, each) for dialect in NEUTRAL for each in NEUTRAL[dialect]])
def test_a_field_that_asks_for_nothing_is_taken(dialect, fields):
    assert asked(dialect, fields) == asked(dialect, {})


REFUSED = {
    "chat": {
        "unheard_of": 1,
        "logit_bias": {"5": 1},
        "min_tokens": 4,
        "ignore_eos": True,
        "best_of": 2,
        "top_logprobs": 3,
        "echo": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "truncate_prompt_tokens": 5,
        "use_beam_search": True,
        "stop_token_ids": [3],
        "presence_penalty": "high",
        "changes": {"temperature": "none"},
        "thread": {"type": "create"},
    },
    "completion": {"add_special_tokens": False, "suffix": "x", "echo": True},
    "messages": {
        "unheard_of": 1,
        "mcp_servers": [{"url": "x"}],
        "compaction": {"type": "summarize"},
        "top_k": "few",
        "thread": {"type": "continue", "previous_message_id": "m"},
        "changes": {"a": "b"},
    },
}


@pytest.mark.parametrize(
    ("dialect", "field", "value"), [(dialect, *each) for dialect in REFUSED for each in REFUSED[dialect].items()]
)
def test_a_field_that_asks_for_something_is_refused_by_name(dialect, field, value):
    with pytest.raises(BadRequest) as refused:
        PARSE[dialect](json.dumps({**BODY[dialect], field: value}).encode())
    assert refused.value.field == field


def test_a_conversation_that_the_server_keeps_is_refused_as_anthropics_client_expects():
    with pytest.raises(anthropic_api.ThreadUnsupported) as refused:
        anthropic_api.parse(json.dumps({**BODY["messages"], "thread": {"type": "create"}}).encode())
    problem = problem_of(refused.value)
    assert (problem.status, problem.fault) == (400, False)
    assert problem.body("anthropic")["error"]["details"] == {"error_code": "thread_unsupported_request"}


CHANGES = {"chat": {"presence_penalty": 1.5, "top_k": 20, "min_p": 0.1, "temperature": 0.3}, "messages": {"top_k": 20}}


def request_of(dialect, **fields):
    body = PARSE[dialect](json.dumps({**BODY[dialect], **fields}).encode())
    return body.request() if dialect == "messages" else body.requests()[0]


@pytest.mark.parametrize("dialect", [*CHANGES])
async def test_another_sampling_is_overruled_and_counted_by_name_in_training_only(dialect):
    changes = {name for name in CHANGES[dialect] if name != "temperature"}
    async with Setup(["a" + END]) as node:
        gateway = Gateway(node.fleet, CHAT, node.timeline, GatewayConfig())
        trained = gateway.open("trained", SessionRules(max_tokens=400, fixed=True))
        served = gateway.open("served", SessionRules(max_tokens=400))
        for _ in range(2):
            events = [event async for event in trained.chat(request_of(dialect, **CHANGES[dialect]))]
            assert events
        assert gateway.counts.overruled == 2
        assert gateway.counts.overruled_fields == dict.fromkeys(CHANGES[dialect], 2) == trained.cost["overruled_fields"]
        assert all(f"2 by {name!r}" in gateway.overruled_line() for name in CHANGES[dialect])
        with pytest.raises(BadRequest) as refused:
            async for _ in served.chat(request_of(dialect, **CHANGES[dialect])):
                pass
        assert refused.value.field in changes
        with pytest.raises(BadRequest):
            await ToolLoop(node.rollouts).answer(request_of(dialect, **CHANGES[dialect]))
        assert len(node.replicas.made[0].requests) == 2
        gateway.closing()


def test_a_run_that_overruled_nobody_says_nothing():
    gateway = Gateway(None, CHAT, None, GatewayConfig())
    assert gateway.overruled_line() is None


BILL = "x-anthropic-billing-header: cc_version=2.1; cch=57f"


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (BILL, []),
        ([{"type": "text", "text": BILL}], []),
        ([{"type": "text", "text": BILL}, {"type": "text", "text": "Be brief."}], ["Be brief."]),
        ("", [""]),  # it stands for the template's own system message
        (f"Not {BILL}", [f"Not {BILL}"]),
    ],
)
def test_the_billing_header_is_left_out_of_chats_too(content, read):
    body = {"messages": [{"role": "system", "content": content}, QUESTION]}
    [request] = openai_api.parse_chat(json.dumps(body).encode()).requests()
    assert [message["content"] for message in request.messages] == [*read, QUESTION["content"]]


@pytest.mark.parametrize("mark", [{"cache_control": {"type": "ephemeral"}}, {"strict": True}])
def test_marks_beside_a_tool_are_no_part_of_it(mark):
    function = {"name": "python", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": {**function, "cache_control": {"type": "ephemeral"}}, **mark}]
    assert request_of("chat", tools=tools).tools == ({"type": "function", "function": function},)
    tool = {"name": "python", "input_schema": {"type": "object"}}
    assert request_of("messages", tools=[{**tool, **mark}]).tools == request_of("messages", tools=[tool]).tools


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_thought_is_read_from_each_field_that_clients_have_for_it(field):
    sent = {"role": "assistant", "content": "I add.", field: "hmm"}
    given = request_of("chat", messages=[QUESTION, sent, QUESTION]).messages[1]
    block = [{"type": "thinking", "thinking": "hmm", "signature": "x"}, {"type": "text", "text": "I add."}]
    blocks = request_of("messages", messages=[QUESTION, {"role": "assistant", "content": block}, QUESTION])
    assert given == blocks.messages[1] == {"role": "assistant", "content": "I add.", "reasoning_content": "hmm"}
