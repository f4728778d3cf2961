"""The filters: which problems are kept, and that their rows stay as they were."""

import json
from collections import Counter

import pyarrow as pa
import pytest
from pyarrow import parquet

from engine.console.options import parse
from engine.data.prompts import read_prompts
from recipes.rstar2.filter import Config, is_kept, kept_rows
from tests.support.paths import TINY

ROWS = [
    {
        "data_source": "rstar_x",
        "prompt": [{"role": "user", "content": f"{n} + 1? \u03c0"}],
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n},
    }
    for n in range(4)
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def config(data, *words):
    given = {"model": TINY, "data": data, "protocol": "none", "max_tokens": 230}
    given |= dict(word.split("=") for word in words)
    return parse(Config, [f"{name}={value}" for name, value in given.items()])


def test_what_is_solved_each_time_is_dropped(data):
    made = config(data)
    assert made.samples == 8
    assert [count for count in range(9) if is_kept(made, count)] == list(range(8))


def test_what_too_few_samples_agree_with_is_dropped(data):
    made = config(data, "keep=agree")
    assert (made.samples, made.k) == (16, 2)
    assert [count for count in range(17) if is_kept(made, count)] == list(range(2, 17))
    assert [count for count in range(5) if is_kept(config(data, "keep=agree", "k=4", "n=4"), count)] == [4]


def lines_of(path, verdicts, counts=None):
    name = read_prompts(path).name
    lines = kept_rows(path, name, lambda problem: verdicts[problem], Counter() if counts is None else counts)
    return [json.loads(line) for line in lines]


VERDICTS = {"train-0": "kept", "train-1": "solved", "train-2": "failed", "train-3": "kept"}


def test_rows_that_are_kept_stay_as_they_were(data):
    counts = Counter()
    assert lines_of(data, VERDICTS, counts) == [ROWS[0], ROWS[3]]
    assert counts == {"kept": 2, "solved": 1, "failed": 1}


def test_rows_of_parquet_too_and_what_is_written_is_read_as_prompts(tmp_path):
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    assert lines_of(path, VERDICTS) == [ROWS[0], ROWS[3]]
    out = tmp_path / "filtered.jsonl"
    out.write_text("\n".join(map(json.dumps, lines_of(path, VERDICTS))))
    assert [prompt.answer for prompt in read_prompts(out)] == ["1", "4"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["keep=agree", "k=17"], "k"),
        (["n=0"], "n"),
        (["keep=some"], "keep"),
        (["devices=0"], "devices"),
        (["max_tokens=4000"], "max_position_embeddings"),
    ],
)
def test_what_cannot_be_is_refused_by_name(data, capsys, words, named):
    with pytest.raises(SystemExit) as end:
        config(data, *words)
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_another_choice_of_what_is_kept_needs_no_new_samples(data):
    unsolved = config(data, "n=8").identity()
    assert config(data, "n=8", "keep=agree", "k=3", "replicas=1", "in_flight=4").identity() == unsolved
    assert config(data, "n=8", "temperature=0.5").identity() != unsolved
