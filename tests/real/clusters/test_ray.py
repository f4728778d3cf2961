"""recipes/clusters/on_ray.py: its processes, and a real Ray cluster of six machines that come and go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.clusters.on_ray import Process
from tests.support.packages import environment_with
from tests.support.paths import ROOT

RAY = ("ray==2.60.0",)


WRITES_WHAT_IT_WAS_GIVEN = """
import json, sys
from pathlib import Path
file, *given, keys = sys.argv[1:]
folder = Path(keys.removeprefix("keys="))
Path(file).write_text(json.dumps([given, {path.name: path.read_text() for path in folder.iterdir()}]))
"""


async def test_a_process_gets_its_options_as_they_are_and_a_folder_with_keys(tmp_path: Path) -> None:
    given = ["data=/KEYS/file", "keys=KEYS"]
    command = [sys.executable, "-c", WRITES_WHAT_IT_WAS_GIVEN, str(tmp_path / "file"), *given]
    assert await Process().run(command, str(ROOT), {"host.key": b"secret"}) == 0
    assert json.loads((tmp_path / "file").read_text()) == [given, {"host.key": "secret"}]


@pytest.mark.timeout(600)
def test_on_ray_a_process_that_is_killed_and_a_machine_that_is_gone_are_replaced(tmp_path: Path) -> None:
    """And all processes are drained when the lead has ended, those that Ray never had room for left aside."""
    python = environment_with("ray", *RAY) / "bin" / "python"
    command = [str(python), "-m", "tests.support.ray_cluster", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["killed_and_there_again"]
    assert len(told["without_a_machine"]) == 2
    assert told["moved"] == told["without_a_machine"]
    assert told["drained"] == [f"node-{number}" for number in range(6)]
    assert "too-large waits for a machine with room for it: CPUs 1, GPUs 1" in ended.stdout
    for name in told["moved"]:
        assert f"{name} is lost, and is placed again" in ended.stdout
    assert told["stopped"]["code"] == 130, told["stopped"]["said"]
    assert "interrupted; what was done is kept" in told["stopped"]["said"]
