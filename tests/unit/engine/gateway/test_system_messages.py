"""A system message reaches the model wherever a client puts it, and earlier turns stay as they were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.requests import ChatRequest, Finished
from engine.gateway.session import SessionRules
from engine.gateway.system_messages import is_billing, shows_system_anywhere, with_system_first, without_billing
from engine.rollout.chat_template import ChatConfig, ChatTemplate
from engine.types import StopReason
from tests.support.examples import examples
from tests.support.fakes import a_prompt
from tests.support.node import CHAT, END, Setup
from tests.support.paths import TINY

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ONLY = "{% if m.role == 'system' and not loop.first %}"
FIRST = LOOP.replace("<|im_start|>", ONLY + "{{ raise_exception('system first') }}{% endif %}<|im_start|>", 1) + OPEN
SILENT = LOOP.replace("<|im_start|>", "{% if m.role != 'system' or loop.first %}<|im_start|>", 1)
SILENT = SILENT.replace("{% endfor %}", "{% endif %}{% endfor %}", 1) + OPEN
TO_THE_FRONT = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
) + OPEN
IN_TURN = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}"
    "{{ raise_exception('take turns') }}{% endif %}{% endfor %}"
) + FIRST
ELSEWHERE = {"raises": FIRST, "leaves out": SILENT, "moves": TO_THE_FRONT, "wants turns": IN_TURN}


def chat_of(template):
    return ChatTemplate.load(TINY, ChatConfig(template=template))


def said(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("messages", "placed"),
    [
        ([("user", "a")], [("user", "a")]),
        ([("system", "s"), ("user", "a")], [("system", "s"), ("user", "a")]),
        ([("system", "s"), ("system", "t"), ("user", "a")], [("system", "s\n\nt"), ("user", "a")]),
        ([("user", "a"), ("system", "s")], [("user", "a\n\ns")]),
        ([("user", "a"), ("system", "s"), ("user", "b")], [("user", "a\n\ns\n\nb")]),
        (
            [("user", "a"), ("assistant", "b"), ("system", "s"), ("user", "c")],
            [("user", "a"), ("assistant", "b"), ("user", "s\n\nc")],
        ),
        (
            [("user", "a"), ("assistant", "b"), ("tool", "c"), ("system", "s"), ("assistant", "d")],
            [("user", "a"), ("assistant", "b"), ("tool", "c"), ("user", "s"), ("assistant", "d")],
        ),
        ([("user", "a"), ("user", "b")], [("user", "a"), ("user", "b")]),
        ([], []),
    ],
)
def test_later_system_messages_become_the_users(messages, placed):
    assert with_system_first([said(*each) for each in messages]) == [said(*each) for each in placed]


ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=8)


@examples(200)
@given(before=ROLES, after=ROLES)
def test_what_comes_before_a_turn_stays_as_it_is(before, after):
    history = [said(role, str(at)) for at, role in enumerate([*before, "assistant"])]
    rest = [said(role, f"later {at}") for at, role in enumerate(after)]
    placed = with_system_first(history)
    assert with_system_first([*history, *rest])[: len(placed)] == placed
    roles = [each["role"] for each in placed]
    assert "system" not in roles[1:]


@pytest.mark.parametrize("name", [*ELSEWHERE])
def test_templates_that_take_it_only_first_are_known(name):
    assert shows_system_anywhere(CHAT)
    assert shows_system_anywhere(chat_of(LOOP + OPEN))
    assert not shows_system_anywhere(chat_of(ELSEWHERE[name]))


@pytest.mark.parametrize("name", [*ELSEWHERE, "takes it"])
async def test_a_system_message_in_the_middle_reaches_the_model_and_the_conversation_is_one(name):
    chat = chat_of(ELSEWHERE.get(name, LOOP + OPEN))
    async with Setup(["one" + END], ["two" + END], ["three" + END]) as node:
        gateway = Gateway(node.fleet, chat, node.timeline, GatewayConfig())
        session = gateway.open("s", SessionRules(max_tokens=400))
        messages = [said("system", "Be brief."), said("user", "Hi."), said("system", "The date is known.")]
        for text in ("Go on.", "And on."):
            [*_, finished] = [event async for event in session.chat(ChatRequest(messages=tuple(messages)))]
            assert isinstance(finished, Finished)
            shown = chat.decode(finished.prompt_ids)
            assert all(each["content"] in shown for each in messages)
            messages += [finished.message, said("system", f"{text} It is late."), said("user", text)]
        assert session.trajectory(a_prompt(), StopReason.ANSWER).segments == ()
        session.close()


def test_the_billing_header_is_left_out():
    header = "x-anthropic-billing-header: cc_version=2.1.197; cch=57f"
    assert without_billing([header, "You are helpful.", " Be brief."]) == "You are helpful. Be brief."
    assert without_billing(["You pay x-anthropic-billing-header."]) == "You pay x-anthropic-billing-header."
    assert is_billing([header])
    assert not is_billing([header, "You are helpful."])
    assert not is_billing([None])
