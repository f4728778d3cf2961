"""A run of which nothing is left to learn ends well; one that trains nothing for another reason ends with its cause."""

import asyncio
import json
from dataclasses import replace

import pytest

from engine.run.identity import Identity
from engine.run.journal import Journal
from engine.run.run_folder import RunFolder
from engine.stages.empty_batches import EMPTY_BATCHES, EmptyBatches, NothingToTrain
from engine.types import Boundary, Group, RolloutError
from tests.support.fakes import a_prompt, a_trajectory
from tests.unit.engine.run.test_resume import Life


def flat(reward, *, drop="flat", sampled=5):
    members = tuple(a_trajectory(sample, reward=reward, sampled=sampled) for sample in range(2))
    return Group(prompt=a_prompt(), trajectories=members, lease=0, drop=drop)


def failed():
    error = RolloutError(boundary=Boundary.SANDBOX, message="no host within 60 s")
    return Group(prompt=a_prompt(), trajectories=(a_trajectory(error=error),), lease=0, drop="error")


TRAINED = replace(flat(1.0, drop=None), kept=(0, 1))
SOLVED, UNSOLVED = flat(1.0), flat(0.0)


def after(batches, full_reward=1.0):
    """What it returns of each batch."""
    watched = EmptyBatches(full_reward)
    return [watched.saw(step, batch) for step, batch in enumerate(batches, 1)]


def test_a_run_whose_batches_are_all_solved_ends_well_and_says_after_which_step():
    *before, ended = after([[SOLVED, SOLVED]] * EMPTY_BATCHES)
    assert before == [None] * (EMPTY_BATCHES - 1)
    assert (ended.step, ended.solved, ended.groups) == (EMPTY_BATCHES - 1, 2 * EMPTY_BATCHES, 2 * EMPTY_BATCHES)
    assert f"step {EMPTY_BATCHES - 1}" in str(ended)


def test_one_batch_with_something_to_train_begins_the_count_anew():
    batches = [[SOLVED, SOLVED]] * (EMPTY_BATCHES - 1) + [[SOLVED, TRAINED]] + [[SOLVED, SOLVED]] * EMPTY_BATCHES
    assert [step for step, ended in enumerate(after(batches), 1) if ended] == [2 * EMPTY_BATCHES]


def test_a_few_prompts_that_nobody_solves_do_not_make_a_fault_of_it():
    *_, ended = after([[SOLVED] * 9 + [UNSOLVED]] * EMPTY_BATCHES)
    assert (ended.solved, ended.groups) == (9 * EMPTY_BATCHES, 10 * EMPTY_BATCHES)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ([UNSOLVED, UNSOLVED], ["20 flat at reward 0"]),
        ([flat(0.5), flat(0.5)], ["20 flat at reward 0.5"]),
        ([SOLVED, UNSOLVED], ["10 solved", "10 flat at reward 0"]),
        ([failed(), SOLVED], ["10 failed", "sandbox: no host within 60 s"]),
        ([flat(0.0, sampled=0)], ["10 flat at reward 0", "no token was sampled", "max_tokens"]),
    ],
)
def test_other_empty_batches_are_a_fault_with_its_cause(batch, told):
    with pytest.raises(NothingToTrain) as fault:
        after([batch] * EMPTY_BATCHES)
    for part in (f"step {EMPTY_BATCHES}", *told):
        assert part in str(fault.value)


def test_what_the_full_reward_is_can_be_said():
    *_, ended = after([[flat(0.5)]] * EMPTY_BATCHES, full_reward=0.5)
    assert ended.step == EMPTY_BATCHES - 1


class Same(Life):
    """Every attempt has this reward."""

    value = 1.0

    async def reward(self, trajectory):
        return self.value


def checkpoints(folder):
    return sorted(int(path.name[5:]) for path in (folder / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_a_solved_run_ends_with_a_checkpoint_and_nothing_under_way(tmp_path, staleness):
    life = Same(tmp_path, steps=30, staleness=staleness, every=4)
    rows, trained = await life.live()
    last = EMPTY_BATCHES - 1
    assert life.learn.nothing_left.step == last
    assert [row["step"] for row in rows] == [step for step, _, _ in trained] == list(range(1, last + 1))
    life.learner.complete()
    assert checkpoints(tmp_path)[-1] == last
    assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_solved_run_that_was_cut_off_ends_well_when_it_is_resumed(tmp_path):
    assert await Same(tmp_path, steps=30, staleness=1).live(checkpoints=2) is None
    life = Same(tmp_path, steps=30, staleness=1)
    rows, trained = await life.live()
    assert life.state.step > 0
    assert life.learn.nothing_left.step == rows[-1]["step"] == trained[-1][0]
    assert [row["step"] for row in rows] == list(range(1, rows[-1]["step"] + 1))


async def test_a_run_that_solves_nothing_fails_and_keeps_what_it_has(tmp_path):
    life = Same(tmp_path, steps=30)
    life.value = 0.0
    with pytest.raises(NothingToTrain):
        await life.live()
    assert life.learn.nothing_left is None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == EMPTY_BATCHES - 1


class EndsAfter(Life):
    """Has enough when `last` steps are written down."""

    last = 2

    def enough(self):
        path = self.folder / "run" / "metrics.jsonl"
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []
        return "it has learnt enough" if self.last in steps else None


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("every", [1, 2, 4])
async def test_a_run_that_has_enough_ends_after_that_step_with_a_checkpoint(tmp_path, every, staleness):
    life = EndsAfter(tmp_path, steps=6, every=every, staleness=staleness)
    rows, trained = await life.live()
    assert life.learn.nothing_left == "it has learnt enough"
    assert [row["step"] for row in rows] == [step for step, _, _ in trained] == [1, 2]
    life.learner.complete()
    assert checkpoints(tmp_path)[-1] == 2
    assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_run_that_was_cut_off_when_it_had_enough_trains_nothing_more(tmp_path):
    life = Life(tmp_path, steps=3)
    await life.live()
    life.learner.complete()
    (tmp_path / "run" / "summary.json").unlink()
    again = EndsAfter(tmp_path, steps=3)
    again.last = 3
    rows, _ = await again.live()
    assert again.learn.nothing_left == "it has learnt enough"
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("every", [1, 2, 4, 100])
async def test_the_last_step_has_a_checkpoint_from_which_more_steps_go_on(tmp_path, every):
    life = Life(tmp_path, steps=3, every=every)
    await life.live()
    life.learner.complete()
    assert checkpoints(tmp_path)[-1] == 3


async def test_a_step_that_was_begun_before_the_run_was_resumed_has_no_rates(tmp_path):
    """Else what the journal held would count as sampled in no time."""
    names = {"tokens/per_s", "tools/calls_per_s", "time/rollout_s", "time/step_s"}
    first = Life(tmp_path, steps=4, every=2)
    assert await first.live(checkpoints=1) is None
    first.state.journal.close()
    held = {step: Journal(tmp_path / "run" / "journal", 2).held_of(step - 1) for step in range(1, 5)}
    second = Life(tmp_path, steps=4, every=2)
    await second.live()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    done_again = [row for row in rows if row["step"] > second.state.step]
    assert any(held[row["step"]] for row in done_again)
    assert not all(held[row["step"]] for row in done_again)
    for row in done_again:
        assert row.get("rollout/trajectories_resumed", 0) == held[row["step"]]
        assert names & row.keys() == (set() if held[row["step"]] else names)


class AnyNumberOfSteps(RunFolder):
    """Its steps are no part of a run's identity."""

    @classmethod
    def open(cls, parent, name, identity):
        return super().open(parent, name, Identity({"argv": []}), steps=identity.values["steps"])


@pytest.mark.parametrize("every", [1, 2, 100])
async def test_a_finished_run_that_takes_more_steps_trains_what_a_longer_one_would_have(tmp_path, every):
    await Life(tmp_path / "parts", steps=2, every=every, kind=AnyNumberOfSteps).live()
    last = Life(tmp_path / "parts", steps=5, every=every, kind=AnyNumberOfSteps)
    found = await last.live()
    assert last.run.resumed
    assert found == await Life(tmp_path / "whole", steps=5, every=every).live()
