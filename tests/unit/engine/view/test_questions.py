"""What the page asks about runs, and what it is told of what is not there."""

import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.encoding import HEADER
from engine.recording import files
from engine.recording.records import FORMAT
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
    assert (trained["samples"], trained["kept"]) == ([0, 1, 2, 3], (0, 1, 2, 3))
    assert (trained["rewards"], trained["tokens"]) == ([1.0, 0.0, 1.0, 0.0], [40, 20, 20, 20])
    assert (trained["wrong"], trained["cut"], trained["failed"]) == ([0], [], [])
    assert found["first"] == {"group": 1, "sample": 0}
    query = {"run": "0", "step": "2", "group": "1"}
    member = questions(tmp_path / "run").answer("members", query)["trajectories"][0]
    assert member["reasons"] == {"p_err": 0.5, "p_format": 0.0, "probability": 0.75}
    assert [use["outcome"] for use in member["turns"][0]["tool_uses"]] == ["error", "ok"]
    assert (member["kept"], member["advantage"]) == (True, 1.0)


def test_a_recorded_trajectory_has_its_texts_its_placement_and_both_log_probabilities(tmp_path):
    write_viewed_run(tmp_path / "run")
    run = questions(tmp_path / "run")
    words = {"run": "0", "step": "1", "group": "1", "sample": "0"}
    found = run.answer("trajectory", words)
    tokens, turns = found["parts"][0]["tokens"], found["parts"][0]["turns"]
    recorded = run.runs[0].recorded.tokens(1, 1).trajectories[0][0]
    text = Tokenizer.from_file(str(TOKENIZER)).decode(recorded.token_ids_T.tolist(), skip_special_tokens=False)
    assert text.rstrip("�").startswith("".join(tokens["text_T"]).rstrip("�"))  # the ids are random
    assert len(tokens["text_T"]) == len(recorded.token_ids_T)
    assert turns[0]["text"] == "".join(tokens["text_T"][turns[0]["start"] : turns[0]["end"]])
    assert turns[0]["placed"][0]["rule"] == "fresh"
    trained = np.flatnonzero(~np.isnan(recorded.learner_logprobs_T))
    ratio_T = np.exp(recorded.learner_logprobs_T - recorded.logprobs_T)
    np.testing.assert_allclose([tokens["ratio_T"][at] for at in trained], ratio_T[trained], atol=1e-4)
    assert tokens["ratio_T"][0] is None


def test_the_page_has_the_field_names_and_values_of_the_types(tmp_path):
    write_viewed_run(tmp_path / "run")
    run = questions(tmp_path / "run")
    found = run.answer("trajectory", {"run": "0", "step": "1", "group": "1", "sample": "0"})
    recorded = run.runs[0].recorded.groups(1)[1]
    member = recorded.group.trajectories[0]
    assert found["prompt"] == msgspec.to_builtins(recorded.group.prompt)
    [part] = found["parts"]
    turns = [{**turn, "text": None} for turn in part["turns"]]
    assert turns == [{**msgspec.to_builtins(turn, str_keys=True), "text": None} for turn in member.turns]
    names = ("sample", "temperature", "stop", "error", "reward", "scores", "answer", "started_at", "finished_at")
    assert [found[name] for name in names] == [getattr(member, name) for name in names]


def test_a_trained_trajectory_marks_its_uncertain_tokens_after_a_reply(tmp_path):
    write_viewed_run(tmp_path / "run")
    words = {"run": "0", "step": "1", "group": "1", "sample": "0"}
    [part] = questions(tmp_path / "run").answer("trajectory", words)["parts"]
    tokens, (first, second) = part["tokens"], part["turns"]
    entropies = [np.nan if entropy is None else entropy for entropy in tokens["learner_entropy_T"]]
    uncertain = np.flatnonzero(entropies > np.nanquantile(entropies, 0.8))
    assert set(uncertain) & set(range(first["start"], first["end"]))
    assert np.flatnonzero(tokens["reflection_T"]).tolist() == [at for at in uncertain if at >= second["start"]]
    assert len(tokens["forking_T"]) == len(tokens["token_ids_T"])


def test_the_texts_of_tokens_hold_control_tokens_too():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    text = "<|im_start|>user\nWhat is 6 * 7?<|im_end|>"
    assert "".join(pieces(tokenizer, tokenizer.encode(text).ids)) == text


def test_a_seed_is_written_out_as_a_browser_would_round_it(tmp_path):
    write_viewed_run(tmp_path / "run")
    found = questions(tmp_path / "run").answer("trajectory", {"run": "0", "step": "1", "group": "1", "sample": "3"})
    assert found["seed"] == "1003"


def test_a_run_without_a_record_says_so_and_why(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    for name in ("groups", "placement"):
        with pytest.raises(NotThere, match="max_mb"):
            questions(tmp_path / "run").answer(name, {"run": "0", "step": "1"})


def test_a_run_that_another_version_recorded_says_so_on_every_page(tmp_path):
    write_viewed_run(tmp_path / "run")
    path = files.index_path(files.folder_of(tmp_path / "run"))
    path.write_bytes(path.read_bytes().replace(b'"format":%d' % FORMAT, b'"format":1'))
    [run] = questions(tmp_path / "run").answer("runs", {})["runs"]
    assert "format 1" in run["problems"][0]
    assert run["rows"] == 3, "its metrics are there"


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
    assert calls["merged"] == 0


def test_every_decision_of_a_step_is_told_with_its_reason(tmp_path):
    write_viewed_run(tmp_path / "run", groups=2, samples=2)
    found = questions(tmp_path / "run").answer("placement", {"run": "0", "step": "1"})
    assert [(rule["rule"], rule["count"]) for rule in found["rules"]] == [("fresh", 4), ("home", 2)]
    assert found["rules"][0]["waited_s"] == pytest.approx(0.01)
    query = {"run": "0", "step": "1", "page": "0"}
    decisions = questions(tmp_path / "run").answer("decisions", query)["decisions"]
    assert len(decisions) == found["count"] == 6
    assert [one["at"] for one in decisions] == sorted(one["at"] for one in decisions)
    assert decisions[0]["at"] == found["started_at"]
    assert decisions[0]["free_blocks"] == {"0": 150, "1": 140}
    assert questions(tmp_path / "run").answer("decisions", query | {"page": "1"})["decisions"] == []


def test_tokens_are_counted_by_the_age_of_their_weights(tmp_path):
    write_viewed_run(tmp_path / "run")
    found = questions(tmp_path / "run").answer("tokens", {"run": "0", "step": "3"})
    assert found["ages"] == {"1": 3 * (40 + 3 * 20)}  # version 1 in a step on top of version 2, of three groups


def test_mismatch_is_told_of_tokens_that_the_weights_under_training_sampled(tmp_path):
    write_viewed_run(tmp_path / "run", groups=3, samples=2)
    found = questions(tmp_path / "run").answer("tokens", {"run": "0", "step": "3"})["positions"]
    assert set(found["mismatch"]) == {None}, "version 1 sampled, version 2 was trained"
    assert None not in found["entropy"]


def test_mismatch_is_told_by_position_among_the_sampled_tokens(tmp_path):
    write_viewed_run(tmp_path / "run", groups=3, samples=2)
    run = questions(tmp_path / "run")
    found = run.answer("tokens", {"run": "0", "step": "2"})["positions"]
    group = run.runs[0].recorded.tokens(2, 1)  # the first group is flat, the last has no numbers
    [one], [two] = (
        np.abs(tokens.learner_logprobs_T - tokens.logprobs_T)[tokens.sampled_T][None] for [tokens] in group.trajectories
    )
    first = [one[0], two[0], one[1], two[1]]  # 40 and 20 tokens in 16 bins
    np.testing.assert_allclose(found["mismatch"][0], np.mean(first), rtol=1e-5)
    assert found["position"] == sorted(found["position"])
    assert found["position"][0] == 0.5


def made_slow(run: Path, *, step: int, seconds: float) -> None:
    """The last call of the first trajectory of a step's last group took so long."""
    path = files.step_path(files.folder_of(run), step)
    row, *groups = files.read_frames(path, 0, 3)
    first, *others = groups[-1].group.trajectories
    turn, *later = first.turns
    *uses, use = turn.tool_uses
    use = replace(use, finished_at=use.dispatched_at + seconds)
    first = replace(first, turns=(replace(turn, tool_uses=(*uses, use)), *later))
    group = replace(groups[-1].group, trajectories=(first, *others))
    groups[-1] = msgspec.structs.replace(groups[-1], group=group)
    files.write(path, [files.packed(record) for record in (row, *groups)])


def test_tool_calls_are_counted_and_the_slowest_are_told_whole(tmp_path):
    write_viewed_run(tmp_path / "run", groups=2)
    made_slow(tmp_path / "run", step=2, seconds=3.0)
    found = questions(tmp_path / "run").answer("tool-calls", {"run": "0", "first": "1", "last": "2"})
    assert found["steps"] == [1, 2]
    assert found["count"] == 8  # two steps of two groups, each with two calls
    assert [(kind["outcome"], kind["count"], kind["queue_s"]) for kind in found["kinds"]] == [
        ("error", 4, 0.04),
        ("ok", 4, 0.04),
    ]
    assert found["kinds"][0]["run_s"] == pytest.approx(0.16)
    assert found["kinds"][1]["p99_s"] == pytest.approx(3.0, rel=0.1)
    assert sum(found["histogram"]["counts"]) == 8
    slowest = found["slowest"][0]
    assert slowest["finished_at"] - slowest["dispatched_at"] == pytest.approx(3.0)
    assert [slowest[name] for name in ("step", "group", "sample", "call")] == [2, 1, 0, 1]
    assert json.loads(slowest["arguments"])["code"]


def test_the_page_run_tells_what_was_given_and_what_was_wasted(tmp_path):
    write_viewed_run(tmp_path / "run")
    found = questions(tmp_path / "run").answer("about", {"run": "0"})
    assert found["given"] == ["learner.lr"]
    assert found["waste"] == {"trained": 960, "flat": 300, "not_selected": 180}
    assert found["recording"]["whole"] == (1, 2, 3)


def test_a_torn_step_says_how_many_of_its_groups_are_left(tmp_path):
    write_viewed_run(tmp_path / "run", groups=8)
    path = files.step_path(files.folder_of(tmp_path / "run"), 3)
    ends = []
    with path.open("rb") as file:
        while header := file.read(HEADER.size):
            file.seek(HEADER.unpack(header)[0], os.SEEK_CUR)
            ends.append(file.tell())
    os.truncate(path, ends[5] + 7)  # its row, five groups, and a part of the next
    found = questions(tmp_path / "run").answer("groups", {"run": "0", "step": "3"})
    assert (len(found["groups"]), found["groups_written"]) == (5, 8)
    placement = questions(tmp_path / "run").answer("placement", {"run": "0", "step": "3"})
    assert (placement["groups"], placement["groups_written"]) == (5, 8)
    calls = questions(tmp_path / "run").answer("tool-calls", {"run": "0", "first": "1", "last": "3"})
    assert calls["damage"] == ["The record of step 3 is damaged: 5 of 8 groups of step 3 can be read."]
