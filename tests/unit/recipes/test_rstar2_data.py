"""Preparing a data set: what is written, what is counted, what is refused, and how an interrupted one goes on."""

import fcntl
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from engine.data.prompts import read_prompts
from engine.errors import BadInput
from recipes.rstar2.data import Config, main, prepare
from recipes.rstar2.parts.preparation.rows import Dropped, Problem
from recipes.rstar2.parts.preparation.shards import SHARD_ROWS, Shards, assemble
from recipes.rstar2.parts.tuning.conversations import Conversations
from tests.support.paths import ROOT

SHARED = ROOT.parent / "shared" / "data"

# As the preparation scripts of rStar2-Agent's release write it.
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


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path):
    return parquet.read_table(path).to_pylist()


def mawps(count):
    return [{"input": f"Ann has {n} pens and gets {n} more. How many?", "target": 2.0 * n} for n in range(count)]


def config(tmp_path, source, **fields):
    fields = {"set": "mawps", "output": tmp_path / "out", **fields}
    return Config(source=tuple(map(str, source if isinstance(source, list) else [source])), **fields)


def dropped(folder):
    return [json.loads(line) for line in (folder / "dropped.jsonl").read_text().splitlines()]


# What is written


def test_problems_are_written_in_the_row_format_of_the_release(tmp_path):
    source = jsonl(tmp_path / "mawps.jsonl", [{"input": " What is 6 * 7? ", "target": 42.0}])
    prepare(config(tmp_path, source))
    [row] = rows_of(tmp_path / "out" / "train.parquet")
    assert row == {**RELEASE, "data_source": "rstar_mawps"}
    parquet.write_table(pa.Table.from_pylist([RELEASE]), tmp_path / "release.parquet")
    written = parquet.read_schema(tmp_path / "out" / "train.parquet")
    assert written.equals(parquet.read_schema(tmp_path / "release.parquet"))


def test_the_releases_own_files_are_read_as_they_are_and_pass_unchanged(tmp_path):
    source = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([RELEASE]), source)
    [prompt] = read_prompts(source)
    assert (prompt.answer, prompt.source) == ("42", RELEASE["data_source"])
    prepare(config(tmp_path, source, set="release"))
    assert rows_of(tmp_path / "out" / "train.parquet") == [RELEASE]


def test_each_row_is_written_or_dropped_with_a_reason(tmp_path):
    rows = [*mawps(3), {"input": "Half of 5?", "target": 2.5}, mawps(1)[0]]
    report = prepare(config(tmp_path, jsonl(tmp_path / "m.jsonl", rows)))
    assert (report["rows_in"], report["dropped"]) == (5, {"not_integer": 1, "duplicate": 1})
    assert report["files"]["train.parquet"]["rows"] == 3
    assert [(line["id"], line["reason"]) for line in dropped(tmp_path / "out")] == [
        ("m-3", "not_integer"),
        ("m-4", "duplicate"),
    ]


def test_the_draw_of_held_out_rows_depends_on_the_seed_and_not_on_other_rows(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", mawps(100))
    (tmp_path / "more").mkdir()
    more = jsonl(tmp_path / "more" / "m.jsonl", mawps(101))

    def held_out(name, source, **fields):
        prepare(config(tmp_path, source, output=tmp_path / name, **fields))
        return {row["extra_info"]["index"] for row in rows_of(tmp_path / name / "test.parquet")}

    first = held_out("a", source, train_rows=80)
    assert len(first) == 20
    assert held_out("b", source, train_rows=80) == first
    assert held_out("c", source, train_rows=80, seed=1) != first
    assert len(held_out("d", more, train_rows=81) ^ first) <= 2
    splits = {row["extra_info"]["split"] for row in rows_of(tmp_path / "a" / "test.parquet")}
    assert splits == {"test"}


def test_an_evaluation_set_is_written_whole_for_testing(tmp_path):
    rows = [{"problem": "Prove that $1 = 1$.", "answer": "\\frac{1}{2}"}] * 2
    report = prepare(config(tmp_path, jsonl(tmp_path / "m.jsonl", rows), set="math500"))
    assert report["files"].keys() == {"test.parquet"}
    assert [row["reward_model"]["ground_truth"] for row in rows_of(tmp_path / "out" / "test.parquet")] == [
        "\\frac{1}{2}",
        "\\frac{1}{2}",
    ]
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_several_sources_become_one_set_in_which_ids_tell_them_apart(tmp_path):
    sources = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        sources.append(jsonl(tmp_path / name / "train.jsonl", mawps(2)))
    report = prepare(config(tmp_path, sources))
    assert (report["rows_in"], report["files"]["train.parquet"]["rows"]) == (4, 2)
    assert [line["id"] for line in dropped(tmp_path / "out")] == ["b-train-0", "b-train-1"]


def test_rows_that_repeat_a_test_set_are_dropped_and_the_row_is_named(tmp_path):
    question = "A train leaves at noon and travels ninety miles before it stops. How far does it go?"
    tests = [{"problem": "How far?", "answer": "1"}, {"problem": question, "answer": "90"}]
    prepare(config(tmp_path, jsonl(tmp_path / "t.jsonl", tests), set="aime24", output=tmp_path / "aime24"))
    source = jsonl(tmp_path / "m.jsonl", [{"input": f"Hello! {question}", "target": 90}, *mawps(1)])
    report = prepare(config(tmp_path, source, against=(tmp_path / "aime24",)))
    assert report["dropped"] == {"contaminated": 1}
    assert report["against"] == {"aime24-1": 1}


def test_problems_are_kept_on_which_enough_answers_agree_with_the_reference(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", mawps(4))
    answers = {"m-0": ["0", "0", None], "m-1": ["2", "3", "4"], "m-2": ["4.0", "1", "$4$"]}
    samples = [{"id": name, "solved": 0, "samples": 3, "answers": given} for name, given in answers.items()]
    report = prepare(config(tmp_path, source, answers=jsonl(tmp_path / "samples.jsonl", samples), agree=2))
    assert report["dropped"] == {"disagree": 1, "not_answered": 1}
    assert [row["extra_info"]["index"] for row in rows_of(tmp_path / "out" / "train.parquet")] == [0, 2]


def test_ids_are_those_of_the_prompts_that_are_read_from_the_source(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", [{"input": "Half of 5?", "target": 2.5}, *mawps(1)] * 2)
    prepare(config(tmp_path, source))
    ids = [prompt.id for prompt in read_prompts(source)]
    assert [line["id"] for line in dropped(tmp_path / "out")] == [ids[0], ids[2], ids[3]]


def test_conversations_are_read_by_supervised_fine_tuning(tmp_path):
    row = {"question": "2 pens and 3 pens?", "answer": "2+3=<<2+3=5>>5 pens\n#### 5"}
    source = jsonl(tmp_path / "gsm.jsonl", [row])
    prepare(config(tmp_path, source, set="gsm8k_demonstrations", protocol="release"))
    conversation = Conversations([tmp_path / "out" / "train.parquet"])[0]
    assert (conversation.id, conversation.source) == ("gsm-0", "gsm8k_demonstrations")
    assert conversation.begins_with_call
    assert conversation.tools[0]["function"]["name"] == "python_code_with_standard_io"


def test_rows_that_no_stream_of_prompts_takes_are_dropped(tmp_path):
    rows = [{"input": " ", "target": 1}, {"input": "Half \ud83d?", "target": 1}, {"input": "How?", "target": None}]
    report = prepare(config(tmp_path, jsonl(tmp_path / "m.jsonl", [*rows, *mawps(1)])))
    assert report["dropped"] == {"no_question": 1, "not_text": 1, "no_answer": 1}
    assert len(list(read_prompts(tmp_path / "out" / "train.parquet"))) == 1


@pytest.mark.parametrize(
    "row", [{"problem": "", "answer": "1"}, {"problem": "\ud83d", "answer": "1"}, {"problem": "x", "answer": ""}]
)
def test_a_row_of_an_evaluation_set_that_no_stream_of_prompts_takes_is_refused(tmp_path, row):
    source = jsonl(tmp_path / "m.jsonl", [{"problem": "How?", "answer": "1"}, row])
    with pytest.raises(BadInput, match=rf"{source}, line 2: .* Fix: "):
        prepare(config(tmp_path, source, set="math500"))


# What is refused: exit code 2, and one line that names file, row and field


REFUSED = {
    "a_wrong_column": ([{"text": "What?", "target": 1}], ["line 1", "'input'", "text, target"]),
    "another_type": ([*mawps(1), {"input": 5, "target": 1}], ["line 2", "input", "got 5"]),
    "an_answer_of_another_type": ([{"input": "What?", "target": [1]}], ["line 1", "target", "[1]"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_of_another_form_is_refused_by_file_row_and_field(tmp_path, capsys, name):
    rows, parts = REFUSED[name]
    source = jsonl(tmp_path / "m.jsonl", rows)
    assert main(["set=mawps", f"source={source}", f"output={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(part in error for part in [str(source), *parts, "Fix:"])
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_a_column_of_another_type_in_parquet_is_refused_by_file_row_and_field(tmp_path):
    source = tmp_path / "dapo.parquet"
    parquet.write_table(pa.Table.from_pylist([{"prompt": [{"role": "user", "content": 3}], "solution": 1}]), source)
    with pytest.raises(BadInput, match=rf"{source}, row 0: prompt: .* Fix: "):
        prepare(config(tmp_path, source, set="dapo"))


def test_a_line_that_is_cut_in_half_is_refused_by_its_number(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", mawps(3))
    source.write_text(source.read_text()[:-20])
    with pytest.raises(BadInput, match=rf"{source}, line 3: .*cut off.* Fix: "):
        prepare(config(tmp_path, source))


@pytest.mark.parametrize("name", ["m.jsonl", "m.json"])
def test_an_empty_file_is_refused_by_its_path(tmp_path, name):
    source = tmp_path / name
    source.write_text("" if name == "m.jsonl" else "[]")
    with pytest.raises(BadInput, match=rf"{source} holds no rows. Fix: "):
        prepare(config(tmp_path, source))


def test_a_source_of_which_no_row_can_be_used_is_refused_with_the_reasons(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", [{"input": "Half of 5?", "target": 2.5}])
    for _ in range(2):
        with pytest.raises(BadInput, match=rf"1 not_integer.*{tmp_path / 'out' / 'dropped.jsonl'}.* Fix: "):
            prepare(config(tmp_path, source))
    assert len(dropped(tmp_path / "out")) == 1


def test_a_source_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"none\.jsonl does not exist"):
        prepare(config(tmp_path, tmp_path / "none.jsonl"))


def test_nothing_of_an_evaluation_set_can_be_left_out(tmp_path):
    with pytest.raises(ValueError, match="train_rows"):
        config(tmp_path, "x", set="aime24", train_rows=3)


@pytest.mark.parametrize("fields", [{"set": "mawps", "broken_calls": 0.5}, {"broken_calls": 1.5}])
def test_only_calls_of_demonstrations_can_be_broken_and_by_a_share(tmp_path, fields):
    with pytest.raises(ValueError, match="broken_calls"):
        config(tmp_path, "x", **{"set": "gsm8k_demonstrations", **fields})


def test_answers_to_another_files_rows_are_refused_where_ids_would_be_ambiguous(tmp_path):
    (tmp_path / "a").mkdir()
    sources = [jsonl(tmp_path / "m.jsonl", mawps(2)), jsonl(tmp_path / "a" / "m.jsonl", mawps(2))]
    answers = jsonl(tmp_path / "samples.jsonl", [{"id": "m-0", "answers": []}])
    with pytest.raises(BadInput, match="answers"):
        prepare(config(tmp_path, sources, answers=answers))


# The output folder


def test_the_same_command_again_prepares_nothing_anew(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", mawps(3))
    first = prepare(config(tmp_path, source))
    changed_at = (tmp_path / "out" / "train.parquet").stat().st_mtime_ns
    assert prepare(config(tmp_path, source)) == first
    assert (tmp_path / "out" / "train.parquet").stat().st_mtime_ns == changed_at


def test_the_path_of_a_source_decides_nothing_but_its_name_does(tmp_path):
    (tmp_path / "moved").mkdir()
    sources = [jsonl(tmp_path / name, mawps(3)) for name in ("m.jsonl", "moved/m.jsonl", "other.jsonl")]
    first = prepare(config(tmp_path, sources[0]))
    assert prepare(config(tmp_path, sources[1])) == first
    with pytest.raises(BadInput, match="source"):
        prepare(config(tmp_path, sources[2]))


def test_rows_that_were_prepared_otherwise_are_replaced_only_when_asked(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", mawps(3))
    prepare(config(tmp_path, source))
    with pytest.raises(BadInput, match=r"train_rows.*fresh=true"):
        prepare(config(tmp_path, source, train_rows=1))
    jsonl(source, mawps(2))
    with pytest.raises(BadInput, match="source"):
        prepare(config(tmp_path, source))
    report = prepare(config(tmp_path, source, train_rows=0, fresh=True))
    assert report["files"].keys() == {"test.parquet"}
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_a_file_that_someone_else_wrote_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.parquet").write_text("mine")
    with pytest.raises(BadInput, match=r"train\.parquet"):
        prepare(config(tmp_path, jsonl(tmp_path / "m.jsonl", mawps(3))))
    assert (tmp_path / "out" / "train.parquet").read_text() == "mine"


def test_a_folder_that_another_process_writes_is_refused(tmp_path):
    folder = tmp_path / "out" / ".unfinished"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another process"):
            prepare(config(tmp_path, jsonl(tmp_path / "m.jsonl", mawps(3))))


def test_a_folder_whose_files_could_not_be_replaced_is_not_called_finished(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", mawps(3))
    prepare(config(tmp_path, source))
    in_the_way = tmp_path / "out" / ".train.parquet.unfinished"
    in_the_way.touch()
    with pytest.raises(OSError, match=in_the_way.name):
        prepare(config(tmp_path, source, fresh=True))
    assert not (tmp_path / "out" / "report.json").exists()
    in_the_way.unlink()
    assert prepare(config(tmp_path, source))["files"]["train.parquet"]["rows"] == 3


# Going on after an interruption


def results(asked, last=None):
    def of(rows):
        for row in rows:
            if row == last:
                raise KeyboardInterrupt
            asked.append(row)
            problem = Problem(id=f"a-{row}", index=row, source="a", question=f"{row}?", answer="1")
            yield problem.id, Dropped(reason="odd") if row % 2 else problem

    return of


def test_an_interrupted_pass_goes_on_after_its_last_whole_shard(tmp_path):
    rows, asked = 3 * SHARD_ROWS - 7, []
    parts = [Shards(tmp_path / name, rows) for name in ("cut", "whole")]
    for part in parts:
        part.folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        parts[0].fill(results(asked, last=SHARD_ROWS + 5), seed=0, on_rows=lambda done: None)
    assert parts[0].done_rows == SHARD_ROWS
    asked.clear()
    done = []
    parts[0].fill(results(asked), seed=0, on_rows=done.append)
    assert asked == list(range(SHARD_ROWS, rows))
    assert done == [SHARD_ROWS, 2 * SHARD_ROWS, rows]
    parts[1].fill(results([]), seed=0, on_rows=done.append)
    outcomes = [assemble(part, part.folder, train_rows=100, conversations=False) for part in parts]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].dropped == {"odd": rows // 2}


def test_duplicates_are_found_across_an_interruption(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", [*mawps(SHARD_ROWS), *mawps(2)])
    prepare(config(tmp_path, source))
    whole = rows_of(tmp_path / "out" / "train.parquet")
    other = config(tmp_path, source, output=tmp_path / "other")
    folder = prepared_until(other, shard=1)
    assert [path.name for path in folder.glob("shard-*")] == ["shard-000000.jsonl"]
    report = prepare(other)
    assert report["dropped"] == {"duplicate": 2}
    assert rows_of(tmp_path / "other" / "train.parquet") == whole
    assert not folder.exists()


def prepared_until(config, shard):
    """What an interruption leaves: the work on a set without the shards from this one on."""
    prepare(config)
    identity = json.loads((config.folder / "report.json").read_text())["identity"]
    folder = config.folder / ".unfinished"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(identity, sort_keys=True))
    again = Shards(folder, shard * SHARD_ROWS)
    rows = rows_of(config.folder / "train.parquet")[: shard * SHARD_ROWS]
    problems = [
        Problem(id=f"m-{at}", index=at, source=row["data_source"], question=row["prompt"][0]["content"],
                answer=row["reward_model"]["ground_truth"])
        for at, row in enumerate(rows)
    ]  # fmt: skip
    again.fill(lambda numbers: ((problems[n].id, problems[n]) for n in numbers), seed=0, on_rows=lambda done: None)
    for path in config.folder.glob("*.*"):
        if path.is_file():
            path.unlink()
    return folder


def test_shards_of_other_options_are_not_used(tmp_path):
    source = jsonl(tmp_path / "m.jsonl", mawps(3))
    folder = tmp_path / "out" / ".unfinished"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "shard-000000.jsonl").write_text("not a shard of ours")
    assert prepare(config(tmp_path, source))["files"]["train.parquet"]["rows"] == 3


@pytest.mark.parametrize("name", ["train.parquet", "test.parquet", "dropped.jsonl"])
def test_nothing_is_left_of_files_that_could_not_be_written(tmp_path, name):
    """The last row is none that the schema takes, so writing fails after files were begun."""
    part = Shards(tmp_path / "work", 2)
    part.folder.mkdir()
    bad = Problem(id="a-1", index="one", source="a", question="?", answer="1")
    rows = [("a-0", Dropped(reason="odd")), ("a-1", bad)]
    part.fill(lambda numbers: rows, seed=0, on_rows=lambda done: None)
    with pytest.raises((pa.ArrowException, ValueError, TypeError)):
        assemble(part, tmp_path / "out", train_rows=None, conversations=False)
    assert not (tmp_path / "out" / name).exists()
    assert not list((tmp_path / "out").glob("**/*.parquet"))


@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
def test_real_sets_are_prepared(tmp_path):
    expected = {
        ("mawps", "mawps.test.jsonl"): ({"not_integer": 275, "duplicate": 156}, 1634),
        ("gsm8k", "gsm8k.test.jsonl"): ({}, 1319),
        ("math500", "math500.test.jsonl"): ({}, 500),
        ("aime24", "aime24.test.jsonl"): ({}, 30),
        ("glaive", "glaive_toolcall.300.json"): ({"duplicate": 35}, 265),
        ("gsm8k_demonstrations", "gsm8k.train.jsonl"): (
            {"many_steps": 453, "program_differs": 363, "no_calculation": 95},
            6562,
        ),
    }
    for (name, file), (reasons, rows) in expected.items():
        report = prepare(config(tmp_path, SHARED / file, set=name, output=tmp_path / name / file))
        assert (report["dropped"], sum(each["rows"] for each in report["files"].values())) == (reasons, rows), name
