"""A recorded trajectory is gone on with, on a real engine and in a real jail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.recording.reader import RecordedRun
from tests.support.paths import ROOT
from tests.support.runs import SMALL, command


def gone_on(run: Path, *words: str) -> dict:
    program = [sys.executable, "-m", "engine.view.go_on", str(run), *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(400)
def test_with_the_same_weights_and_seed_it_is_what_was_recorded_and_with_another_seed_it_is_not(tmp_path: Path) -> None:
    subprocess.run(command(tmp_path, *SMALL, "steps=1", "replicas=1", "slots=2"), check=True, capture_output=True)
    run = tmp_path / "quickstart"
    place = next(
        (group.group, member.sample)
        for group in RecordedRun(run).groups(1)
        for member in group.trajectories
        if len(member.sequences[0]) > 1
    )
    where = ["--step", "1", "--group", str(place[0]), "--sample", str(place[1])]
    for turn in ("0", "1"):
        again = gone_on(run, *where, "--turn", turn, "--start")
        assert again["first_difference"] is None
        assert again["again"] == again["recorded"]
    other = gone_on(run, *where, "--turn", "0", "--start", "--seed", "12345")
    assert other["again"]["error"] is None
    assert other["again"]["turns"]
