"""Tool calls in the field `tool_calls`: the tokens are those of a rollout, or the field that is wrong is named."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algo.sft import Example, examples
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.tool_call_messages import normalize
from engine.types import StopReason
from sandbox.wire import ToolResult
from tests.support.fakes import a_prompt
from tests.unit.engine.rollout.test_chat_template import HERMES, TINY, tokenizer
from tests.unit.engine.rollout.test_rollout_exact import answers, codes, roll, words

RENDERED = (
    "{{ m.content }}{% for c in m.tool_calls %}"
    "{{ '\\n<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{% endfor %}"
)
LINES = HERMES.replace("{{ m.content }}<|im_end|>", RENDERED + "<|im_end|>")
# A chat, and the text that its template makes of a content and calls.
CHATS = {
    "lines": (
        ChatTemplate(tokenizer(LINES)),
        lambda content, calls: content + "".join(f"\n{_tag(call, 10)}" for call in calls),
    ),
    "tiny": (
        ChatTemplate.load(TINY),
        lambda content, calls: "\n".join([content] * bool(content) + [_tag(c) for c in calls]),
    ),
}
functions = st.builds(lambda parts: {"name": "python", "arguments": {"code": "".join(parts)}}, codes)


def _tag(function, line=None):
    space = "" if line is None else chr(line)
    return f"<tool_call>{space}{json.dumps(function, ensure_ascii=False)}{space}</tool_call>"


def structured(content, functions, *, as_json):
    """An assistant's message as OpenAI writes it."""
    calls = [
        {"type": "function", "id": f"call_{n}", "function": {**each, "arguments": as_json(each["arguments"])}}
        for n, each in enumerate(functions)
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


@pytest.mark.parametrize(("chat", "text_of"), CHATS.values(), ids=list(CHATS))
@settings(max_examples=15, deadline=None)
@given(
    turns=st.lists(st.tuples(words, st.lists(functions, min_size=1, max_size=3)), max_size=3),
    last=words,
    as_json=st.sampled_from([json.dumps, dict]),
    answer=answers,
)
async def test_calls_as_data_give_the_tokens_of_a_rollout(chat, text_of, turns, last, as_json, answer):
    texts = [*(text_of(*turn) for turn in turns), last]
    trajectory, _, _ = await roll(chat, texts, [3], lambda code: ToolResult(outcome="ok", stdout=answer))
    assert trajectory.stop is StopReason.ANSWER
    as_data, as_text = ([{"role": "user", "content": a_prompt().messages[0]["content"]}] for _ in range(2))
    for (content, called), text, turn in zip([*turns, (last, [])], texts, trajectory.turns, strict=True):
        replies = [{"role": "tool", "content": use.response} for use in turn.tool_uses]
        assert len(replies) == len(called)
        said = structured(content, called, as_json=as_json) if called else {"role": "assistant", "content": content}
        as_data += [said, *replies]
        as_text += [{"role": "assistant", "content": text}, *replies]
    wanted = Example(ids_T=trajectory.token_ids_T.tolist(), loss_T=trajectory.sampled_T.tolist())
    assert list(examples([as_data, as_text], chat.conversation)) == [wanted, wanted]


@pytest.mark.parametrize("shown", ["always", "in the last turn", "never"])
def test_calls_as_data_follow_what_the_template_begins_a_turn_with(shown):
    """It is given, wherever the template shows it later; what follows is learnt."""
    template = LINES.replace("assistant\n{% endif %}", "assistant\n<reason></reason>{% endif %}")
    if shown != "always":
        template = template.replace("{{ m.content }}{% for", "{{ m.content | replace('<reason></reason>', '') }}{% for")
    if shown == "in the last turn":
        opening, last = "{{ m.role }}\n", "{% if loop.last and m.role == 'assistant' %}<reason></reason>{% endif %}"
        template = template.replace(opening, opening + last)
    chat = ChatTemplate(tokenizer(template))
    said = [with_calls({"function": GOOD}, content="<reason></reason>I look"), {"role": "tool", "content": "1"}]
    messages = [USER, *said, {"role": "assistant", "content": "<reason></reason>It is 1"}]
    given, asked, answered, last = chat.conversation(messages)
    assert given == (chat.prompt_ids([USER]), False)
    assert asked == (chat._encode(f"I look\n{_tag(GOOD, 10)}<|im_end|>"), True)
    assert answered == (chat.tool_ids(["1"]), False)
    assert last == (chat._encode("It is 1<|im_end|>"), True)


USER = {"role": "user", "content": "Hi"}
GOOD = {"name": "python", "arguments": {"code": "1"}}


def with_calls(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (
            with_calls({"function": {"arguments": {}}}),
            r"tool_calls\[0\].function.name must be a non-empty .*, got None",
        ),
        (
            with_calls({"function": GOOD}, {"function": {"name": "f", "arguments": "[1]"}}),
            r"tool_calls\[1\].function.arguments must be an object or the JSON of one, got \[1\]",
        ),
        (with_calls({"function": {"name": "f", "arguments": '{"a"'}}), r"function.arguments must .*, got '{\"a\"'"),
        (with_calls({"function": {"name": "f"}}), r"function.arguments must be .*, got None"),
        (with_calls(GOOD), r"tool_calls\[0\].function must be an object, got None"),
        (with_calls("f(1)"), r"tool_calls\[0\].function must be an object, got None"),
        ({"role": "assistant", "content": "", "tool_calls": 5}, "tool_calls must be a list, got 5"),
        (with_calls({"function": {"name": "f", "arguments": {"x": float("nan")}}}), "where a rollout reads .*NaN"),
        (with_calls({"function": GOOD}, content="<tool_call>{"), "where a rollout reads"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content must be a string, got None"),
        ({"role": "assistant", "content": "a \ud83d"}, r"content must be text, got 'a \\ud83d'"),
        ({"role": "user", "content": "", "tool_calls": [{"function": GOOD}]}, "only role 'assistant' .* got 'user'"),
        ({"content": "x"}, "must be an object with a role, got {'content': 'x'}"),
        ("x", "must be an object with a role, got 'x'"),
    ],
)
def test_what_cannot_be_rendered_names_example_message_and_field(message, wrong):
    good = [USER, with_calls({"function": GOOD})]
    for chat, _ in CHATS.values():
        stream = examples([good, [USER, message, USER]], chat.conversation)
        next(stream)
        with pytest.raises(ValueError, match=f"(?s)^example 1: message 1: .*{wrong}"):
            next(stream)


@pytest.mark.parametrize(
    "template",
    [HERMES, LINES.replace("{{ m.content }}{%", "{% if not m.tool_calls %}{{ m.content }}{% endif %}{%")],
    ids=["no calls", "no content beside calls"],
)
def test_a_template_that_leaves_something_out_is_refused(template):
    with pytest.raises(
        ValueError, match=r"message 1: the chat template renders content 'I think' and tool_calls \[Tool"
    ):
        ChatTemplate(tokenizer(template)).conversation([USER, with_calls({"function": GOOD}, content="I think")])


@pytest.mark.parametrize("arguments", ["", " \n", {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    call = {"type": "function", "function": {"name": "clock", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat, text_of = CHATS["lines"]
    pieces = chat.conversation([{"role": "user", "content": "Time?"}, turn])
    assert chat.decode(pieces[-1][0]) == text_of("", [{"name": "clock", "arguments": {}}]) + chat.end_of_turn_text


def test_nulls_that_arrow_fills_in_are_not_learnt_and_those_of_json_are():
    filled = {"city": None, "place": {"lat": 1, "lon": None}, "days": [1, None]}
    kept = {"place": {"lat": 1}, "days": [1, None]}
    for arguments, expected in ((filled, kept), (json.dumps(filled), filled)):
        call = {"id": None, "function": {"name": "weather", "arguments": arguments, "x": None}}
        message = {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}
        [found] = normalize([message])
        assert found["tool_calls"][0]["function"]["arguments"] == expected
        assert "name" not in found
