"""Workspaces of several nodes on one machine."""

import os
import subprocess
import sys
from pathlib import Path

from engine.run.workspace import _sweep, workspace
from tests.support.paths import ROOT


def test_what_a_killed_node_left_is_removed_and_a_live_ones_folder_is_not(tmp_path):
    code = f"import os; os.mkdir(f'{tmp_path}/rocstar-{{os.getpid()}}-dead')"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in (f"rocstar-{os.getpid()}-live", "rocstar-notes", "other"):
        (tmp_path / name).mkdir()
    _sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"rocstar-{os.getpid()}-live", "rocstar-notes", "other"]
    )


def test_a_node_in_another_container_leaves_the_folder_alone():
    """The two share /dev/shm, but neither sees the other's processes."""
    code = "from engine.run.workspace import workspace\nwith workspace() as path: print(path)"
    with workspace() as path:
        elsewhere = ["unshare", "-Urpf", "--mount-proc", sys.executable, "-c", code]
        done = subprocess.run(elsewhere, cwd=ROOT, capture_output=True, text=True)
        assert Path(done.stdout.strip()).parent == path.parent, done.stderr
        assert path.is_dir()
    assert not path.exists()
