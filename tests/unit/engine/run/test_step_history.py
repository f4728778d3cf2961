"""A mixture that follows the run, as the README writes it, draws the same when the run is resumed."""

import json
import random
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from algo.learner.config import LearnerConfig
from engine.assembly.config import TrainingConfig
from engine.rollout.rollout import RolloutConfig
from engine.run.checkpoints import Unresumable
from engine.run.identity import Identity
from engine.run.run_folder import RunFolder
from engine.stages.group import GroupConfig
from tests.support.fakes import a_prompt
from tests.support.job import job_of

ROOT = Path(__file__).resolve().parents[4]
[BLOCK] = re.findall(r"```python\n(# curriculum:.*?)```", (ROOT / "recipes/parts.md").read_text(), re.DOTALL)
GROUPS, STEPS, EVERY = 8, 9, 4  # a step, in all, between checkpoints


class Killed(Exception):
    pass


class Source:
    def __init__(self, name):
        self.name, self.at = name, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return replace(a_prompt(), id=f"{self.name}-{self.at - 1}", source=self.name)


def row(step):
    """The easy prompts are soon solved nearly always, the hard ones nearly never until late."""
    rates = {"reward/easy": 0.8 if step == 1 else 1.0, "reward/hard": 0.05 if step < 5 else 0.5}
    return {"reward": 0.5, "tools/error_share_correct": 0.0, "time/train_total_s": float(step), **rates}


def config(staleness):
    return TrainingConfig(
        checkpoint=ROOT / "recipes/tiny/agent",
        steps=STEPS,
        prompts_per_step=GROUPS,
        group=GroupConfig(samples=2),
        rollout=RolloutConfig(max_tokens=100),
        learner=LearnerConfig(),
        max_staleness=staleness,
    )


def live(folder, *, staleness, refills, killed_after=None):
    """What each attempt of a lease drew, and by which weights; raises Killed after so many draws."""
    names: dict = {}
    exec(compile(BLOCK, "recipes/parts.md", "exec"), names)
    drawn = {}
    with RunFolder.open(folder, "run", Identity({"seed": 0}), steps=STEPS) as run:
        if not run.resumed:
            run.json("config.json", {"seed": 0, "steps": STEPS})
        job = job_of(config(staleness), run)
        stream = job.journal.after(names["curriculum"](job, Source("easy"), Source("hard")))
        trained = job.state.step
        for lease in range(trained * GROUPS, STEPS * GROUPS):
            while job.leases.take() is None:
                trained += 1
                checkpoint(job, trained)
                job.recorder.step(trained, row(trained))
                for each in range((trained - 1) * GROUPS, trained * GROUPS):
                    job.leases.release(each)
            for attempt in range(1 + random.Random(lease).choice(range(refills + 1))):
                drawn[lease, attempt] = job.journal.draw(lease, attempt, stream).id
                if len(drawn) == killed_after:
                    job.journal.close()
                    raise Killed
        job.journal.close()
    return drawn, (run.path / "curriculum.jsonl").read_text()


def checkpoint(job, step):
    """Each fourth step, of those before it."""
    before = step - 1
    if before and before % EVERY == 0 and before > job.state.step:
        job.run_folder.sync()
        job.journal.sync(job.journal.floor(before))
        folder = job.state.checkpoints.of(before)
        folder.mkdir(parents=True)
        (folder / "list").write_text("")
        (folder / "manifest.json").write_text(json.dumps({"list": [0, 0]}))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("refills", [0, 2])
@pytest.mark.parametrize("killed_after", [GROUPS * 3 + 2, GROUPS * 7 + 3, GROUPS * 12])
def test_a_resumed_run_draws_what_the_run_would_have_drawn(tmp_path, staleness, refills, killed_after):
    options = {"staleness": staleness, "refills": refills}
    wanted, weights = live(tmp_path / "whole", **options)
    assert len(set(re.findall(r"\{\"easy.*?\}", weights))) > 2, "the weights do change"
    assert len(set(wanted.values())) == len(wanted)
    for draws in (killed_after, killed_after // 2, None):
        with suppress(Killed):
            found, _ = live(tmp_path / "killed", **options, killed_after=draws)
    assert found == {key: prompt for key, prompt in wanted.items() if key in found}


def test_a_damaged_line_is_named(tmp_path):
    live(tmp_path, staleness=0, refills=0)
    path = tmp_path / "run" / "curriculum.jsonl"
    path.write_text(path.read_text().replace('"step":2', '"step":3', 1))
    with pytest.raises(Unresumable, match=r"curriculum\.jsonl is damaged in line 3"):
        live(tmp_path, staleness=0, refills=0)
