"""Run folders on a full disk, and under several processes."""

import subprocess
import sys

import pytest

from engine.run.identity import Identity
from engine.run.run_folder import RunFolder, versions
from tests.support.paths import ROOT
from tests.unit.engine.run.test_run_folder import WITHOUT_STEPS, train


def test_a_link_to_a_place_that_is_not_there_is_refused(tmp_path):
    """A disk that is not mounted, say. In a process of its own: it tried one name after the other for ever."""
    (tmp_path / "runs").symlink_to(tmp_path / "nowhere")
    code = f"from engine.run.run_folder import RunFolder, Path\nRunFolder.open(Path({str(tmp_path)!r}) / 'runs', 'run')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert f"CannotWrite: cannot write to {tmp_path}/runs/run: File exists" in done.stderr


FULL = """
import sys
import zlib
from pathlib import Path
from engine.run.checkpoints import Unresumable
from engine.run.identity import Identity
from engine.run.run_folder import CannotWrite, RunFolder

what, runs = sys.argv[1], Path(sys.argv[2])
try:
    with RunFolder.open(runs, "run") as run:
        run.step(0, {})
        if what == "metrics":
            for step in range(10_000):
                run.step(step, {f"metric/{n}": float(n) for n in range(40)})
        if what == "json":
            run.json("summary.json", {"old": 1})
            run.json("summary.json", {"text": "x" * (1 << 20)})
        if what == "file":
            with run.writing("timeline.json") as path:
                path.write_bytes(bytes(1 << 20))
except CannotWrite as error:
    print(error)
    print(sorted(path.name for path in (runs / "run").iterdir()))
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("what", "file"), [("metrics", "metrics.jsonl"), ("json", "summary.json"), ("file", "timeline.json")]
)
def test_a_full_disk_is_one_clear_error(tmp_path, what, file):
    """A file system of 256 KiB in a mount namespace of its own."""
    mount = f'mount -t tmpfs -o size=256k none {tmp_path} && exec "$0" -c "$1" {what} {tmp_path}'
    command = ["unshare", "-Urm", "sh", "-c", mount, sys.executable, FULL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    message, left = done.stdout.splitlines()
    assert message.startswith(f"cannot write {tmp_path}/run/")
    assert message.endswith(": No space left on device. Fix that and rerun the same command; the run resumes.")
    assert file in message or what == "metrics"
    assert ".draft" not in left
    if what == "json":
        assert "summary.json" in left, "the old one is whole"
    assert done.stderr == "", "no other noise"


def test_a_new_run_does_not_speak_of_those_that_ended_or_are_under_way(tmp_path):
    train(tmp_path, 3, config={**WITHOUT_STEPS, "lr": 0.5})
    assert train(tmp_path, 3, config={**WITHOUT_STEPS, "lr": 0.1}).unfinished is None
    with RunFolder.open(tmp_path, "run", Identity({"lr": 0.3})) as run:
        run.json("config.json", {"lr": 0.3})
        run.step(0, {})
        lock = subprocess.run(
            [sys.executable, "-c", OTHER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    assert lock.stdout == "run-4 None\n", lock.stderr


OTHER = """
import sys
from pathlib import Path
from engine.run.identity import Identity
from engine.run.run_folder import RunFolder, versions
with RunFolder.open(Path(sys.argv[1]), "run", Identity({"lr": 0.2})) as run:
    print(run.path.name, run.unfinished)
"""


LOCKED = """
import os, sys
from pathlib import Path
from engine.run.identity import Identity
from engine.run.run_folder import RunFolder, versions
with RunFolder.open(Path(sys.argv[1]), "run", Identity({"steps": 3})) as run:
    print(run.path.name, run.resumed, run.busy and run.busy.name)
"""


def test_two_processes_never_write_in_one_folder(tmp_path):
    def elsewhere():
        command = [sys.executable, "-c", LOCKED, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    with RunFolder.open(tmp_path, "run", Identity({"steps": 3})) as run:
        run.json("config.json", {"steps": 3})
        run.step(0, {})
        assert elsewhere() == "run-2 False run\n"
    assert not (tmp_path / "run-2" / "config.json").exists()
    (tmp_path / "run-2").rename(tmp_path / "elsewhere")
    assert elsewhere() == "run True None\n"


def test_the_versions_that_decide_a_result_are_recorded():
    found = versions()
    assert {"python", "platform", "torch", "numpy", "msgspec"} <= set(found)
