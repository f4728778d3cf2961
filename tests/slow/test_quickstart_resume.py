"""A quick start that is killed and started again ends as if nothing had happened, and so does its record: real
processes, kill -9.

`make campaigns` kills it at random moments, and damages a file of a killed run, each so many times (about 20 s each):

    ROCSTAR_KILLS=50 ROCSTAR_DAMAGES=30 python -m pytest tests/slow/test_quickstart_resume.py -m campaign -s
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine.recording import files
from engine.recording.reader import RecordedRun
from tests.support.damage import damages
from tests.support.runs import SMALL, Run, command, metrics, numbers

FIELDS = [*SMALL, "steps=4", "eval_every=2", "checkpoint_every=2"]
KILLS = int(os.environ.get("ROCSTAR_KILLS", "8"))
DAMAGES = int(os.environ.get("ROCSTAR_DAMAGES", "8"))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    runs = tmp_path_factory.mktemp("undisturbed")
    run = Run(command(runs, *FIELDS))
    assert run.end() == 0, run.text()
    return numbers(runs / "quickstart")


def kill(run: Run, victim: str) -> None:
    """The node, the learner's rank, or both."""
    ranks = []
    for child in psutil.Process(run.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if "algo.learner" in (words := child.cmdline()) and "engine.learner.launch" not in words:
                ranks.append(child)
    if victim != "node":
        for rank in ranks:
            rank.kill()
    if victim != "rank":
        run.process.kill()


def journaled(folder: Path, step: int) -> int:
    path = folder / "journal" / f"step-{step:06d}"
    return path.stat().st_size if path.exists() else 0


@pytest.mark.timeout(400)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    wanted: list[dict[str, float]], started: list[Run], tmp_path: Path
) -> None:
    """Nothing of it is left after a kill; its record can be read while it runs, and is whole at the end."""
    folder = tmp_path / "quickstart"
    for step, victim in ((1, "node"), (3, "rank")):
        run = Run(command(tmp_path, *FIELDS))
        started.append(run)
        run.until(f"step   {step}")
        deadline = time.monotonic() + 60
        while journaled(folder, step) < 2000:  # some rollouts of the step that follows are under way
            assert time.monotonic() < deadline
            time.sleep(0.01)
        live = RecordedRun(folder)
        for earlier in range(1, step):
            assert len(live.groups(earlier)) == 4
            assert any(segment.spans for segment in live.timeline(earlier, earlier))
        kill(run, victim)
        assert run.end() == (-9 if victim == "node" else 1), run.text()
        assert len(run.seen) > 4
        assert run.left() == []
        with files.timeline_path(live.folder, step + 1).open("ab") as torn:
            torn.write(b"the start of a frame")
    assert "quickstart: the learner ended with exit code" in run.text()
    elsewhere = Path(os.path.relpath(tmp_path))  # the same folder under another name
    last = Run(command(elsewhere, *FIELDS, "record.newest=7"))  # it is the same run all the same
    started.append(last)
    assert last.end() == 0, last.text()
    assert f"resuming {elsewhere / 'quickstart'} at step" in last.text()
    assert numbers(folder) == wanted
    assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart"]
    check_record(folder)


@pytest.mark.timeout(400)
def test_a_killed_run_of_a_mixture_of_experts_ends_as_if_nothing_had_happened(
    started: list[Run], tmp_path: Path
) -> None:
    """Also the routes of its rollouts are as if nothing had happened."""
    fields = [*FIELDS, "model=recipes/tiny/agent_moe", "learner.replay_routing=true"]
    undisturbed = Run(command(tmp_path / "undisturbed", *fields))
    started.append(undisturbed)
    assert undisturbed.end() == 0, undisturbed.text()
    killed = Run(command(tmp_path / "killed", *fields))
    started.append(killed)
    killed.until("step   3")
    kill(killed, "node")
    assert killed.end() == -9
    last = Run(command(tmp_path / "killed", *fields))
    started.append(last)
    assert last.end() == 0, last.text()
    rows = numbers(tmp_path / "killed" / "quickstart")
    assert all({"learner/canary_unreached", "learner/routing_differs"} <= row.keys() for row in rows[1:])
    assert rows == numbers(tmp_path / "undisturbed" / "quickstart")


def check_record(folder: Path) -> None:
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
def test_recording_changes_nothing_that_is_trained(
    wanted: list[dict[str, float]], started: list[Run], tmp_path: Path
) -> None:
    folder = tmp_path / "quickstart"
    run = Run(command(tmp_path, *FIELDS, "record.max_mb=0"))
    started.append(run)
    assert run.end() == 0, run.text()
    assert numbers(folder) == wanted
    assert not RecordedRun(folder).is_there
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in events)


def evaluated(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [row["step"] for row in metrics(folder) if "eval/accuracy" in row]
    return []


@pytest.mark.timeout(400)
def test_an_evaluation_beside_training_that_was_killed_is_made_up_for(started: list[Run], tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    fields = ["eval_problems=64", *SMALL[1:], "steps=2", "checkpoint_every=2", "eval_every=2", "eval_replicas=1"]
    run = Run(command(tmp_path, *fields))
    started.append(run)
    deadline = time.monotonic() + 300
    while not ((folder / "checkpoints" / "step-000002").exists() and evaluated(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.process.kill()
    run.end()
    assert evaluated(folder) == [0]
    last = Run(command(tmp_path, *fields))
    started.append(last)
    assert last.end() == 0, last.text()
    assert evaluated(folder) == [0, 2]


@pytest.mark.campaign
@pytest.mark.timeout(KILLS * 200 + 600)
def test_campaign(wanted: list[dict[str, float]], started: list[Run], tmp_path: Path) -> None:
    chance, kills, ends = random.Random(0), 0, 0
    while kills < KILLS:
        runs = tmp_path / str(ends)
        while True:
            run = Run(command(runs, *FIELDS))
            started.append(run)
            try:
                run.process.wait(timeout=chance.uniform(0, 25) if kills < KILLS else None)
                break
            except subprocess.TimeoutExpired:
                victim = chance.choice(["node", "rank", "both"])
                kill(run, victim)
                kills += 1
                print(f"kill {kills}: {victim}", flush=True)
                run.end()
        assert run.end() == 0, run.text()
        assert numbers(runs / "quickstart") == wanted
        ends += 1
    print(f"{kills} kills, {ends} runs that ended as the undisturbed one", flush=True)


@pytest.mark.campaign
@pytest.mark.timeout(DAMAGES * 100 + 600)
def test_campaign_of_damages(wanted: list[dict[str, float]], started: list[Run], tmp_path: Path) -> None:
    """One run is killed after its third checkpoint; each time another file of it is damaged, until all were."""
    fields = [field for field in FIELDS if not field.startswith("checkpoint_every")] + ["checkpoint_every=1"]
    killed = tmp_path / "killed" / "quickstart"
    run = Run(command(killed.parent, *fields))
    started.append(run)
    deadline = time.monotonic() + 300
    while not (killed / "checkpoints" / "step-000003").exists():
        assert run.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    run.process.kill()
    run.end()
    assert not (killed / "summary.json").exists()

    chance = random.Random(DAMAGES)
    paths = [path.relative_to(killed) for path in sorted(killed.rglob("*")) if path.is_file()]
    chance.shuffle(paths)
    for number in range(DAMAGES):
        path = paths[number % len(paths)]
        runs = tmp_path / str(number)
        shutil.copytree(killed, runs / "quickstart")
        what, left = chance.choice(list(damages((killed / path).read_bytes())))
        damaged = runs / "quickstart" / path
        damaged.unlink() if left is None else damaged.write_bytes(left)
        again = Run(command(runs, *fields))
        started.append(again)
        status = again.end()
        print(f"{path} {what}: {status}\n  " + "\n  ".join(again.text().splitlines()[:3]), flush=True)
        assert "Traceback" not in again.text(), again.text()
        if status == 0:
            [*_, last] = sorted(runs.iterdir())  # quickstart-2 where the options are no longer those of the run
            assert numbers(last) == wanted
        else:
            assert (status, path.name in again.text()) == (1, True), again.text()
        shutil.rmtree(runs)
