"""What a recorded run's model wrote: shown in a terminal, and as JSON lines."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.commands.rollouts import Options, main, panel, rollouts
from engine.recording import files
from engine.recording.in_flight import NAME
from engine.recording.reader import RecordedRun
from engine.recording.records import FORMAT
from engine.types import Segment
from tests.support.algo_fakes import tool_use
from tests.support.fakes import a_prompt, a_rollout, a_trajectory
from tests.support.recorded_run import TOKENIZER, damaged, write_recorded_run
from tests.support.viewed_runs import write_in_flight, write_viewed_run


@pytest.fixture
def run(tmp_path):
    write_recorded_run(tmp_path, steps=2, groups=3, samples=2)
    return tmp_path


def test_the_reader_shows_what_is_asked_for(run, capsys):
    assert [each.step for each in rollouts(Options(run=run))] == [2] * 6, "the last one unless a step is given"
    assert [each.trajectory.reward for each in rollouts(Options(run=run, step=1, only="right"))] == [1.0, 1.0]
    assert [each.kept for each in rollouts(Options(run=run, only="kept"))] == [True] * 4
    assert main([str(run), "first=1", "prompt=train-2-1"]) == 0
    shown = capsys.readouterr().out
    assert "train-2-1 #0" in shown
    assert "train-2-1 #1" not in shown


def test_a_line_of_json_is_a_trajectory_with_the_names_of_its_types(run, capfdbinary):
    assert main([str(run), "step=1", "prompt=train-1-1", "jsonl=true"]) == 0
    first, second = map(json.loads, capfdbinary.readouterr().out.splitlines())
    recorded = RecordedRun(run).groups(1)[1]
    tokens = RecordedRun(run).tokens(1, 1).trajectories
    assert [first[name] for name in ("step", "group", "kept", "advantage", "drop")] == [1, 1, True, 1.0, None]
    assert [each["trajectory"]["prompt"]["id"] for each in (first, second)] == [recorded.group.prompt.id] * 2
    trajectory = first["trajectory"]
    assert [use["response"] for use in trajectory["turns"][0]["tool_uses"]] == ["NameError: x", "42\n"]
    ids_T = trajectory["token_ids_T"]
    assert ids_T == tokens[0][0].token_ids_T.tolist()
    np.testing.assert_allclose(trajectory["logprobs_T"], tokens[0][0].logprobs_T)
    spans = [ids_T[turn["start"] : turn["end"]] for turn in trajectory["turns"]]
    decode = Tokenizer.from_file(str(TOKENIZER)).decode
    assert trajectory["text"] == "".join(decode(ids, skip_special_tokens=False) for ids in spans)


def test_numbers_that_were_not_recorded_are_null(run, capfdbinary):
    assert main([str(run), "step=1", "prompt=train-1-2", "jsonl=true", "first=1"]) == 0
    [line] = capfdbinary.readouterr().out.splitlines()
    trajectory = json.loads(line)["trajectory"]
    assert set(trajectory["logprobs_T"]) == {None}
    assert len(trajectory["token_ids_T"]) == len(trajectory["logprobs_T"])


@pytest.mark.parametrize("how", ["cut", "flipped"])
@pytest.mark.parametrize("options", [[], ["jsonl=true"]])
def test_a_damaged_step_says_how_many_of_its_groups_can_be_read(run, how, options, capsys):
    damaged(files.step_path(files.folder_of(run), 2), how)
    assert main([str(run), *options]) in (0, 2)  # 2 where none can be
    assert "of 3 groups of step 2 can be read" in capsys.readouterr().err


def test_what_is_not_there_is_one_line(tmp_path, capsys):
    for run in (tmp_path, tmp_path / "nowhere"):
        assert main([str(run)]) == 2
        assert str(run) in capsys.readouterr().err
    write_recorded_run(tmp_path, steps=2)
    assert main([str(tmp_path), "step=7"]) == 2
    assert "1, 2" in capsys.readouterr().err
    path = files.index_path(files.folder_of(tmp_path))
    path.write_bytes(path.read_bytes().replace(b'"format":%d' % FORMAT, b'"format":1'))
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("jsonl", ["jsonl=true", "jsonl=false"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prompt=nope"], "step 2 has no prompt nope. Fix: one of train-2-0, train-2-1"),
        (["only=kept", "prompt=train-2-0"], "dropped (flat)"),
        (["only=right", "prompt=train-2-0"], "only=right"),
        (["first=0"], "first=0"),
    ],
)
def test_it_is_said_that_nothing_fits(run, capsys, words, says, jsonl):
    assert main([str(run), *words, jsonl]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert says in told.err
    assert told.err.count("\n") == 1


def test_a_negative_number_of_trajectories_is_refused_by_its_name(run, capsys):
    with pytest.raises(ValueError, match="first must be"):
        Options(first=-3)
    assert main([str(run), "only=kept"]) == 0
    assert capsys.readouterr().err == ""


def shown(trajectory, capsys, **fields):
    from rich.console import Console

    Console(width=200).print(panel(a_rollout(trajectory, **fields)))
    return capsys.readouterr().out


def test_the_scores_of_a_reward_are_shown(capsys):
    scored = replace(a_trajectory(reward=1.0), scores={"style": 0.25, "words": None})
    assert "style 0.25, words -" in shown(scored, capsys)


def test_responses_stand_below_the_calls_that_they_answer(capsys):
    uses = [replace(tool_use("ok"), response=f"response {number}") for number in range(3)]
    text = "first<tool_call>{}</tool_call>then<tool_call>{}</tool_call><|im_end|>last"
    out = shown(replace(a_trajectory(reward=1.0, uses=uses, prompt=a_prompt()), text=text), capsys)
    pieces = ["first", "response 0", "then", "response 1", "last", "response 2"]
    places = [out.index(piece) for piece in pieces]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kept": True, "advantage": 0.5}, "+0.50"),
        ({"kept": True, "advantage": None}, "  trained"),
        ({"kept": False, "advantage": None, "drop": "flat"}, "(flat)"),
    ],
)
def test_it_is_said_whether_a_trajectory_was_trained(fields, says, capsys):
    assert says in shown(a_trajectory(reward=1.0), capsys, **fields)


def test_conversations_of_an_agent_stand_apart(capsys):
    main_one = replace(tool_use("ok"), response="from the main one")
    other = replace(tool_use("error"), response="from the other")
    aside = a_trajectory(uses=[other])
    segment = Segment(
        token_ids_T=aside.token_ids_T,
        sampled_T=aside.sampled_T,
        logprobs_T=aside.logprobs_T,
        versions_T=aside.versions_T,
        turns=aside.turns,
    )
    text = "<tool_call>{}</tool_call>That is it.<tool_call>{}</tool_call>"
    trajectory = replace(a_trajectory(uses=[main_one]), text=text, segments=(segment,))
    out = shown(trajectory, capsys)
    places = [out.index(part) for part in ("from the main one", "That is it", "conversation 2", "from the other")]
    assert places == sorted(places)


def test_rollouts_under_way_are_listed_with_their_counts(tmp_path, capsys):
    run = tmp_path / "run"
    write_viewed_run(run, recorded=0)
    write_in_flight(run, rollouts=8)
    assert main([str(run), "in_flight=true", "first=3"]) == 0
    out = capsys.readouterr().out
    assert "8 rollouts" in out
    assert "1 grading" in out
    assert [f"p{number}" in out for number in (7, 6, 5, 4)] == [True, True, True, False]
    (run / NAME).unlink()
    assert main([str(run), "in_flight=true"]) == 2
    assert "has not written" in capsys.readouterr().err
