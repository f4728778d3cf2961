"""Trajectories of a recorded run, made again."""

import json
import subprocess
from pathlib import Path
from typing import Any

from engine.recording.reader import RecordedRun
from tests.support.paths import ROCSTAR, ROOT


def replayed(run: Path, *words: str) -> dict[str, Any]:
    """What the program says of a trajectory."""
    program = [*ROCSTAR, "replay", str(run), *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def one_of_several_turns(run: Path) -> list[str]:
    """The options that name a trajectory of the first step that has more than one turn."""
    group, sample = next(
        (recorded.number, member.sample)
        for recorded in RecordedRun(run).groups(1)
        for member in recorded.group.trajectories
        if len(member.turns) > 1
    )
    return ["step=1", f"group={group}", f"sample={sample}"]
