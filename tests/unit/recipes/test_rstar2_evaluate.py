"""What an evaluation says of its samples, and with which budgets it samples by protocol."""

import io
import json

import pytest
from rich.console import Console

from engine.console.options import parse
from engine.errors import BadInput
from recipes.rstar2.evaluate import Config, figures_of, table_of
from recipes.rstar2.parts.sampling.options import named_sets
from recipes.rstar2.parts.sampling.rows import Row
from tests.support.paths import TINY


def a_row(name, rewards, **parts):
    count = len(rewards)
    given = {
        "answers": ("1",) * count,
        "tokens": (10,) * count,
        "turns": (1,) * count,
        "calls": (0,) * count,
        "failed_calls": (0,) * count,
        "stops": ("answer",) * count,
    }
    solved = sum(reward > 0 for reward in rewards)
    return Row(id=name, solved=solved, samples=count, rewards=tuple(rewards), **{**given, **parts})


def test_accuracy_is_the_mean_over_problems_with_an_interval():
    found = figures_of([a_row("a", [1.0, 1.0]), a_row("b", [1.0, 0.0]), a_row("c", [0.0, 0.0])])
    assert (found["problems"], found["samples"], found["accuracy"]) == (3, 2, 0.5)
    assert 0 < found["accuracy_low"] < 0.5 < found["accuracy_high"] < 1


def test_pass_at_k_is_unbiased():
    """Of 4 samples 1 is right: two of them hold it in 3 of 6 draws, three in 3 of 4."""
    found = figures_of([a_row("a", [1.0, 0.0, 0.0, 0.0]), a_row("b", [0.0] * 4)])
    assert found["pass_at_k"] == pytest.approx({"1": 0.125, "2": 0.25, "4": 0.5})
    assert figures_of([a_row("a", [0.0, 0.0, 1.0])])["pass_at_k"] == pytest.approx({"1": 1 / 3, "2": 2 / 3, "3": 1.0})


def test_shares_are_of_rollouts_and_of_calls():
    rows = [
        a_row("a", [1.0, 0.0], calls=(3, 1), failed_calls=(1, 1), tokens=(10, 30), turns=(4, 2)),
        a_row("b", [0.0, 0.0], stops=("length", "turns"), answers=(None, "7"), tokens=(50, 10)),
    ]
    found = figures_of(rows)
    assert (found["tokens_per_rollout"], found["turns_per_rollout"], found["tool_calls_per_rollout"]) == (25, 2, 1)
    assert found["tool_error_share"] == 0.5
    assert (found["truncated_share"], found["out_of_turns_share"], found["no_answer_share"]) == (0.25, 0.25, 0.25)


def test_a_set_without_a_call_has_no_failed_ones():
    assert figures_of([a_row("a", [1.0])])["tool_error_share"] == 0


def test_the_table_has_a_column_for_each_set():
    figures = figures_of([a_row("a", [1.0, 0.0])]) | {"problems_failed": 3}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of({"aime24": figures, "math[500]": figures}, "model"))
    text = console.export_text()
    assert "aime24" in text
    assert "math[500]" in text
    assert "1 x 2" in text


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "aime24.jsonl"
    path.write_text('{"problem": "6 * 7?", "answer": "42"}\n{"problem": "6 * 8?", "answer": "48"}\n')
    return path


def model_for(tokens, folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": tokens, "num_hidden_layers": 2}))
    return folder


@pytest.mark.parametrize(("protocol", "temperature", "turns"), [("report", 0.6, 30), ("release", 0.0, 5)])
def test_protocols(data, tmp_path, protocol, temperature, turns):
    model = model_for(1 << 16, tmp_path / "model")
    made = parse(Config, [f"model={model}", f"sets={data}", f"protocol={protocol}"])
    budget = made.budget()
    assert (made.k, budget.temperature, budget.max_turns) == (16, temperature, turns)
    assert budget.max_response_tokens == 30 * 1024


def test_options_override_a_protocol(data):
    words = ["max_tokens=230", "samples=3", "temperature=0", "turns=2"]
    made = parse(Config, [f"model={TINY}", f"sets={data}", "protocol=report", *words])
    budget = made.budget()
    assert (made.k, budget.temperature, budget.max_turns, budget.max_tokens) == (3, 0, 2, 230)
    assert budget.max_response_tokens is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "sets"),
        (["sets=missing.jsonl"], "missing.jsonl"),
        (["sets={data}", "samples=0"], "samples"),
        (["sets={data}", "max_tokens=5000"], "max_position_embeddings"),
        (["sets={data}", "max_tokens=200", "replicas=0"], "replicas"),
    ],
)
def test_what_cannot_be_is_refused_by_name(data, capsys, words, named):
    with pytest.raises(SystemExit) as end:
        parse(Config, [f"model={TINY}", *(word.format(data=data) for word in words)])
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_sets_are_named_by_their_files_and_report_under_that_name(data):
    sets = named_sets([data], limit=1)
    assert list(sets) == ["aime24"]
    assert [(prompt.source, prompt.answer) for prompt in sets["aime24"]] == [("aime24", "42")]


def test_two_sets_of_one_name_are_refused(data, tmp_path):
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "aime24.jsonl"
    twin.write_bytes(data.read_bytes())
    with pytest.raises(BadInput, match="aime24"):
        named_sets([data, twin])


@pytest.mark.parametrize(
    "cut", ['{"problem": "6 * 9?", "ans', '{"problem": "6 * 9?"}\n{"problem": "1?", "answer": "1"}\n']
)
def test_a_bad_row_anywhere_is_told_with_its_line(data, cut):
    good = '{"problem": "6 * 7?", "answer": "42"}\n'
    data.write_text(good * 20 + cut)
    with pytest.raises(BadInput, match="line 21"):
        named_sets([data])


def test_where_it_is_computed_decides_no_figure(data):
    words = [f"model={TINY}", f"sets={data}", "max_tokens=230"]
    plain = parse(Config, words).identity({"aime24": "1"})
    elsewhere = parse(Config, [*words, "replicas=1", "in_flight=4", "slots=2", "kv_blocks=1500", "problems=1"])
    assert elsewhere.identity({"aime24": "1"}) == plain
    assert parse(Config, [*words, "temperature=1"]).identity({"aime24": "1"}) != plain
    assert parse(Config, words).identity({"aime24": "2"}) != plain
