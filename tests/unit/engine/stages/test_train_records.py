"""The learner's stage hands its steps to the record: each of them, also of a run that was cut off and resumed."""

from __future__ import annotations

import numpy as np
import pytest

from engine.recording.policy import RecordConfig
from engine.recording.reader import RecordedRun
from engine.recording.recording import Recording
from engine.types import LearnerNumbers
from tests.unit.engine.run.test_resume import Life


class Noting:
    """A learner that says of each token what the sampler did, less a half."""

    def __init__(self, learner):
        self.learner = learner
        self.train = learner.train
        self.checkpoint = learner.checkpoint

    async def train_noting(self, batch, version, rows):
        trained, canary = await self.train(batch, version)
        ends = np.cumsum(batch.lengths_B)
        said = {row: batch.logprobs_N[ends[row] - batch.lengths_B[row] : ends[row]] - 0.5 for row in rows}
        return (
            trained,
            canary,
            {row: LearnerNumbers(logprobs_T=T, entropy_T=T, logprob_gradient_T=T) for row, T in said.items()},
        )


def explain(group):
    return [{"sample": member.sample} for member in group.trajectories]


class Recorded(Life):
    """notes: of the recording."""

    def __init__(self, folder, notes, **options):
        super().__init__(folder, **options)
        self.notes = notes

    def pipeline(self, fleet, timeline):
        pipeline = super().pipeline(fleet, timeline)
        self.learn.learner = Noting(self.learner)
        recording = Recording(
            self.run.path,
            RecordConfig(),
            timeline,
            step=self.state.step + 1,
            tokenizer=None,
            note=self.notes.append,
        )
        self.learn.recording, self.learn.explain = recording, explain

        class Both:
            async def run(self):
                async with recording:
                    await pipeline.run()

        return Both()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("cuts", [[], [40], [25, 60, 90]])
async def test_every_step_is_recorded_once_whatever_cut_the_run_off(tmp_path, staleness, cuts):
    notes = []
    for ticks in [*cuts, None]:
        rows = await Recorded(tmp_path, notes, steps=4, staleness=staleness, every=2).live(ticks)
    run = RecordedRun(tmp_path / "run")
    assert notes == []
    assert run.steps == [row.step for row in run.rows()] == [1, 2, 3, 4]
    assert [row["step"] for row in rows[0]] == run.steps
    trained = 0
    for step, row in zip(run.steps, rows[0], strict=True):
        groups = run.groups(step)
        assert np.mean(np.concatenate([each.group.rewards_G for each in groups])) == row["reward"]
        assert [each.group.lease for each in groups] == [2 * (step - 1), 2 * (step - 1) + 1]
        for each in groups:
            assert each.reasons == tuple(explain(each.group))
            tokens = run.tokens(step, each.number).trajectories
            for index, (member, [part]) in enumerate(zip(each.group.trajectories, tokens, strict=True)):
                assert all(turn.placed[-1].replica == turn.replica for turn in member.turns)
                assert all(turn.placed[0].rule for turn in member.turns)
                if index in each.group.kept:
                    trained += 1
                    assert (part.learner_logprobs_T == part.logprobs_T - np.float32(0.5)).all()
                else:
                    assert part.learner_logprobs_T is None
    assert trained


async def test_a_run_that_is_not_recorded_writes_no_record(tmp_path):
    await Life(tmp_path, steps=2).live()
    assert not RecordedRun(tmp_path / "run").is_there
