"""Data files as prompts: every row once an epoch, the same order everywhere, and a bad row is named."""

import datetime
import decimal
import gzip
import json
import tempfile
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet

from engine.data.mixture import mixture
from engine.data.prompts import after_hashes, read_prompts
from engine.run.journal import Journal
from engine.run.prompt_stream import skip
from tests.support.examples import examples
from tests.support.fakes import a_prompt
from tests.support.paths import ROOT

SHARED = ROOT.parent / "shared" / "data"


def jsonl(path, rows, end="\n"):
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)
    return path


def packed(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def columns(path, rows, group=7):
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def saved(path, rows):
    rows = list(rows)
    Dataset.from_list(rows).save_to_disk(path, num_shards=min(2, len(rows)))
    return path


def feather(path, rows):
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return path


KINDS = {
    "rows.jsonl": jsonl,
    "rows.json": jsonl,
    "rows.jsonl.gz": packed,
    "rows.parquet": columns,
    "rows": saved,
    "rows.arrow": feather,
}
ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(30)]


@pytest.fixture(params=KINDS)
def file(request, tmp_path):
    return KINDS[request.param](tmp_path / request.param, ROWS)


def ids(prompts):
    return [prompt.id for prompt in prompts]


def rows_of(prompts):
    """Row numbers, of one source."""
    return [int(prompt.id.partition("#")[0].rpartition("-")[2]) for prompt in prompts]


# Streams


def test_every_kind_of_file_gives_the_same_prompts(file):
    prompts = list(read_prompts(file))
    assert ids(prompts) == [f"rows-{n}" for n in range(30)]
    assert [prompt.messages for prompt in prompts] == [({"role": "user", "content": row["question"]},) for row in ROWS]
    assert [prompt.answer for prompt in prompts] == [row["answer"] for row in ROWS]
    assert {prompt.source for prompt in prompts} == {"rows"}


def test_each_epoch_has_every_row_in_an_order_and_under_ids_of_its_own(file):
    prompts = list(read_prompts(file, seed=1, epochs=3))
    epochs = [prompts[first : first + 30] for first in (0, 30, 60)]
    assert [sorted(rows_of(epoch)) for epoch in epochs] == [list(range(30))] * 3
    assert len({tuple(rows_of(epoch)) for epoch in epochs} | {tuple(range(30))}) == 4
    assert len(set(ids(prompts))) == 90
    assert [{prompt.id.partition("#")[2] for prompt in epoch} for epoch in epochs] == [{""}, {"2"}, {"3"}]


def test_the_order_depends_on_the_seed_alone(file):
    first, again, other = (ids(read_prompts(file, seed=seed)) for seed in (5, 5, 6))
    assert first == again != other


def test_the_order_is_the_same_on_every_machine(tmp_path):
    """These are written down: another NumPy, `datasets` or processor must give them too."""
    for name, make in KINDS.items():
        prompts = read_prompts(make(tmp_path / name, ROWS), seed=0, epochs=2)
        found = rows_of(prompts)
        assert (found[:8], found[30:38]) == ([7, 16, 0, 18, 19, 22, 14, 24], [9, 4, 10, 23, 17, 20, 22, 18])


def test_without_end_it_goes_on(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS[:3])
    assert ids(islice(read_prompts(path, epochs=None), 8)) == [
        *("a-0", "a-1", "a-2", "a-0#2", "a-1#2", "a-2#2", "a-0#3", "a-1#3")
    ]


def test_some_rows_are_held_out(file):
    held_out = rows_of(read_prompts(file, limit=8))
    train = rows_of(read_prompts(file, start=8, seed=3, epochs=2))
    assert held_out == list(range(8))
    assert Counter(train) == dict.fromkeys(range(8, 30), 2)
    assert rows_of(read_prompts(file, start=28, limit=100)) == [28, 29]


@examples(40)
@given(
    rows=st.integers(1, 40),
    start=st.integers(0, 10),
    limit=st.none() | st.integers(1, 30),
    seed=st.none() | st.integers(-5, 5),
    passed=st.integers(0, 130),
)
def test_skipping_is_as_reading(rows, start, limit, seed, passed):
    rows_there = rows - min(start, rows - 1)
    with tempfile.TemporaryDirectory() as folder:
        path = jsonl(Path(folder) / "a.jsonl", [{"question": str(n), "answer": n} for n in range(rows)])
        options = {"start": min(start, rows - 1), "limit": limit, "seed": seed, "epochs": 3}
        whole, prompts = ids(read_prompts(path, **options)), read_prompts(path, **options)
        assert len(whole) == len(set(whole)) == 3 * min(rows_there, limit or rows_there)
        assert prompts.skip(passed) == min(passed, len(whole))
        assert prompts.remaining == max(0, len(whole) - passed)
        assert ids(prompts) == whole[passed:]


def test_a_journal_skips_without_reading(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    prompts = read_prompts(path, seed=2, epochs=None)
    journal = Journal(tmp_path / "journal")
    stream = journal.after(prompts)
    drawn = [journal.draw(lease, 0, stream) for lease in range(100)]
    again = Journal(tmp_path / "journal")
    prompts = read_prompts(path, seed=2, epochs=None)
    stream = again.after(prompts)
    assert prompts.position == 100
    assert [again.draw(lease, 0, stream) for lease in range(100)] == drawn
    following = [again.draw(lease, 0, stream) for lease in range(100, 110)]
    assert ids(following) == ids(islice(read_prompts(path, seed=2, epochs=None), 100, 110))


# Rows as data sets write them

RELEASE = {
    "data_source": "rstar_open-r1/DAPO-Math-17k-Processed",
    "agent_name": "rstar2_agent",
    "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {
        "split": "train",
        "index": 0,
        "answer": "42",
        "question": "What is 6 * 7?",
        "need_tools_kwargs": False,
        "interaction_kwargs": {"query": "What is 6 * 7?", "ground_truth": "42"},
    },
}


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("0.12345678901234567891234", "0.12345678901234567891234"),
        ("12345678901234567891.0", "12345678901234567891"),
        ("0.50", "0.50"),
        ("43.0", "43"),
        ("-2.0", "-2"),
        ("1e3", "1000"),
        ("1e999", "1e999"),
        ("12345678901234567891234", "12345678901234567891234"),
    ],
)
def test_numbers_of_json_lines_keep_the_digits_that_are_written(tmp_path, written, answer):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"question": "q", "answer": {written}, "extra_info": {{"x": 0.25}}}}\n')
    [prompt] = read_prompts(path)
    assert prompt.answer == answer
    assert type(prompt.metadata["extra_info"]["x"]) is float


@pytest.mark.parametrize("model", [{"ground_truth": "42"}, {"ground_truth": "42", "style": None}])
def test_a_row_of_verl_needs_no_style(tmp_path, model):
    rows = [RELEASE, {**RELEASE, "reward_model": model, "data_source": None}]
    first, second = read_prompts(jsonl(tmp_path / "train.jsonl", rows))
    assert (first.reward, second.reward) == ("rule", "")
    assert (second.answer, second.source) == ("42", "train")


def test_a_style_that_is_asked_for_has_to_be_there(tmp_path):
    path = jsonl(tmp_path / "train.jsonl", [{**RELEASE, "reward_model": {"ground_truth": "42"}}])
    with pytest.raises(ValueError, match="kind"):
        list(read_prompts(path, reward="reward_model.kind"))


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_the_release_are_read_as_they_are(tmp_path, name):
    [prompt] = read_prompts(KINDS[name](tmp_path / name, [RELEASE]), **({"name": "dapo"} if name else {}))
    assert prompt.id == "dapo-0"
    assert prompt.messages == ({"role": "user", "content": "What is 6 * 7?"},)
    assert (prompt.answer, prompt.reward, prompt.source) == ("42", "rule", "rstar_open-r1/DAPO-Math-17k-Processed")
    assert prompt.metadata == {"ability": "math", "extra_info": RELEASE["extra_info"]}
    assert prompt.tools is None


@pytest.mark.parametrize(
    ("row", "options", "question", "answer"),
    [
        ({"question": "q", "answer": "6*200=1200\n#### 1,200"}, {"answer": after_hashes}, "q", "1200"),
        ({"problem": "q", "answer": "\\frac{1}{2}", "level": 2}, {}, "q", "\\frac{1}{2}"),
        ({"id": 60, "problem": "q", "answer": 204}, {}, "q", "204"),
        ({"input": "q", "target": 43.0, "type": "singleeq"}, {}, "q", "43"),
        ({"input": "q", "target": 0.25}, {}, "q", "0.25"),
        ({"prompt": "q", "answer": -3}, {}, "q", "-3"),
        ({"a": {"b": "q"}, "c.d": "4"}, {"question": "a.b", "answer": "c.d"}, "q", "4"),
        ({"text": "q"}, {"question": "text", "answer": lambda row: ""}, "q", ""),
        ({"x": 6, "y": 7}, {"question": lambda row: "{x}*{y}?".format(**row), "answer": "x"}, "6*7?", "6"),
    ],
    ids=["gsm8k", "math", "aime", "mawps", "fraction", "trl", "dotted", "no answer", "function"],
)
@pytest.mark.parametrize("kind", [jsonl, columns])
def test_questions_and_answers_are_found_where_data_sets_have_them(tmp_path, kind, row, options, question, answer):
    path = kind(tmp_path / ("rows.parquet" if kind is columns else "rows.jsonl"), [row])
    [prompt] = read_prompts(path, **options)
    assert prompt.messages == ({"role": "user", "content": question},)
    assert prompt.answer == answer


def test_messages_keep_their_system_message_and_get_one_where_they_have_none(tmp_path):
    user, own = {"role": "user", "content": "q"}, {"role": "system", "content": "own"}
    path = columns(
        tmp_path / "a.parquet", [{"messages": [own, user], "answer": "1"}, {"messages": [user], "answer": "2"}]
    )
    first, second = read_prompts(path, system="given")
    assert first.messages == (own, user)
    assert second.messages == ({"role": "system", "content": "given"}, user)


def test_fields_of_messages_that_do_not_apply_are_left_out(tmp_path):
    """Parquet has every field in each message."""
    messages = [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a", "name": "x"}]
    [prompt] = read_prompts(columns(tmp_path / "a.parquet", [{"messages": messages, "answer": "1"}]))
    assert prompt.messages[0] == {"role": "user", "content": "q"}
    assert prompt.messages[1]["name"] == "x"


def test_what_a_prompt_keeps_for_a_reward_survives_the_journal(tmp_path):
    day = datetime.datetime(2026, 11, 24, 12)
    row = {"question": "q", "answer": decimal.Decimal("1.50"), "uses": ["python"], "how": "unit tests", "set": "s"}
    row |= {"day": day, "price": decimal.Decimal("2.10"), "cases": [{"in": 1, "out": None}], "share": 0.5}
    path = columns(tmp_path / "a.parquet", [row])
    kept = ("day", "price", "cases", "share")
    prompts = read_prompts(path, tools="uses", reward="how", source="set", metadata=kept)
    journal = Journal(tmp_path / "journal")
    prompt = journal.draw(0, 0, prompts)
    assert (prompt.answer, prompt.tools, prompt.reward, prompt.source) == ("1.5", ("python",), "unit tests", "s")
    cases = [{"in": 1, "out": None}]
    assert prompt.metadata == {"day": "2026-11-24T12:00:00", "price": "2.10", "cases": cases, "share": 0.5}
    assert Journal(tmp_path / "journal").draw(0, 0, iter(())) == prompt


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@examples(80)
@given(json_values)
def test_whatever_json_a_row_holds_is_refused_at_once_or_survives_the_journal(value):
    with tempfile.TemporaryDirectory() as folder:
        path = jsonl(Path(folder) / "a.jsonl", [{"question": "q", "answer": "1", "more": value}])
        [prompt] = read_prompts(path, metadata=["more"])
        Journal(Path(folder) / "journal").draw(0, 0, iter([prompt]))
        assert Journal(Path(folder) / "journal").draw(0, 0, iter(())) == prompt


# JSON of what no data set should hold, and some do: each where text, a number, a list or an object is expected.
DEEP = "[" * 900 + "]" * 900
DIGITS = "9" * 5000
odd_json = st.one_of(
    json_values.map(json.dumps),
    st.sampled_from(
        [
            r'"\ud83d"',
            r'"a\udc00b"',
            r'"\u0000"',
            '" "',
            '""',
            "NaN",
            "-Infinity",
            "1e999",
            "-0.0",
            "18446744073709551616",
        ]
    ),
    st.sampled_from(
        [DIGITS, f"-{DIGITS}", f"[{DIGITS}]", DEEP, "[" * 3000 + "]" * 3000, "[" * 600 + "]" * 600, f'{{"a": {DEEP}}}']
    ),
    st.lists(st.fixed_dictionaries({"role": json_values, "content": json_values}), max_size=2).map(json.dumps),
    st.dictionaries(st.sampled_from(["max_tokens", "max_turns", "\ud83d"]), json_values, max_size=2).map(json.dumps),
)
COLUMNS = {"question": "q", "answer": "1", "tools": ["python"], "reward": "r", "source": "s", "more": 1, "limits": {}}


@examples(80)
@given(st.dictionaries(st.sampled_from(list(COLUMNS)), st.none() | odd_json, min_size=1, max_size=3))
@example({"answer": DIGITS})
@example({"more": DIGITS})
@example({"more": DEEP})
@example({"question": DEEP})
@example({"more": "[" * 600 + "]" * 600})
@example({"question": "[" * 800 + "]" * 800})
@example({"tools": "[" * 800 + "]" * 800})
@example({"limits": '{"max_tokens": ' + DIGITS + "}"})
def test_whatever_a_row_holds_is_named_by_file_row_and_field_or_taken(changed):
    """changed: the JSON of some of a good row's fields; None leaves one out."""
    texts = {**{name: json.dumps(value) for name, value in COLUMNS.items()}, **changed}
    line = ", ".join(f'"{name}": {text}' for name, text in texts.items() if text is not None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text(json.dumps(COLUMNS) + "\n{" + line + "}\n")
        fields = {name: name for name in ("tools", "reward", "source", "limits")}
        try:
            [_, prompt], refused = read_prompts(path, **fields, metadata=["more"]), ""
        except ValueError as error:
            refused = str(error)
        if refused:
            assert "rows.jsonl, line 2: " in refused
            assert any(name in refused for name in (*changed, "messages", "metadata", "not JSON")), refused
        else:
            Journal(Path(folder) / "journal").draw(0, 0, iter([prompt]))
            assert Journal(Path(folder) / "journal").draw(0, 0, iter(())) == prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", ["python"]),
        ("tools", "python"),
        ("tools", (5,)),
        ("reward", None),
        ("source", "\ud83d"),
        ("metadata", None),
        ("metadata", {"a": (1,)}),
        ("metadata", {"a": [{"b": np.float64(1)}]}),
        ("metadata", {"a": 2**64}),
        ("metadata", {5: 1}),
        ("metadata", {"\ud83d": 1}),
        ("metadata", {"a": ["\ud83d"]}),
        ("metadata", {"a": b"1"}),
    ],
)
def test_a_prompt_that_a_journal_would_not_give_back_is_refused_at_once(field, value):
    with pytest.raises(ValueError, match=field):
        replace(a_prompt(), **{field: value})


# Rows that are no prompts

GOOD = {"question": "q", "answer": "1"}


@pytest.mark.parametrize(
    ("row", "options", "named"),
    [
        ({"question": "q"}, {}, ["answer", "question"]),
        ({"answer": "1"}, {}, ["question", "answer"]),
        ({**GOOD, "answer": None}, {}, ["answer", "None"]),
        ({**GOOD, "answer": True}, {}, ["answer", "True"]),
        ({**GOOD, "answer": " "}, {}, ["answer", "' '"]),
        ({**GOOD, "answer": ["1"]}, {}, ["answer", "['1']"]),
        ({**GOOD, "answer": float("nan")}, {}, ["answer", "nan"]),
        ({**GOOD, "question": 5}, {}, ["question", "5"]),
        ({**GOOD, "question": ""}, {}, ["question"]),
        ({**GOOD, "question": "\ud83d"}, {}, ["messages"]),
        ({**GOOD, "question": [{"role": "user"}]}, {}, ["question", "content"]),
        ({**GOOD, "question": [{"role": "user", "content": [1]}]}, {}, ["messages", "[1]"]),
        ({**GOOD, "question": []}, {}, ["question", "[]"]),
        ([1, 2], {}, ["[1, 2]"]),
        (GOOD, {"answer": after_hashes}, ["answer", "####", "'1'"]),
        ({"question": "q"}, {"answer": lambda row: row["answer"]}, ["answer", "KeyError", "'answer'"]),
        ({**GOOD, "uses": "python"}, {"tools": "uses"}, ["tools", "uses", "'python'"]),
        ({**GOOD, "uses": [5]}, {"tools": "uses"}, ["tools", "5"]),
        ({**GOOD, "more": json.loads("[" * 600 + "]" * 600)}, {"metadata": ["more"]}, ["more", "deep"]),
        ({**GOOD, "more": json.loads("[" * 600 + "]" * 600)}, {"answer": "more"}, ["more", "[[[["]),
        ({**GOOD, "reward_model": "x"}, {"answer": "reward_model.ground_truth"}, ["ground_truth", "'x'"]),
    ],
)
def test_a_bad_row_is_named_when_it_is_reached(tmp_path, row, options, named):
    """Far behind the rows that are looked at first, and before the last one."""
    first = {**GOOD, "answer": "#### 1", "uses": ["a"], "more": "1"}
    first["reward_model"] = {"ground_truth": "1", "style": "rule"}
    path = jsonl(tmp_path / "a.jsonl", [*[first] * 20, row, first])
    prompts = read_prompts(path, **{"answer": "answer", "reward": lambda row: "rule", **options})
    assert prompts.skip(20) == 20
    with pytest.raises(ValueError, match="line 21:") as raised:
        next(prompts)
    for word in (str(path), *named):
        assert word in str(raised.value)


@pytest.mark.parametrize("at", [0, 7, 299])
def test_a_bad_row_among_the_first_or_at_the_end_is_named_before_anything_starts(tmp_path, at):
    rows = [GOOD] * 300
    rows[at] = {"question": "q", "answer": None}
    for path in (jsonl(tmp_path / "a.jsonl", rows), columns(tmp_path / "a.parquet", rows), saved(tmp_path / "a", rows)):
        with pytest.raises(ValueError, match="answer") as raised:
            read_prompts(path, seed=0)
        assert str(path) in str(raised.value)
        assert f"line {at + 1}:" in str(raised.value) or f"row {at}:" in str(raised.value)


def test_a_line_that_is_cut_in_half_is_named(tmp_path):
    whole = jsonl(tmp_path / "a.jsonl", ROWS).read_bytes()
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match="cut off") as raised:
        read_prompts(path)
    assert f"{path}, line 30:" in str(raised.value)


def test_blank_lines_and_a_last_line_without_its_end_are_no_errors(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + "\n\n".join(json.dumps(row) for row in ROWS[:3]))
    assert [prompt.answer for prompt in read_prompts(path)] == ["1", "2", "3"]
    path.write_text(path.read_text() + "\n\n{")
    with pytest.raises(ValueError, match="line 8:"):
        read_prompts(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl.gz"])
def test_a_file_that_is_cut_in_half_is_named(tmp_path, name):
    path = KINDS[name](tmp_path / name, ROWS)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=name):
        read_prompts(path)


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("option", ["question", "answer", "tools", "source", "metadata"])
def test_a_column_that_is_not_there_is_answered_with_those_that_are(tmp_path, kind, option):
    path = KINDS[kind](tmp_path / kind, ROWS)
    with pytest.raises(ValueError, match="'solution'") as raised:
        read_prompts(path, **{option: ["solution"] if option == "metadata" else "solution"})
    for word in (str(path), "question, answer"):
        assert word in str(raised.value)


def test_columns_that_no_convention_knows_are_named(tmp_path):
    with pytest.raises(ValueError, match="prompt_text, gold") as raised:
        read_prompts(jsonl(tmp_path / "a.jsonl", [{"prompt_text": "q", "gold": "1"}]))
    assert "question=" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"start": 30}, "30"), ({"start": -1}, "-1"), ({"limit": 0}, "limit"), ({"epochs": 0}, "epochs")],
)
def test_options_that_leave_no_row_are_refused(tmp_path, options, named):
    with pytest.raises(ValueError, match=named):
        read_prompts(jsonl(tmp_path / "a.jsonl", ROWS), **options)


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "a.csv").write_text("question,answer\n")
    (tmp_path / "mixed").mkdir()
    jsonl(tmp_path / "mixed" / "a.jsonl", ROWS), columns(tmp_path / "mixed" / "b.parquet", ROWS)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    for split in ("train", "test"):
        saved(tmp_path / "splits" / split, ROWS)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    for name, named in {
        "empty.jsonl": "no rows",
        "a.csv": ".parquet",
        "mixed": "a.jsonl, b.parquet",
        "nothing": "nothing",
        "splits": "test, train",
        "broken": "broken",
        "absent.jsonl": "does not exist",
    }.items():
        with pytest.raises(ValueError, match=name) as raised:
            read_prompts(tmp_path / name)
        assert named in str(raised.value)
    assert len(list(read_prompts(tmp_path / "splits" / "train"))) == 30


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_files_of_a_folder_are_one_stream(tmp_path, kind):
    folder = tmp_path / "set"
    folder.mkdir()
    for number, part in enumerate((ROWS[:10], ROWS[10:11], ROWS[11:])):
        KINDS[f"rows.{kind}"](folder / f"train-{number}.{kind}", part)
    (folder / "README.md").write_text("about it")
    assert [prompt.answer for prompt in read_prompts(folder)] == [row["answer"] for row in ROWS]
    assert sorted(rows_of(read_prompts(folder, seed=1))) == list(range(30))
    with pytest.raises(ValueError, match=r"train-2.* line 3|set, row 13"):
        next(read_prompts(folder, start=13, answer=lambda row: row["answer"] if row["answer"] != "14" else None))


def test_a_split_of_a_folder_is_named_as_one_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "sums").mkdir(parents=True)
    for split, part in (("train", ROWS[:20]), ("test", ROWS[20:])):
        columns(tmp_path / "org" / "sums" / f"{split}.parquet", part)
    assert ids(read_prompts("org/sums:test")) == [f"sums-{number}" for number in range(10)]
    assert [prompt.answer for prompt in read_prompts("org/sums:train[:2]")] == ["1", "2"]
    with pytest.raises(ValueError, match=r"org/sums:dev.*train.*Fix: "):
        read_prompts("org/sums:dev")


# Mixtures


def test_a_mixture_gives_shares_by_weight_all_along(tmp_path):
    a, b = (jsonl(tmp_path / f"{name}.jsonl", ROWS) for name in "ab")
    prompts = mixture({read_prompts(a, seed=0, epochs=None): 3, read_prompts(b, seed=0, epochs=None): 1})
    found = [prompt.source for prompt in islice(prompts, 400)]
    for length in range(1, 401):
        assert abs(found[:length].count("a") - 0.75 * length) <= 1
    assert len(set(ids(islice(prompts, 400)))) == 400


def test_when_a_source_ends_the_others_go_on(tmp_path):
    streams = {read_prompts(jsonl(tmp_path / f"{n}.jsonl", ROWS[: 5 * n])): 1.0 for n in (1, 2, 4)}
    found = Counter(prompt.source for prompt in mixture(streams))
    assert found == {"1": 5, "2": 10, "4": 20}


@examples(40)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 100)), min_size=1, max_size=4), st.integers(0, 130))
def test_skipping_a_mixture_is_as_reading_it(sources, passed):
    with tempfile.TemporaryDirectory() as folder:

        def made():
            streams = {iter([a_prompt(1), a_prompt(2)]): 1.5}  # any iterator of prompts will do
            for number, (rows, weight) in enumerate(sources):
                path = jsonl(Path(folder) / f"{number}.jsonl", ROWS[:rows])
                streams[read_prompts(path, seed=number, epochs=2)] = weight
            return mixture(streams)

        whole, prompts = ids(made()), made()
        assert skip(prompts, passed) == min(passed, len(whole))
        assert ids(prompts) == whole[passed:]
        assert len(whole) == 2 + 2 * sum(rows for rows, _ in sources)


def test_mixtures_that_make_no_sense_are_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match="'a', 'a'"):
        mixture({read_prompts(path): 1, read_prompts(path): 1})
    assert mixture({read_prompts(path): 1, read_prompts(path, name="b"): 1})
    for weight in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=str(weight)):
            mixture({read_prompts(path): weight})
    with pytest.raises(ValueError, match="at least one"):
        mixture({})


def test_an_ordinary_stream_is_skipped_by_reading():
    stream = (a_prompt(number) for number in count())
    assert skip(stream, 3) == 3
    assert next(stream).id == "p3"
    assert skip(iter([a_prompt()]), 3) == 1


# Size

LONG = 200_000


def test_json_lines_without_end_fit_into_little_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        for number in range(LONG):
            file.write(json.dumps({"question": f"{number} " * 40, "answer": number}) + "\n")
    assert path.stat().st_size > 50 << 20
    tracemalloc.start()
    try:
        prompts = read_prompts(path, seed=0, epochs=None)
        prompts.skip(LONG + 1000)
        found = rows_of(islice(prompts, 2000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(found) - min(found) > LONG / 2
    assert peak < 16 << 20


def test_parquet_without_end_fits_into_little_memory(tmp_path):
    path = tmp_path / "long.parquet"
    schema = pa.schema({"question": pa.string(), "answer": pa.int64()})
    with parquet.ParquetWriter(path, schema) as writer:
        for first in range(0, LONG // 4, 5000):
            questions = [f"{number} " * 150 for number in range(first, first + 5000)]
            writer.write_table(pa.table({"question": questions, "answer": range(first, first + 5000)}, schema))
    before = pa.total_allocated_bytes()
    prompts = read_prompts(path, seed=0, epochs=2)
    for _ in range(100):
        prompts.skip(500)
        next(prompts)
    assert pa.total_allocated_bytes() - before < 1 << 20, "what is mapped is not allocated"


# Real files, where they are


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared/data beside the checkout")
def test_public_data_sets_are_read():
    found = {}
    for name, options in {
        "gsm8k.train": {"answer": after_hashes},
        "gsm8k.test": {"answer": after_hashes},
        "mawps.test": {},
        "math500.test": {"metadata": ("subject", "level")},
        "aime24.test": {},
    }.items():
        prompts = list(read_prompts(SHARED / f"{name}.jsonl", seed=0, **options))
        assert len(set(ids(prompts))) == len(prompts)
        found[name] = len(prompts)
    assert found == {
        "gsm8k.train": 7473,
        "gsm8k.test": 1319,
        "mawps.test": 2065,
        "math500.test": 500,
        "aime24.test": 30,
    }
    with pytest.raises(ValueError, match="line 1:"):
        read_prompts(SHARED / "glaive_toolcall.300.json")  # one JSON array, no lines
