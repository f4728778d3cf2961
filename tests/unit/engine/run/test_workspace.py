"""The private folder: gone at the end, and what a killed node left is swept up."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.run.workspace import _sweep, workspace
from tests.support.paths import ROOT


def test_the_folder_is_private_and_gone_afterwards():
    with workspace() as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "weights").write_bytes(b"x")
        with workspace() as other:
            assert other != path
        assert path.is_dir(), "a second one of this process does not sweep the first"
    assert not path.exists()


def test_temporary_files_of_this_process_lie_there():
    before = tempfile.gettempdir()
    with workspace() as path:
        assert tempfile.gettempdir() == str(path)
    assert tempfile.gettempdir() == before


def test_it_is_gone_after_an_error_too():
    with pytest.raises(LookupError), workspace() as path:
        raise LookupError
    assert not path.exists()


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


def test_there_is_a_place_for_it():
    with workspace() as path:
        assert path.parent in (Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp")))
