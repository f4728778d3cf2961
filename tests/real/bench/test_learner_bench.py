"""The benches of the learner and of its weights: their last lines have the names that are promised."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.benches import weights
from bench.benches.learner import long_rows
from tests.support.paths import ROOT


def test_the_learner_beside_its_bare_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "learner", "--quick", "--rounds", "1", "--threads", "1"]
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **where)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert {"bare_fraction", "padded_speedup", "mfu", "peak_bytes"} < found.keys()
    assert found["tokens_per_s"].keys() == {"learner", "bare", "bare, dense mask", "padded"}
    assert min(found[part] for part in ("bare_fraction", "padded_speedup", "mfu", "peak_bytes")) > 0


def test_a_plain_head_is_computed_where_it_would_need_more_than_the_limit() -> None:
    """The learner is measured in a process of its own; the other one is not even started."""
    given = {"title": "tiny", "tokens": 64, "dtype": "float32", "threads": 1}
    learner = long_rows.Case(side="learner", vocabulary=512, **given)
    plain = long_rows.Case(side="plain", vocabulary=100_000, **given)
    measured, computed = long_rows.measured([learner, plain], plain_limit_bytes=plain.plain_head_bytes - 1)
    assert (measured.seconds or 0) > 0
    assert (measured.peak_bytes or 0) > 100 << 20, "torch alone takes as much"
    assert (computed.seconds, computed.peak_bytes) == (None, None)
    assert plain.plain_head_bytes == 3 * 4 * 64 * 100_000
    assert long_rows.row(computed)[-1].startswith("would need 0.1 GB")


def test_weights_beside_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    options = weights.arguments(["--quick", "--transports", "shm"])
    given = {"transport": "shm", "ranks": 1, "rounds": 3, "checkpoint": Path("tiny")}
    tiny, larger = weights.Case(size="tiny", size_bytes=10, **given), weights.Case(size="97m", size_bytes=99, **given)
    seconds = dict.fromkeys([*weights.PARTS, "moved_bytes"], 0.5)
    rounds = [(tiny, seconds | {"total_s": total, "copy_s": copy}) for total, copy in ((4, 2), (9, 3), (4, 1))]
    weights.show(options, {}, [*rounds, (larger, seconds)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert (found["copy_floor_ratio_shm_tiny"], found["copy_floor_ratio_shm_97m"]) == (3, 1), "median of the ratios"
    assert {f"{part}_shm_{size}" for part in weights.PARTS for size in ("tiny", "97m")} < found.keys()
