"""A quick start records itself: read while it runs, after kill -9 and a resume, and without changing what it trains."""

from __future__ import annotations

import json
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
    found = [member.reward for group in groups for member in group.trajectories if member.reward is not None]
    assert np.mean(found) == pytest.approx(reward)
    assert run.tokenizer is not None
    tokenizer = Tokenizer.from_file(str(run.tokenizer))
    for group in groups:
        assert all({"p_err", "p_format", "probability"} == set(member.reasons) for member in group.trajectories)
        tokens = run.tokens(step, group.group)
        assert tokens is not None
        for member, sequences in zip(group.trajectories, tokens.trajectories, strict=True):
            assert member.error is None
            [turns], [sequence] = member.sequences, sequences
            assert all(turn.placed and turn.placed[-1].replica == turn.replica for turn in turns)
            assert all(
                member.started_at <= turn.queued_at <= turn.started_at <= turn.finished_at <= member.finished_at
                for turn in turns
            )
            assert int(sequence.sampled.sum()) == member.sampled_tokens
            assert group.messages[-1]["content"] in tokenizer.decode(sequence.token_ids.tolist())
            if member.kept:
                assert sequence.learner_logprobs is not None
                assert sequence.logprobs is not None
                assert np.isnan(sequence.learner_logprobs).tolist() == (~sequence.sampled).tolist()
                difference = sequence.learner_logprobs - sequence.logprobs
                assert np.nanmax(np.abs(difference)) < 1.0  # the second minibatch comes after an update
            else:
                assert sequence.learner_logprobs is None


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
