"""A recorded trajectory is gone on with, on a real engine and in a real jail."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.replay import one_of_several_turns, replayed
from tests.support.runs import SMALL, command


@pytest.mark.timeout(400)
def test_with_the_same_weights_and_seed_it_is_what_was_recorded_and_with_another_seed_it_is_not(tmp_path: Path) -> None:
    subprocess.run(command(tmp_path, *SMALL, "steps=1", "replicas=1", "slots=2"), check=True, capture_output=True)
    run = tmp_path / "quickstart"
    where = one_of_several_turns(run)
    for turn in ("0", "1"):
        again = replayed(run, *where, f"turn={turn}", "start=true")
        assert again["first_difference"] is None
        assert again["again"] == again["recorded"]
    other = replayed(run, *where, "turn=0", "start=true", "seed=12345")
    assert other["again"]["error"] is None
    assert other["again"]["turns"]
