"""The shipped tokenizer: exact round trips, an append-only template, and a loss on the assistant's tokens only."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.rollout.chat_template import ChatTemplate
from recipes.tiny.cold_start import EVERYTHING
from recipes.tiny.task import SHIPPED, Mix, demonstrations
from recipes.tiny.tokenizer import TAGS, VOCABULARY, train_tokenizer

TOKENIZER = AutoTokenizer.from_pretrained(SHIPPED)
CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@given(
    st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("<>/_|\n 0123456789")), max_size=200)
)
def test_any_text_survives_encoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_512_tokens_with_single_tokens_for_tags_digits_and_line_breaks():
    assert len(TOKENIZER) == VOCABULARY
    for single in (*TAGS, *"0123456789\n", TOKENIZER.eos_token, TOKENIZER.pad_token, "<|im_start|>"):
        assert len(TOKENIZER.encode(single, add_special_tokens=False)) == 1, single
    merged = [token for token in TOKENIZER.get_vocab() if len(token) > 1 and re.search(r"\d|Ċ", token)]
    assert merged == []
    assert TOKENIZER.decode(TOKENIZER.encode("".join(TAGS)), skip_special_tokens=True) == "".join(TAGS)


def render(messages, generate=False):
    return TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)


@given(CONTENT, CONTENT, st.lists(CONTENT, min_size=1, max_size=3), CONTENT)
def test_rendering_turn_by_turn_equals_rendering_at_once(question, call, replies, answer):
    user, first = {"role": "user", "content": question}, {"role": "assistant", "content": call}
    tools = [{"role": "tool", "content": reply} for reply in replies]
    last = {"role": "assistant", "content": answer}
    text = render([user], generate=True) + call + "<|im_end|>"
    text += "\n" + render(tools, generate=True) + answer + "<|im_end|>\n"
    assert text == render([user, first, *tools, last])


@given(CONTENT, CONTENT)
def test_a_generation_prompt_is_a_prefix_in_ids_too(question, answer):
    user, turn = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    prompt = TOKENIZER.encode(render([user], generate=True), add_special_tokens=False)
    assert TOKENIZER.encode(render([user, turn]), add_special_tokens=False)[: len(prompt)] == prompt


def test_rendering_of_an_episode():
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "C"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "A"},
    ]
    assert render(messages) == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nC<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n"
        "</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    )


def test_only_the_assistants_tokens_are_learnt():
    """A demonstration's pieces are encoded one by one; no token would span the places where they meet."""
    chat = ChatTemplate(TOKENIZER)
    for messages in itertools.islice(demonstrations(Mix(head=0.2, clean=0.4, err=0.4), 9), 100):
        pieces = chat.conversation(messages)
        whole = TOKENIZER.encode(render(messages), add_special_tokens=False)
        assert [token for ids, _ in pieces for token in ids] == whole[:-1], "but for the line break at the end"
        turns = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
        assert [chat.decode(ids) for ids, learnt in pieces if learnt] == turns


def test_training_again_gives_the_shipped_merges_and_template():
    again = train_tokenizer(list(itertools.islice(demonstrations(EVERYTHING, 0), 8000)))
    assert again.get_vocab() == TOKENIZER.get_vocab()
    assert again.chat_template == TOKENIZER.chat_template


def test_too_small_a_corpus_is_refused():
    with pytest.raises(ValueError, match="not 512"):
        train_tokenizer([next(demonstrations(Mix(head=1, clean=0, err=0), 0))])
