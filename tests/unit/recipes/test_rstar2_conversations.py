"""Rows of supervised fine-tuning: what is learnt of them, in which order, and which ones are refused."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from engine.errors import BadInput
from recipes.rstar2.parts.sampling.protocol import REPORT
from recipes.rstar2.parts.tuning.conversations import Conversations, Lengths, Plan, Renderer
from tests.support.conversations import TOOLS, chat_row, installed, sum_row, write_rows
from tests.support.paths import TINY


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return installed(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def renderer(model):
    return Renderer(model)


def one(tmp_path, row):
    return Conversations([write_rows(tmp_path / "rows.jsonl", [row])])[0]


def texts(renderer, conversation):
    """What is given and what is learnt of a conversation, as text."""
    example, chat = renderer.example(conversation), renderer.problems
    ids, learnt = np.asarray(example.ids_T), np.asarray(example.loss_T)
    return chat.decode(ids[~learnt]), chat.decode(ids[learnt])


def test_only_what_the_assistant_says_is_learnt(renderer, tmp_path):
    given, learnt = texts(renderer, one(tmp_path, sum_row(2, 3)))
    assert learnt.startswith("I add.</reason>\n<tool_call>\n")
    assert learnt.endswith("</tool_call><|im_end|>So.</reason>\n<answer>\\boxed{5}</answer><|im_end|>")
    assert "<tool_response>\n5\n</tool_response>" in given
    assert given.count("<reason>") == 2, "the template opens both turns"
    assert REPORT.user_prefix in given


@pytest.mark.parametrize("said", ["Hello.", "<reason> is a tag."])
def test_what_is_no_problem_is_rendered_as_it_is(renderer, tmp_path, said):
    given, learnt = texts(renderer, one(tmp_path, chat_row(said)))
    assert given == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    assert learnt == "Good day.<|im_end|>"


def test_each_conversation_shows_its_own_tools(renderer, tmp_path):
    other = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    for tools in (TOOLS, [other], [other, *TOOLS]):
        given, _ = texts(renderer, one(tmp_path, chat_row(tools=json.dumps(tools))))
        shown = given.partition("<tools>\n")[2].partition("\n</tools>")[0]
        assert [json.loads(line) for line in shown.splitlines()] == tools


def test_the_prompt_is_what_the_first_answer_follows(renderer, tmp_path):
    conversation = one(tmp_path, sum_row(2, 3))
    prompt = renderer.problems.decode(renderer.prompt(conversation))
    assert prompt.endswith("What is 2 + 3?<|im_end|>\n<|im_start|>assistant\n<reason>")
    assert conversation.begins_with_call
    assert not one(tmp_path, chat_row()).begins_with_call


def test_parquet_has_the_same_conversations(renderer, tmp_path):
    """Every field in every message: those that do not apply are empty."""
    rows = [sum_row(2, 3, tools=json.dumps(TOOLS)), chat_row()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines = Conversations([write_rows(tmp_path / "rows.jsonl", rows)])
    columns = Conversations([tmp_path / "rows.parquet"])
    for row in range(2):
        assert texts(renderer, columns[row]) == texts(renderer, lines[row])
        assert columns[row].messages == lines[row].messages
        assert (columns[row].source, columns[row].id) == (lines[row].source, lines[row].id)


def test_what_parquet_fills_into_tools_and_calls_is_not_shown(renderer, tmp_path):
    """Columns of objects have every field of every row: null where a row lacks it."""
    other = {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    }
    call = {"function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    asked = [{"role": "user", "content": "Time?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = [
        {"messages": asked, "tools": [other]},
        {
            "messages": [asked[0], {**asked[1], "tool_calls": [{"function": {"name": "sum", "arguments": {"a": 1}}}]}],
            "tools": [
                {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"b": 2}}}
            ],
        },
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = Conversations([tmp_path / "rows.parquet"])
    for number, row in enumerate(rows):
        found = read[number]
        assert list(found.tools) == row["tools"]
        given, said = texts(renderer, found)
        assert "null" not in given + said
        assert json.dumps(row["messages"][1]["tool_calls"][0]["function"]["arguments"]) in said


def test_source_and_id_may_be_left_out(tmp_path):
    row = {"messages": chat_row()["messages"]}
    path = write_rows(tmp_path / "talk.jsonl", [row, row])
    found = Conversations([path])[1]
    assert (found.source, found.id, found.tools) == ("talk", "talk-1", ())


SPLIT = {"role": "assistant", "content": "\\boxed{5}"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": "hello"}, "messages: .*'hello'"),
        ({"messages": []}, r"messages: .*\[\]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages: message 0: content"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages: no assistant"),
        (chat_row(tools="{"), "tools: .*'{'"),
        (chat_row(tools=json.dumps([{"name": "clock"}])), "tools: .*clock"),
        ({"messages": [*sum_row(2, 3)["messages"][:4], SPLIT]}, r"messages: message 4: .*<reason>.*boxed\{5\}.*Fix: "),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_field(renderer, tmp_path, row, named):
    rows = Conversations([write_rows(tmp_path / "rows.jsonl", [chat_row(), row])])
    renderer.example(rows[0])
    with pytest.raises(BadInput, match=f"rows.jsonl, line 2: {named}"):
        renderer.example(rows[1])


def test_a_line_that_is_cut_in_half_is_named(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [chat_row(), chat_row()])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"rows.jsonl, line 2: .*cut off"):
        Conversations([path])[1]


def test_a_file_without_messages_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"rows.jsonl: no column 'messages'; it has question"):
        Conversations([write_rows(tmp_path / "rows.jsonl", [{"question": "?"}])])


def test_a_model_whose_template_cannot_be_used_is_refused_with_the_command_that_helps(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((TINY / name).read_bytes())
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(BadInput, match=r"model: .*bare.*Fix: python recipes/rstar2/template.py model="):
        Renderer(bare)
    toolless = Renderer(TINY)  # its own template shows no tools
    with pytest.raises(BadInput, match=r"model: .*tools.*Fix: python recipes/rstar2/template.py model="):
        toolless.example(one(tmp_path, chat_row(tools=json.dumps(TOOLS))))


# The order


def a_plan(tmp_path, *, lengths=None, **fields):
    names = [write_rows(tmp_path / f"{name}.jsonl", [chat_row(f"{name}{n}") for n in range(15)]) for name in "ab"]
    lengths = np.full(30, 10, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    given = {"max_tokens": 100, "batch_size": 4, "held_out_rows": 6, "seed": 3, **fields}
    return Plan(Conversations(names), lengths, **given)


def test_each_epoch_trains_every_conversation_once_in_an_order_of_its_own(tmp_path):
    plan = a_plan(tmp_path)
    rows = [row for step in range(1, 13) for row in plan.rows(step)]
    first, second = rows[:24], rows[24:]
    assert sorted(first) == sorted(second) == plan.trained.tolist()
    assert first != second
    assert {row < 15 for row in first[:8]} == {True, False}, "the files are mixed"
    assert sorted([*plan.trained, *plan.held_out]) == list(range(30))
    assert len(plan.held_out) == 6


def test_a_step_has_the_same_conversations_whatever_was_asked_before(tmp_path):
    whole = a_plan(tmp_path, batch_size=5)
    later = a_plan(tmp_path, batch_size=5)
    assert later.rows(7) == [whole.rows(step) for step in range(1, 8)][-1]
    one, other = (a_plan(tmp_path, held_out_rows=0, seed=seed).rows(1) for seed in (3, 4))
    assert one != other


def test_conversations_that_are_too_long_are_left_out_and_counted(tmp_path):
    plan = a_plan(tmp_path, lengths=[100] * 20 + [101] * 10)
    assert plan.too_long == 10
    assert max([*plan.trained, *plan.held_out]) == 19
    assert (plan.steps(3), plan.epochs(plan.steps(3))) == (10, pytest.approx(10 * 4 / 14))


def test_too_few_conversations_for_a_batch_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"data: 24 .*batch_size=25"):
        a_plan(tmp_path, batch_size=25)


def test_lengths_are_found_out_once(model, renderer, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [sum_row(2, 3), chat_row()])

    def known():
        return Lengths(tmp_path / "lengths.npy", Conversations([path]), renderer, model)

    assert known().read() is None
    first = known()
    first.measure(range(2))
    assert first.write().tolist() == [len(renderer.example(Conversations([path])[row]).ids_T) for row in range(2)]
    assert known().read().tolist() == first.write().tolist()
    write_rows(path, [sum_row(12, 13), chat_row()])
    assert known().read() is None
    (tmp_path / "lengths.npy").write_bytes(b"\x93NUM")
    assert known().read() is None
