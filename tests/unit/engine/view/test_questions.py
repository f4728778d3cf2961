"""What the page asks about runs, and what it is told of what is not there."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from engine.recording import files
from engine.stages.write_rollouts import path_of
from engine.view.answers.tokens import pieces
from engine.view.answers.trajectories import NotThere
from engine.view.questions import Questions
from engine.view.run_files import RunFiles
from tests.support.recorded_run import TOKENIZER
from tests.support.viewed_runs import metrics, run_under_way, write_viewed_run


def questions(path, **options):
    return Questions([RunFiles(path)], **options)


def test_metrics_come_as_columns_and_only_those_after_a_row(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    asked = questions(tmp_path / "run")
    found = asked.answer("metrics", {"run": "0"})
    assert found["step"] == [1, 2, 3]
    assert found["values"]["eval/n"] == [None, 128, None]
    later = asked.answer("metrics", {"run": "0", "after": "2"})
    assert later["step"] == [3]
    assert later["values"]["reward"] == [metrics(3)["reward"]]


def test_a_run_is_read_again_only_where_it_is_followed(tmp_path):
    with run_under_way(tmp_path / "run", steps=1) as folder:
        still, follows = questions(tmp_path / "run"), questions(tmp_path / "run", follow=True)
        folder.step(2, metrics(2))
        assert [asked.answer("runs", {})["runs"][0]["last"] for asked in (still, follows)] == [1, 2]


def test_runs_that_differ_by_their_seed_are_of_one_family(tmp_path):
    seeds = [("seed=0", 0, 0.5), ("seed=1", 1, 0.5), ("lr=0.7", 0, 0.7)]
    for option, seed, lr in seeds:
        write_viewed_run(tmp_path / option, recorded=0, options=[option], argv=[option], seed=seed, lr=lr)
    asked = Questions([RunFiles(tmp_path / option) for option, _, _ in seeds])
    first, again, other = (run["family"] for run in asked.answer("runs", {})["runs"])
    assert first == again != other


def test_what_limits_a_run_says_whether_it_was_measured(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    found = questions(tmp_path / "run").answer("now", {"run": "0"})
    assert found["measured"]
    assert found["sentence"]
    assert {"limit", "alarms", "advice", "lost"} <= found.keys()
    json.dumps(msgspec.to_builtins(found))


def test_a_recorded_group_shows_the_choice_among_its_trajectories(tmp_path):
    write_viewed_run(tmp_path / "run")
    found = questions(tmp_path / "run").answer("groups", {"run": "0", "step": "2"})
    flat, trained = found["groups"][:2]
    assert flat["drop"] == "flat"
    member = trained["trajectories"][0]
    assert member["reasons"] == {"p_err": 0.5, "p_format": 0.0, "probability": 0.75}
    assert [call[0] for call in member["turns"][0]["calls"]] == ["error", "ok"]


def test_a_recorded_trajectory_has_its_texts_its_placement_and_both_log_probabilities(tmp_path):
    write_viewed_run(tmp_path / "run")
    run = questions(tmp_path / "run")
    words = {"run": "0", "step": "1", "group": "1", "sample": "0"}
    found = run.answer("trajectory", words)
    tokens, turns = found["sequences"][0]["tokens"], found["sequences"][0]["turns"]
    recorded = run.runs[0].recorded.tokens(1, 1).trajectories[0][0]
    text = Tokenizer.from_file(str(TOKENIZER)).decode(recorded.token_ids.tolist(), skip_special_tokens=False)
    assert text.rstrip("�").startswith("".join(tokens["text"]).rstrip("�"))  # the ids are random
    assert len(tokens["text"]) == len(recorded.token_ids)
    assert turns[0]["text"] == "".join(tokens["text"][turns[0]["start"] : turns[0]["end"]])
    assert turns[0]["placed"][0]["rule"] == "fresh"
    trained = np.flatnonzero(~np.isnan(recorded.learner_logprobs))
    ratio = np.exp(recorded.learner_logprobs - recorded.logprobs)
    np.testing.assert_allclose([tokens["ratio"][at] for at in trained], ratio[trained], atol=1e-4)
    assert tokens["ratio"][0] is None


def test_a_trained_trajectory_marks_its_uncertain_tokens_after_a_reply(tmp_path):
    write_viewed_run(tmp_path / "run")
    words = {"run": "0", "step": "1", "group": "1", "sample": "0"}
    [sequence] = questions(tmp_path / "run").answer("trajectory", words)["sequences"]
    tokens, (first, second) = sequence["tokens"], sequence["turns"]
    entropies = [np.nan if entropy is None else entropy for entropy in tokens["entropy"]]
    uncertain = np.flatnonzero(entropies > np.nanquantile(entropies, 0.8))
    assert set(uncertain) & set(range(first["start"], first["end"]))
    assert np.flatnonzero(tokens["reflection"]).tolist() == [at for at in uncertain if at >= second["start"]]
    assert len(tokens["forking"]) == len(tokens["ids"])


def test_the_texts_of_tokens_hold_control_tokens_too():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    text = "<|im_start|>user\nWhat is 6 * 7?<|im_end|>"
    assert "".join(pieces(tokenizer, tokenizer.encode(text).ids)) == text


def test_a_seed_is_written_out_as_a_browser_would_round_it(tmp_path):
    write_viewed_run(tmp_path / "run")
    found = questions(tmp_path / "run").answer("trajectory", {"run": "0", "step": "1", "group": "1", "sample": "3"})
    assert found["seed"] == "1003"


ROW = {
    "step": 8, "prompt_id": "train-0", "question": "2 + 2?", "answer": "4", "text": "4", "reward": 1.0, "kept": True,
    "advantage": 0.5, "drop": None, "stop": "answer", "tokens": 2, "turns": [[1, 3]],
    "calls": [{"name": "python", "arguments": "{}", "outcome": "ok", "reply": "4", "turn": 0}],
}  # fmt: skip


def with_rollouts(run: Path) -> Path:
    write_viewed_run(run, recorded=0)
    path_of(run, 8).parent.mkdir()
    rows = [ROW | {"sample": 0}, ROW | {"sample": 1}, ROW | {"prompt_id": "train-1", "sample": 0}]
    path_of(run, 8).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_run_without_a_recording_shows_the_rollouts_that_it_has_written(tmp_path):
    asked = questions(with_rollouts(tmp_path / "run"))
    found = asked.answer("groups", {"run": "0", "step": "8"})
    assert found["source"] == "rollouts"
    assert [len(group["trajectories"]) for group in found["groups"]] == [2, 1]
    one = asked.answer("trajectory", {"run": "0", "step": "8", "group": "0", "sample": "1"})
    assert one["sequences"][0]["turns"][0]["calls"][0]["reply"] == "4"


def test_a_damaged_row_of_rollouts_is_named_by_file_and_line(tmp_path):
    run = with_rollouts(tmp_path / "run")
    path_of(run, 8).write_text(json.dumps(ROW | {"sample": 0}) + "\n{broken\n")
    with pytest.raises(ValueError, match="line 2") as found:
        questions(run).answer("groups", {"run": "0", "step": "8"})
    assert path_of(run, 8).name in str(found.value)


def test_what_a_run_does_not_have_is_said_with_what_it_has(tmp_path):
    write_viewed_run(tmp_path / "run", steps=12, recorded=3)
    asked = questions(tmp_path / "run")
    with pytest.raises(NotThere, match="1, 2, 3"):
        asked.answer("groups", {"run": "0", "step": "9"})
    for name, words in (
        ("trajectory", {"step": "1", "group": "1", "sample": "77"}),
        ("trajectory", {"step": "1", "group": "77", "sample": "0"}),
        ("timeline", {"first": "9", "last": "9"}),
        ("placement", {"step": "9"}),
        ("tool-calls", {"first": "9", "last": "12"}),
        ("tokens", {"step": "9"}),
        ("nonsense", {}),
    ):
        with pytest.raises(NotThere):
            asked.answer(name, {"run": "0"} | words)
    with pytest.raises(NotThere):
        asked.answer("metrics", {"run": "1"})
    with pytest.raises(ValueError, match="step"):
        asked.answer("groups", {"run": "0", "step": "last"})


def test_a_timeline_is_seconds_of_one_axis_for_all_steps_asked_for(tmp_path):
    write_viewed_run(tmp_path / "run")
    found = questions(tmp_path / "run").answer("timeline", {"run": "0", "first": "1", "last": "2"})
    assert [step for step, _, _ in found["steps"]] == [1, 2]
    assert found["seconds"] == pytest.approx(4.0)
    assert [replica["replica"] for replica in found["replicas"]] == [0, 1]
    idle = found["replicas"][0]["idle"]
    assert sum(end - begin for _, begin, end in idle) == pytest.approx(4.0)
    assert {track["track"] for track in found["tracks"]} >= {"trajectories", "tool calls", "learner", "weights"}
    calls = next(track["spans"] for track in found["tracks"] if track["track"] == "tool calls")
    assert calls["name"] == ["error", "error"]


def test_every_decision_of_a_step_is_told_with_its_reason(tmp_path):
    write_viewed_run(tmp_path / "run", groups=2, samples=2)
    found = questions(tmp_path / "run").answer("placement", {"run": "0", "step": "1"})
    assert found["rules"] == {"fresh": 4, "home": 2}
    assert [one["at_s"] for one in found["decisions"]] == sorted(one["at_s"] for one in found["decisions"])
    assert found["decisions"][0]["free_blocks"] == {"0": 150, "1": 140}


def test_tokens_are_counted_by_the_age_of_their_weights(tmp_path):
    write_viewed_run(tmp_path / "run")
    found = questions(tmp_path / "run").answer("tokens", {"run": "0", "step": "3"})
    assert found["ages"] == {"1": 3 * (40 + 3 * 20)}  # version 1 in a step on top of version 2, of three groups


def test_mismatch_is_told_by_position_among_the_sampled_tokens(tmp_path):
    write_viewed_run(tmp_path / "run", groups=3, samples=2)
    run = questions(tmp_path / "run")
    found = run.answer("tokens", {"run": "0", "step": "1"})["positions"]
    group = run.runs[0].recorded.tokens(1, 1)  # the first group is flat, the last has no numbers
    [one], [two] = (
        np.abs(tokens.learner_logprobs - tokens.logprobs)[tokens.sampled][None] for [tokens] in group.trajectories
    )
    first = [one[0], two[0], one[1], two[1]]  # 40 and 20 tokens in 16 bins
    np.testing.assert_allclose(found["mismatch"][0], np.mean(first), rtol=1e-5)
    assert found["position"] == sorted(found["position"])
    assert found["position"][0] == 0.5


def made_slow(run: Path, *, step: int, seconds: float) -> None:
    """The last call of the first trajectory of a step's last group took so long."""
    path = files.step_path(files.folder_of(run), step)
    row, *groups = files.read_frames(path, 0, 3)
    first, *others = groups[-1].trajectories
    turn, *later = first.sequences[0]
    *calls, call = turn.calls
    call = replace(call, finished_at=call.dispatched_at + seconds)
    first = replace(first, sequences=((replace(turn, calls=(*calls, call)), *later),))
    groups[-1] = replace(groups[-1], trajectories=(first, *others))
    files.write(path, [files.packed(record) for record in (row, *groups)])


def test_tool_calls_are_counted_and_the_slowest_are_told_whole(tmp_path):
    write_viewed_run(tmp_path / "run", groups=2)
    made_slow(tmp_path / "run", step=2, seconds=3.0)
    found = questions(tmp_path / "run").answer("tool-calls", {"run": "0", "first": "1", "last": "2"})
    assert found["steps"] == [1, 2]
    assert len(found["latency_s"]) == 8  # two steps of two groups, each with two calls
    slowest = found["slowest"][0]
    assert slowest["latency_s"] == pytest.approx(3.0)
    assert [slowest[name] for name in ("step", "group", "sample", "call")] == [2, 1, 0, 1]
    assert json.loads(slowest["arguments"])["code"]


def test_the_page_run_tells_what_was_given_and_what_was_wasted(tmp_path):
    write_viewed_run(tmp_path / "run")
    found = questions(tmp_path / "run").answer("about", {"run": "0"})
    assert found["given"] == ["learner.lr"]
    assert found["waste"] == {"trained": 960, "flat": 300, "not_selected": 180}
    assert found["recording"]["whole"] == (1, 2, 3)
