"""A quick start records itself: read while it runs, after kill -9 and a resume, and without changing what it trains."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from engine.recording import files
from engine.recording.reader import RecordedRun
from tests.support.runs import SMALL, Run, command, metrics, numbers

FIELDS = [*SMALL, "steps=4", "checkpoint_every=1", "eval_every=4"]


@pytest.mark.timeout(400)
def test_it_can_be_read_while_it_runs_and_goes_on_after_a_kill(started: list[Run], tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    first = Run(command(tmp_path, *FIELDS))
    started.append(first)
    first.until("step   2")
    live = RecordedRun(folder)
    assert 1 in live.steps
    assert len(live.groups(1)) == 4
    assert any(segment.spans for segment in live.timeline(1, 1))
    first.process.kill()
    assert first.end() == -9
    torn = files.timeline_path(live.folder, 2)
    with torn.open("ab") as file:
        file.write(b"the start of a frame")

    last = Run(command(tmp_path, *FIELDS, "record.newest=7"))  # it is the same run all the same
    started.append(last)
    assert last.end() == 0, last.text()
    run = RecordedRun(folder)
    assert run.steps == [1, 2, 3, 4]
    assert [row.step for row in run.rows()] == [1, 2, 3, 4]
    index = run.index
    assert index is not None
    assert (index.newest, index.problems) == (7, ())
    assert set(run.timeline_steps) >= {1, 2, 3, 4}
    rewards = {int(row["step"]): row["reward"] for row in metrics(folder) if "reward" in row}
    for step in run.steps:
        check_step(run, step, rewards[step])
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]


def check_step(run: RecordedRun, step: int, reward: float) -> None:
    """The record of a step is that of its row in metrics.jsonl, and the learner's numbers are beside the sampler's."""
    from tokenizers import Tokenizer

    groups = run.groups(step)
    assert np.mean(np.concatenate([each.group.rewards_G for each in groups])) == pytest.approx(reward)
    assert run.tokenizer is not None
    tokenizer = Tokenizer.from_file(str(run.tokenizer))
    for each in groups:
        assert all({"p_err", "p_format", "probability"} == set(reasons) for reasons in each.reasons)
        tokens = run.tokens(step, each.number)
        assert tokens is not None
        for index, (member, [part]) in enumerate(zip(each.group.trajectories, tokens.trajectories, strict=True)):
            assert member.error is None
            assert all(turn.placed and turn.placed[-1].replica == turn.replica for turn in member.turns)
            assert all(
                member.started_at <= turn.queued_at <= turn.started_at <= turn.finished_at <= member.finished_at
                for turn in member.turns
            )
            assert abs(member.started_at - time.time()) < 1e4
            assert part.sampled_T.sum() == sum(turn.end - turn.start for turn in member.turns)
            assert each.group.prompt.messages[-1]["content"] in tokenizer.decode(part.token_ids_T.tolist())
            if index in each.group.kept:
                assert part.learner_logprobs_T is not None
                assert part.logprobs_T is not None
                assert np.isnan(part.learner_logprobs_T).tolist() == (~part.sampled_T).tolist()
                difference_T = part.learner_logprobs_T - part.logprobs_T
                assert np.nanmax(np.abs(difference_T)) < 1.0  # the second minibatch comes after an update
            else:
                assert part.learner_logprobs_T is None


@pytest.mark.timeout(400)
def test_recording_changes_nothing_that_is_trained(started: list[Run], tmp_path: Path) -> None:
    for name, option in (("with", "record.max_mb=64"), ("without", "record.max_mb=0")):
        run = Run(command(tmp_path, *SMALL, "steps=2", f"name={name}", option))
        started.append(run)
        assert run.end() == 0, run.text()
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    assert RecordedRun(tmp_path / "with").steps == [1, 2]
    assert not RecordedRun(tmp_path / "without").is_there
    events = json.loads((tmp_path / "without" / "timeline.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in events)
