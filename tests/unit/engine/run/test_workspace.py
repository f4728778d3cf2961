"""The private folder: gone at the end, and what a killed node left is swept up."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from engine.run.workspace import workspace


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


def test_there_is_a_place_for_it():
    with workspace() as path:
        assert path.parent in (Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp")))
