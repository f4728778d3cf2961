"""A quick start that is killed and started again ends as if nothing had happened: real processes, kill -9.

`make campaigns` kills it at random moments, and damages a file of a killed run, each so many times (about 20 s each):

    ROCSTAR_KILLS=50 ROCSTAR_DAMAGES=30 python -m pytest tests/slow/test_quickstart_resume.py -m campaign -s
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

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
    folder = tmp_path / "quickstart"
    for step, victim in ((1, "node"), (3, "rank")):
        run = Run(command(tmp_path, *FIELDS))
        started.append(run)
        run.until(f"step   {step}")
        deadline = time.monotonic() + 60
        while journaled(folder, step) < 2000:  # some rollouts of the step that follows are under way
            assert time.monotonic() < deadline
            time.sleep(0.01)
        kill(run, victim)
        assert run.end() == (-9 if victim == "node" else 1), run.text()
    elsewhere = Path(os.path.relpath(tmp_path))  # the same folder under another name
    last = Run(command(elsewhere, *FIELDS))
    started.append(last)
    assert last.end() == 0, last.text()
    assert f"resuming {elsewhere / 'quickstart'} at step" in last.text()
    assert numbers(folder) == wanted
    assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart"]


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
