"""The benches of the learner and of its weights run, and their last lines have the names that are promised."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bench import weights

ROOT = Path(__file__).parents[2]


def run(bench: str, options: str, folder: Path) -> tuple[dict, int]:
    """Its metrics, and the most memory in bytes that its process held until its end."""
    command = [sys.executable, "-m", f"bench.{bench}", *options.split()]
    where = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, **where)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    process.stdout.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (folder / "errors").read_text()
    return json.loads(output.splitlines()[-1])["metrics"], 1024 * usage.ru_maxrss


def test_the_learner_beside_its_bare_model(tmp_path: Path) -> None:
    found, peak_bytes = run("learner", "--quick --rounds 1", tmp_path)
    assert {"bare_fraction", "padded_speedup", "mfu", "peak_bytes"} < found.keys()
    assert found["tokens_per_s"].keys() == {"learner", "bare", "bare, dense mask", "padded"}
    for part in ("bare_fraction", "padded_speedup", "mfu"):
        assert found[part] > 0
    assert 0 < found["peak_bytes"] < peak_bytes - (20 << 20), "the bare models and their passes are not the learner's"


def test_weights_beside_a_copy(tmp_path: Path) -> None:
    found, _ = run("weights", "--quick --rounds 1 --transports shm", tmp_path)
    assert found["copy_floor_ratio_shm_tiny"] > 0
    assert {f"{part}_shm_tiny" for part in weights.PARTS} < found.keys()
