"""The benches of the learner: their last lines have the figures that are promised."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.benches import long_rows
from tests.support.paths import ROOT


@pytest.mark.campaign  # `make bench` runs it too
def test_the_learner_beside_its_bare_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "learner", "quick=true", "rounds=1", "threads=1"]
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **where)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert rows.keys() == {"learner", "bare", "dense mask", "padded"}
    assert {"tokens_per_s", "mfu", "peak_bytes", "passes_s"} <= rows["learner"].keys()
    assert all(value > 0 for row in rows.values() for value in row.values())


def test_a_plain_head_is_computed_where_it_would_need_more_than_the_limit() -> None:
    """The learner is measured in a process of its own; the other one is not even started."""
    learner = long_rows.Case(side="learner", vocabulary=512, tokens=64, dtype="float32", threads=1)
    plain = long_rows.Case(side="plain", vocabulary=100_000, tokens=64, dtype="float32", threads=1)
    limit_bytes = plain.plain_head_bytes - 1
    row = long_rows.measured(learner, limit_bytes)
    assert row["tokens_per_s"] > 0
    assert row["peak_bytes"] > 100 << 20, "torch alone takes as much"
    assert long_rows.measured(plain, limit_bytes) == {"plain_head_bytes": 3 * 4 * 64 * 100_000}
