"""What a request may demand of a turn, in the vendors' words, and what becomes of such a turn in its session."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.anthropic_api import parse
from engine.gateway.http.constraints import (
    anthropic_choice,
    anthropic_format,
    constraint_of,
    openai_choice,
    openai_format,
)
from engine.gateway.http.openai_api import parse_chat
from engine.gateway.reader import TurnReader
from engine.gateway.requests import BadRequest, ChatRequest, Constraint, Text
from engine.gateway.session import SessionRules
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatConfig, ChatTemplate
from engine.types import StopReason
from tests.support.fakes import a_prompt
from tests.support.node import CHAT, END, Setup, call
from tests.support.paths import TINY

QUESTION = {"role": "user", "content": "What is 6 * 7?"}
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def of_openai(**fields):
    body = {"messages": [QUESTION], "tools": FUNCTIONS, **fields}
    [request] = parse_chat(json.dumps(body).encode()).requests()
    return request


def of_anthropic(**fields):
    body = {"messages": [QUESTION], "tools": TOOLS, "max_tokens": 9, **fields}
    return parse(json.dumps(body).encode()).request()


def told(request):
    """(names of the tools that are shown, names of those that may be called, once, schema)."""
    shown = [tool["function"]["name"] for tool in request.tools]
    constraint = request.constraint
    if constraint is None:
        return shown, None
    return shown, [tool["function"]["name"] for tool in constraint.tools], constraint.once, constraint.schema


ALL = ["f", "g"]
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (ALL, None)),
        ({"tool_choice": "auto"}, (ALL, None)),
        ({"tool_choice": None, "response_format": None}, (ALL, None)),
        ({"tool_choice": "none"}, ([], None)),
        ({"tool_choice": "required"}, (ALL, ALL, False, None)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, (ALL, ALL, True, None)),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, (ALL, ["g"], True, None)),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [FUNCTIONS[1], FUNCTIONS[1]]},
                }
            },
            (ALL, ["g"], False, None),
        ),
        ({"response_format": {"type": "text"}}, (ALL, None)),
        ({"response_format": {}}, (ALL, None)),
        ({"response_format": FORMAT}, (ALL, ALL, False, SCHEMA)),
        ({"response_format": FORMAT, "tools": None}, ([], [], False, SCHEMA)),
        ({"response_format": FORMAT, "tool_choice": "none"}, ([], [], False, SCHEMA)),
        ({"response_format": FORMAT, "tool_choice": "required"}, (ALL, ALL, False, None)),
        ({"response_format": {"type": "json_object"}, "tools": None}, ([], [], False, {"type": "object"})),
    ],
)
def test_openais_words(fields, expected):
    assert told(of_openai(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (ALL, None)),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, (ALL, None)),
        ({"tool_choice": {"type": "none"}}, ([], None)),
        ({"tool_choice": {"type": "any"}}, (ALL, ALL, False, None)),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, (ALL, ALL, True, None)),
        ({"tool_choice": {"type": "tool", "name": "f"}}, (ALL, ["f"], True, None)),
        ({"output_config": {"effort": "low"}}, (ALL, None)),
        ({"output_config": {"effort": "low", "format": None}}, (ALL, None)),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, (ALL, ALL, False, SCHEMA)),
    ],
)
def test_anthropics_words(fields, expected):
    assert told(of_anthropic(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": FUNCTIONS}}}, "mode"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [7]}}}, "name"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": 7}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "number", "multipleOf": 2}, "strict": True},
                }
            },
            "multipleOf",
        ),
    ],
)
def test_what_openais_dialect_cannot_have_is_refused_by_name(fields, named):
    if named is None:  # OpenAI's own client leaves the schema out for any JSON
        assert of_openai(**fields).constraint.schema == {"type": "object"}
        return
    with pytest.raises(BadRequest, match=named):
        of_openai(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": {"type": "any"}, "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "h"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}},
            "uniqueItems",
        ),
    ],
)
def test_what_anthropics_dialect_cannot_have_is_refused_by_name(fields, named):
    with pytest.raises(BadRequest, match=named):
        of_anthropic(**fields)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=4)
    | st.sampled_from(["function", "tool", "required", "any", "json_schema", "allowed_tools", "f"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "mode", "tools", "format", "schema", "json_schema", "strict"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(choice=ANYTHING, form=ANYTHING, parallel=st.none() | st.booleans())
def test_whatever_is_asked_for_is_a_constraint_or_a_refusal(choice, form, parallel):
    mapping = choice if isinstance(choice, dict) else None
    for read in (
        lambda: constraint_of(openai_choice(choice, parallel=parallel), FUNCTIONS, openai_format(form)),
        lambda: constraint_of(anthropic_choice(mapping), FUNCTIONS, anthropic_format(form)),
    ):
        try:
            found = read()
        except BadRequest:
            continue
        assert found is None or isinstance(found, Constraint)


MUST = Constraint(field="tool_choice", tools=tuple(FUNCTIONS))
RULES = SessionRules(max_tokens=400, seed=3, prompt_id="p", fixed=True)


async def say(session, constraint=None, messages=(QUESTION,), tools=FUNCTIONS):
    request = ChatRequest(messages=tuple(messages), tools=tuple(tools), constraint=constraint)
    return [event async for event in session.chat(request)]


def session_of(node):
    return Gateway(node.fleet, CHAT, node.timeline, GatewayConfig()).open("s", RULES)


async def test_a_turn_with_a_constraint_is_sampled_by_its_grammar_and_other_turns_are_free():
    async with Setup([call("1", "f") + END], [f"<answer>42</answer>{END}"]) as node:
        session = session_of(node)
        [*_, first] = await say(session, MUST)
        await say(session, None, [QUESTION, first.message, {"role": "tool", "content": "1"}])
        grammars = [sampling.grammar for _, sampling, _ in node.replicas.made[0].requests]
        assert json.loads(grammars[0])["type"] == "structural_tag"
        assert grammars[1] is None
        assert (session.counts.constrained, session.counts.requests) == (1, 2)
        session.close()


async def test_what_the_grammar_decided_is_not_trained_and_the_client_gets_all():
    text = call("1", "f") + END
    ids = CHAT._encode(text)
    forced = frozenset(ids[:4])
    async with Setup([text], prepare=lambda replica: setattr(replica, "forces", forced)) as node:
        session = session_of(node)
        [*_, finished] = await say(session, MUST)
        found = session.trajectory(a_prompt(), StopReason.ANSWER)
        session.close()
    [turn] = found.turns
    np.testing.assert_array_equal(found.token_ids_T[turn.start : turn.end], ids)
    expected = [token not in forced for token in ids]
    assert found.sampled_T[turn.start : turn.end].tolist() == expected
    assert (found.versions_T[turn.start : turn.end] >= 0).tolist() == expected
    assert not found.logprobs_T[~found.sampled_T].any()
    assert (found.sampled_tokens, found.forced_tokens) == (sum(expected), len(ids) - sum(expected))
    assert finished.token_ids == tuple(ids)
    assert len(finished.logprobs) == len(ids)
    assert session.counts.forced_tokens == found.forced_tokens
    assert session.counts.sampled_tokens == len(ids)


async def test_an_engine_that_has_no_such_grammar_is_the_clients_error_and_leaves_nothing():
    async with Setup([f"hi{END}"], prepare=lambda replica: setattr(replica, "refuses", "no xgrammar here")) as node:
        session = session_of(node)
        with pytest.raises(BadRequest, match="no xgrammar here") as caught:
            await say(session, MUST)
        assert caught.value.field == "tool_choice"
        assert session.turns == 0
        assert session.failure is None
        await say(session)
        assert session.turns == 1, "other requests are answered"
        session.close()


THINKING = (TINY / "tokenizer_config.json").read_text()


def thinking(prefill=""):
    """The tiny template, which knows thoughts; a turn begins with the prefill."""
    template = json.loads(THINKING)["chat_template"]
    opening = '{{- "<|im_start|>assistant\\n" -}}'
    assert opening in template
    template = template.replace(opening, opening + (f'{{{{- "{prefill}" -}}}}' if prefill else "{#- <think> -#}"))
    return ChatTemplate.load(TINY, ChatConfig(template=template))


def test_a_template_says_whether_its_model_thinks():
    assert CHAT.thoughts == "none"
    assert thinking().thoughts == "possible"
    assert thinking("<think>\\n").thoughts == "begun"
    assert thinking("<think>\\n\\n</think>\\n\\n").thoughts == "none"
    assert thinking("<think></think><think>").thoughts == "begun"


@given(cuts=st.sets(st.integers(1, 60)), begun=st.booleans(), thought=st.sampled_from(["", "I think. {} "]))
def test_the_client_of_an_answer_gets_it_without_the_thought_however_it_is_cut(cuts, begun, thought):
    answer = '{"a": 1}'
    tags = ("" if begun else "<think>", "</think>\n\n") if thought or begun else ("", "")
    ids = CHAT._encode(tags[0] + thought + tags[1] + answer + END)
    chat = thinking("<think>\\n") if begun else CHAT
    reader = TurnReader(chat, "seed", calls=False)
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    seen = ""
    for start, end in pairwise(bounds):
        part = ids[start:end]
        delta = Delta(part, [0.0] * len(part), "stop" if end == len(ids) else None)
        _, events = reader.read(delta, 0.0)
        seen += "".join(event.text for event in events if isinstance(event, Text))
    seen += "".join(event.text for event in reader.finish(0.0) if isinstance(event, Text))
    assert seen == reader.message()["content"] == answer
    assert reader.whole == CHAT.decode(ids)


@pytest.mark.parametrize("text", ["<think>a", "", " <think>a</think> "])
def test_a_turn_that_ends_within_its_thought_has_no_answer(text):
    reader = TurnReader(CHAT, "seed", calls=False)
    ids = CHAT._encode(text)
    reader.read(Delta(ids, [0.0] * len(ids), "length"), 0.0)
    assert not any(event.text for event in reader.finish(0.0))
    assert reader.message()["content"] == ""
