"""The thought of a turn is told apart from its text, however its tokens come and however a client spells it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.lineage import NormalizedMessage
from engine.gateway.reader import TurnReader
from engine.gateway.requests import Text
from engine.gateway.thoughts import ThoughtReader, shows_thoughts, split_thought
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatConfig, ChatTemplate
from tests.support.examples import examples
from tests.support.node import CHAT, END, call
from tests.support.odd_texts import MIXED
from tests.support.paths import TINY

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", "\n", " ", "hmm", "I add.", "<tool_call>", "{"]),
    max_size=9,
).map("".join)


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("I add.", "", "I add."),
        ("<think>hmm</think>I add.", "hmm", "I add."),
        ("\n<think>\n\nhmm\n\n</think>\n\n\n\nI add.\n", "hmm", "I add.\n"),
        ("hmm\n</think>\n\nI add.", "hmm", "I add."),
        ("<think>hmm", "hmm", ""),
        ("<think></think>I add.", "", "I add."),
        ("<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        ("I add. <think>hmm</think>", "", "I add. <think>hmm</think>"),
        ("", "", ""),
    ],
)
def test_a_thought_is_split_off_where_a_turn_begins_with_one(text, thought, rest):
    assert split_thought(text) == (thought, rest)
    reader = ThoughtReader(opened=text.startswith("hmm"))
    assert reader.read(text, ended=True) == reader.thought == thought
    assert text[reader.begin :] == rest


@examples(200)
@given(text=PIECES | MIXED, cuts=st.lists(st.integers(0, 60), max_size=6), opened=st.booleans())
def test_what_is_read_does_not_depend_on_the_cuts(text, cuts, opened):
    whole = ThoughtReader(opened=opened)
    whole.read(text, ended=True)
    reader, thought, shown = ThoughtReader(opened=opened), "", ""
    for cut in sorted(min(cut, len(text)) for cut in cuts):
        thought += reader.read(text[:cut])
        assert reader.begin <= cut
        assert text[whole.begin :].startswith(text[reader.begin : cut]), "what was shown as text is a thought"
    thought += reader.read(text, ended=True)
    shown = text[reader.begin :]
    assert (thought, shown) == (reader.thought, shown) == (whole.thought, text[whole.begin :])
    if opened or text.lstrip().startswith("<think>"):
        assert thought == thought.strip()
    else:
        assert (thought, shown) == ("", text)


def read(chat, ids, *, calls, stops=(), size=1):
    """The thought and the text that a client gets, in deltas of this size, and the message."""
    reader = TurnReader(chat, "s", calls=calls, stops=stops)
    thought, text = "", ""
    events = []
    for at in range(0, len(ids), size):
        piece = ids[at : at + size]
        finish = "stop" if at + size >= len(ids) else None
        _, found = reader.read(Delta(piece, [0.0] * len(piece), finish), 0.0)
        events += found
        if reader.stop is not None:
            break
    for event in [*events, *reader.finish(0.0)]:
        if isinstance(event, Text):
            thought, text = thought + event.thought, text + event.text
    return thought, text, reader.message()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("turn", "thought", "text", "calls"),
    [
        ("I add.", "", "I add.", 0),
        ("<think>\nhmm\n</think>\n\nI add.", "hmm", "I add.", 0),
        ("<think>\nhmm\n</think>\n\n" + call("1"), "hmm", "", 1),
        ("<think>\nhmm\n</think>\n\nI compute. " + call("1"), "hmm", "I compute.", 1),
        ("<think>hmm " + call("1"), "hmm", "", 1),
        ("<think>hmm", "hmm", "", 0),
        ("<thin", "", "<thin", 0),
        ("<think>hmm</think>\n", "hmm", "", 0),
    ],
)
def test_a_client_gets_thought_text_and_calls_apart(turn, thought, text, calls, size):
    found = read(CHAT, CHAT._encode(turn + END), calls=True, size=size)
    assert found[:2] == (thought, text)
    message = found[2]
    assert (message.get("reasoning_content", ""), message["content"]) == (thought, text)
    assert len(message.get("tool_calls", ())) == calls


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stop_text_may_cut_a_thought(size):
    ids = CHAT._encode("<think>one STOP two</think>three" + END)
    thought, text, message = read(CHAT, ids, calls=False, stops=["STOP"], size=size)
    assert (thought, text, message["reasoning_content"]) == ("one", "", "one")


@examples(100)
@given(text=PIECES, size=st.integers(1, 9), calls=st.booleans())
def test_whatever_a_model_writes_stream_and_message_agree(text, size, calls):
    thought, shown, message = read(CHAT, CHAT._encode(text + END), calls=calls, size=size)
    assert (message.get("reasoning_content", ""), message["content"]) == (thought, shown)
    assert (thought, shown, message) == read(CHAT, CHAT._encode(text + END), calls=calls, size=1000)


def test_plain_completions_have_no_thoughts():
    reader = TurnReader(CHAT, "s", calls=False, thoughts=False)
    ids = CHAT._encode("<think>hmm</think>I add." + END)
    _, [text] = reader.read(Delta(ids, [0.0] * len(ids), "stop"), 0.0)
    assert (text.text, text.thought) == ("<think>hmm</think>I add.", "")


APART = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_is_asked_whether_it_shows_thoughts():
    assert not shows_thoughts(CHAT)
    assert shows_thoughts(ChatTemplate.load(TINY, ChatConfig(template=APART)))


def test_space_around_thoughts_is_no_difference_and_much_of_it_takes_no_time():
    space = " " * 30_000
    texts = [f"{space}a<think>{space}b{space}</think>{space}c{space}d{space}", f"a<think>b</think>c{space}d"]
    began = time.thread_time()
    wide, narrow = (NormalizedMessage.of({"role": "user", "content": text}) for text in texts)
    assert wide == narrow
    assert time.thread_time() - began < 0.05
