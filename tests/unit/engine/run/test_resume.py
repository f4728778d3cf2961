"""A run that is cut off anywhere and started again trains what the uninterrupted one trains: scripted engines and a
learner that keeps a list, the node's own stages, journal and folder.
"""

import asyncio
import gc
import json
import math
import random
import shutil
import tempfile
import zlib
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.learner.messages import Trained
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Pipeline, Stage
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.run.checkpoints import Unresumable
from engine.run.identity import Identity
from engine.run.journal import Journal
from engine.run.resume import RunState
from engine.run.run_folder import RunFolder
from engine.stages.admit import admit
from engine.stages.batch import batch_groups
from engine.stages.group import GroupConfig, groups
from engine.stages.train import TrainStage
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool
from engine.types import Batch, PublishedWeights
from tests.support.damage import damages
from tests.support.examples import examples
from tests.support.fakes import Clock, Prompts, Replicas, ScriptedRunner, fleet_of
from tests.support.node import ANSWER, CHAT, END, call
from tests.unit.engine.run.test_journal import PowerCut as JournalOfPowerCut

NUMBERS = ("reward", "tokens/generated", "tokens/trained", "tools/calls", "rollout/staleness_max", "learner/tokens")


def talk(token_ids, sampling):
    """One to three turns, which the seeds decide."""
    number = sampling.seed % 97
    yield call(f"print({number})") + END if number % 3 else ANSWER


@pytest.fixture(autouse=True)
def light_collections():
    """What other tests left is not walked again with each step."""
    gc.freeze()
    yield
    gc.unfreeze()


class ListLearner:
    """Its weights are the list of what it was trained on. A checkpoint is complete when the next request comes."""

    def __init__(self, state):
        self.trained = json.loads((Path(state.checkpoint) / "list").read_text()) if state.checkpoint else []
        self.unfinished = None

    async def train(self, batch, version):
        self.complete()
        parts = np.split(np.arange(len(batch.token_ids_N)), np.cumsum(batch.lengths_B)[:-1])
        rows = [
            [batch.token_ids_N[part].tolist(), batch.logprobs_N[part].tolist(), batch.versions_N[part].tolist()]
            for part in parts
        ]
        self.trained.append([version, rows, batch.advantages_B.tolist()])
        await asyncio.sleep(0)
        metrics = {"tokens": float(len(batch.token_ids_N))}
        return Trained(step=version, version=version, weights="w", metrics=metrics), np.zeros(3, np.float32)

    async def checkpoint(self, path, version):
        self.complete()
        self.unfinished = path, json.dumps(self.trained)

    def complete(self):
        if self.unfinished:
            path, text = self.unfinished
            path.mkdir(parents=True, exist_ok=True)
            (path / "list").write_text(text)
            (path / "manifest.json").write_text(json.dumps({"list": [len(text), zlib.crc32(text.encode())]}))
            for old in sorted(path.parent.glob("step-*"))[:-2]:
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()
        self.unfinished = None


def join(step, members):
    kept = [group.trajectories[index] for group in members for index in group.kept]
    return Batch.of(step, kept, np.arange(len(kept), dtype=np.float32))


def select(group):
    rewards = set(group.rewards_G.tolist())
    return replace(group, drop="flat") if len(rewards) == 1 else replace(group, kept=tuple(range(len(group.rewards_G))))


class PowerCut(RunFolder):
    """Its machine loses power at the end: of metrics.jsonl is left what was synced."""

    synced = b""

    def resume(self, step):
        rows = super().resume(step)
        self.synced = (self.path / "metrics.jsonl").read_bytes()
        return rows

    def sync(self):
        super().sync()
        self.synced = (self.path / "metrics.jsonl").read_bytes()

    def __exit__(self, *how):
        super().__exit__(*how)
        (self.path / "metrics.jsonl").write_bytes(self.synced)


class Life:
    """One process of the run: `live` until it ends, or for so many turns of the event loop. prompts: by lease."""

    def __init__(self, folder, *, steps=3, staleness=0, refills=0, every=1, seed=0, kind=RunFolder, journal=Journal):
        self.folder, self.steps, self.staleness, self.every, self.kind = folder, steps, staleness, every, kind
        self.journal = journal
        self.config = GroupConfig(samples=2, refills=refills)
        self.chance = random.Random(seed)

    def enough(self):
        """Why the run is to end here; None: it goes on."""

    async def reward(self, trajectory):
        for _ in range(self.chance.randrange(12)):
            await asyncio.sleep(0)
        return float(trajectory.seed % 2)

    async def live(self, ticks=None, checkpoints=math.inf):
        """The rows of metrics.jsonl and what was trained, once it has ended; None when it was cut off: after so many
        turns, or when the checkpoint of step `checkpoints` is complete.
        """
        with self.kind.open(self.folder, "run", Identity({"steps": self.steps})) as run:
            self.run = run
            if not run.resumed:
                run.json("config.json", {"steps": self.steps, "argv": []})
            self.state = RunState.open(run, 2)
            self.state = replace(self.state, journal=self.journal(run.path / "journal", 2, self.state.step))
            self.learner = ListLearner(self.state)
            async with AsyncExitStack() as stack:
                timeline = Timeline(Clock(tick=0.001))
                replicas = Replicas(chat=CHAT, script=talk)
                fleet = await stack.enter_async_context(fleet_of(replicas, 2, timeline=timeline))
                await fleet.update_weights(PublishedWeights("w", self.state.step, np.zeros(3, np.float32)))
                task = asyncio.create_task(self.pipeline(fleet, timeline).run())
                turns = 0
                while (
                    not task.done() and turns != ticks and max(self.state.checkpoints.steps(), default=0) < checkpoints
                ):
                    turns += 1
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            self.turns = turns
            if task.cancelled():
                return None
            task.result()
            run.json("summary.json", {})
        rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        return [{"step": row["step"]} | {name: row.get(name) for name in NUMBERS} for row in rows], self.learner.trained

    def pipeline(self, fleet, timeline):
        leases = Leases(2, self.staleness, self.state.step)
        journal = self.state.journal
        rollouts = Rollouts(RolloutConfig(max_tokens=400), CHAT, fleet, [PythonTool(ScriptedRunner())], timeline, 3)
        prompts = journal.after(Prompts())
        self.prompts = {}

        def noted(group):
            self.prompts.setdefault(group.lease, []).append(group.prompt.id)
            return select(group)

        async def stepped(step, metrics):
            self.run.step(step, metrics)

        grouped = groups(rollouts, self.reward, noted, prompts, self.config, timeline, journal)
        self.learn = learn = TrainStage(
            learner=self.learner,
            fleet=fleet,
            leases=leases,
            make_batch=join,
            on_trained=stepped,
            stats=lambda: pipeline.stats(),
            timeline=timeline,
            state=self.state,
            checkpoint_every=self.every,
            enough=self.enough,
        )
        pipeline = Pipeline(
            [
                Stage(name="admit", run=admit(prompts, leases, self.steps, journal)),
                Stage(name="groups", run=grouped, workers=leases.capacity),
                Stage(name="batch", run=batch_groups(leases)),
                Stage(name="learn", run=learn),
            ]
        )
        return pipeline


ANY_CUTS = given(cuts=st.lists(st.integers(0, 120), max_size=6), every=st.integers(1, 3), staleness=st.integers(0, 2))
ANY_SEED = given(cuts=st.lists(st.integers(0, 120), min_size=1, max_size=5), seed=st.integers(0, 100))


async def with_cuts(folder, cuts, **options):
    """The result of a run that is cut off after so many turns each time; and its prompts by lease."""
    prompts = {}
    for seed, ticks in enumerate([*cuts, None]):
        life = Life(folder, seed=seed, **options)
        result = await life.live(ticks)
        prompts |= life.prompts
        if result is not None:
            return result, prompts
    raise AssertionError


@examples(8)  # tests/slow tries more
@ANY_CUTS
def test_what_is_trained_is_what_would_have_been(cuts, every, staleness):
    options = {"every": every, "staleness": staleness}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        (rows, trained), prompts = asyncio.run(with_cuts(Path(one), cuts, **options))
        (wanted_rows, wanted), wanted_prompts = asyncio.run(with_cuts(Path(other), [], **options))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert prompts == wanted_prompts == {lease: [f"p{lease}"] for lease in range(6)}
    if staleness == 0:
        assert rows == wanted_rows
        assert trained == wanted
    for (step, found, _), (_, planned, _) in zip(trained, wanted, strict=True):
        assert [ids for ids, _, _ in found] == [ids for ids, _, _ in planned]
        assert all(version >= step - 1 - staleness for _, _, versions in found for version in versions if version >= 0)


async def test_the_rows_that_a_checkpoint_covers_survive_a_loss_of_power(tmp_path):
    for checkpoints in (1, 2):
        life = Life(tmp_path, kind=PowerCut)
        assert await life.live(checkpoints=checkpoints) is None
        assert life.run.synced
    rows, trained = await Life(tmp_path).live()
    assert [row["step"] for row in rows] == [step for step, _, _ in trained] == [1, 2, 3]


@pytest.mark.parametrize("checkpoints", [1, 2])
async def test_no_prompt_that_a_checkpoint_covers_is_drawn_again_after_a_loss_of_power(tmp_path, checkpoints):
    first = Life(tmp_path, steps=4, kind=PowerCut, journal=JournalOfPowerCut)
    assert await first.live(checkpoints=checkpoints) is None
    first.state.journal.close()
    second = Life(tmp_path, steps=4)
    assert await second.live()
    assert second.state.step == checkpoints
    assert second.prompts == {lease: [f"p{lease}"] for lease in range(2 * checkpoints, 8)}


@examples(5)  # tests/slow tries more
@ANY_SEED
def test_with_refills_no_prompt_is_used_twice(cuts, seed):
    with tempfile.TemporaryDirectory() as folder:
        (rows, trained), prompts = asyncio.run(with_cuts(Path(folder), cuts, refills=2, staleness=1))
    assert [row["step"] for row in rows] == [step for step, _, _ in trained] == [1, 2, 3]
    used = [prompt for names in prompts.values() for prompt in names]
    assert len(used) == len(set(used))
    assert sorted(prompts) == list(range(6))


async def test_the_state_that_is_damaged_is_passed_over_or_refused(tmp_path):
    assert await Life(tmp_path, steps=6).live(checkpoints=2) is None
    folder = tmp_path / "run" / "checkpoints"
    newest, older = sorted(folder.iterdir(), reverse=True)[:2]
    (newest / "manifest.json").write_text('{"list": [1, 1]}')
    life = Life(tmp_path, steps=6)
    rows, trained = await life.live()
    assert life.state.step == int(older.name[-6:]) > 0
    assert f"checkpoint {newest} is damaged" in life.state.resume_message
    assert [step for step, _, _ in trained] == [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    (tmp_path / "run" / "summary.json").unlink()
    for path in folder.iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(Unresumable, match=r"(?s)run cannot be resumed .*step-000005 is damaged: .*manifest.json"):
        await Life(tmp_path, steps=6).live()


async def test_a_row_that_is_damaged_is_measured_again_from_the_checkpoint_before_it(tmp_path):
    wanted, _ = await with_cuts(tmp_path / "undisturbed", [], steps=4)
    assert await Life(tmp_path / "killed", steps=4).live(checkpoints=3) is None
    path = tmp_path / "killed" / "run" / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'{"step":3,"reward":', b'{"step":3,"reward":1'))
    assert path.read_bytes() != content
    life = Life(tmp_path / "killed", steps=4)
    assert await life.live() == wanted
    assert life.state.step == 2
    assert str(path) in life.state.resume_message


class Killed(Exception):
    pass


class KilledWhenItForgets(Journal):
    """Its process dies when it has deleted segments for the first time."""

    def forget(self, step):
        before = len(list(self.folder.iterdir()))
        super().forget(step)
        if len(list(self.folder.iterdir())) < before:
            raise Killed


async def test_checkpoints_that_are_damaged_are_not_taken_for_those_that_the_run_writes_again(tmp_path):
    """Else it would delete the journal's start before there is anything else to go on from."""
    wanted, _ = await with_cuts(tmp_path / "undisturbed", [], steps=4)
    assert await Life(tmp_path / "killed", steps=4).live(checkpoints=2) is None
    for manifest in (tmp_path / "killed" / "run" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text('{"list": [1, 1]}')
    again = Life(tmp_path / "killed", steps=4, journal=KilledWhenItForgets)
    with pytest.raises(Killed):
        await again.live()
    assert again.state.step == 0
    last = Life(tmp_path / "killed", steps=4)
    assert await last.live() == wanted
    assert last.state.step == 2


async def test_a_run_without_its_journal_does_not_train_its_first_prompts_again(tmp_path):
    assert await Life(tmp_path, steps=6).live(checkpoints=2) is None
    for segment in (tmp_path / "run" / "journal").iterdir():
        segment.unlink()
    with pytest.raises(Unresumable, match=r"(?s)run cannot be resumed .*/run/journal/drawn-000002"):
        await Life(tmp_path, steps=6).live()


# Damage


async def killed_after_its_third_checkpoint(folder, **options):
    life = Life(folder, steps=5, **options)
    assert await life.live(checkpoints=3) is None
    life.state.journal.close()
    return folder / "run"


async def ended_or_refused(folder, path, **options):
    """What a run that goes on has trained, its prompts by lease, and what it says; None when it was refused and the
    file named.
    """
    life = Life(folder, steps=5, **options)
    try:
        return await life.live(), life.prompts, life.state.resume_message
    except Unresumable as error:
        return None if path.name in str(error) else pytest.fail(f"{path}: {error}")


@pytest.mark.parametrize("staleness", [0, 1])
async def test_whatever_file_of_a_killed_run_is_damaged_it_ends_undisturbed_or_is_refused(tmp_path, staleness, every):
    wanted, _ = await with_cuts(tmp_path / "undisturbed", [], steps=5, staleness=staleness)
    run = await killed_after_its_third_checkpoint(tmp_path / "killed", staleness=staleness)
    paths = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file()]
    assert {path.parts[0] for path in paths} == {
        *("checkpoints", "config.json", "journal", "lock", "metrics.jsonl", "tensorboard")
    }
    older = {Path("journal/drawn-000001"), Path("journal/drawn-000002")}
    older |= {path for path in paths if path.parent.name == "step-000002"}
    unread = older | {path for path in paths if path.parts[0] == "tensorboard"}
    refused = set()
    for start, path in enumerate(paths):
        content = (run / path).read_bytes()
        for number, (what, left) in islice(enumerate(damages(content)), start % every, None, every):
            folder = tmp_path / f"{path.name}-{number}"
            shutil.copytree(run, folder / "run")
            damaged = folder / "run" / path
            damaged.unlink() if left is None else damaged.write_bytes(left)
            found = await ended_or_refused(folder, damaged, staleness=staleness)
            shutil.rmtree(folder)
            if found is None:
                refused.add(path)
            else:
                (rows, trained), prompts, story = found
                said = f"{path}: {what}"
                if "flipped" in what and path not in unread:
                    assert path.name in story, said
                assert all(names == [f"p{lease}"] for lease, names in prompts.items()), said
                assert [row["step"] for row in rows] == [1, 2, 3, 4, 5], said
                if staleness == 0:
                    assert (rows, trained) == wanted, said
                ids = [[ids for ids, _, _ in rows] for _, rows, _ in trained]
                assert ids == [[ids for ids, _, _ in rows] for _, rows, _ in wanted[1]], said
    assert {path.name for path in refused} <= {"config.json", "metrics.jsonl"}
