"""What has changed of a file is enough to make the new one of the old, bit by bit."""

import hashlib

import numpy as np
import pytest

from engine.nodes.deltas import BLOCK_BYTES, NotTheSame, apply, write
from engine.nodes.messages import FileInfo


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(np.random.default_rng(0).bytes(3 * BLOCK_BYTES + 17))
    return path


def changed(old, places):
    content = bytearray(old.read_bytes())
    for place in places:
        content[place] ^= 1
    path = old.with_name("new")
    path.write_bytes(content)
    return path


def info_of(path):
    return FileInfo(
        name="weights-2", size_bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
    )


@pytest.mark.parametrize("places", [[], [0], [BLOCK_BYTES, 3 * BLOCK_BYTES + 16], range(0, 3 * BLOCK_BYTES, 1000)])
def test_the_new_file_is_made_of_the_old_one_and_a_small_delta(old, places):
    new, delta, made = changed(old, places), old.with_name("delta"), old.with_name("made")
    assert write(old, new, delta) == info_of(new).sha256
    assert delta.stat().st_size < 0.1 * new.stat().st_size
    apply(old, delta, info_of(new), made)
    assert made.read_bytes() == new.read_bytes()


def test_a_delta_that_is_not_worth_it_is_not_there(old):
    other = old.with_name("other")
    other.write_bytes(np.random.default_rng(1).bytes(old.stat().st_size))
    assert write(old, other, old.with_name("delta")) is None
    assert not old.with_name("delta").exists()
    other.write_bytes(b"shorter")
    assert write(old, other, old.with_name("delta")) is None


def test_a_full_disk_is_left_as_it_was(old):
    new, delta, full = changed(old, [5]), old.with_name("delta"), old.with_name("full")
    write(old, new, delta)
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        apply(old, delta, info_of(new), full)
    assert not full.is_symlink()


def test_a_delta_of_another_file_or_a_damaged_one_leaves_nothing(old):
    new, delta, made = changed(old, [5, 2 * BLOCK_BYTES]), old.with_name("delta"), old.with_name("made")
    write(old, new, delta)
    other = changed(old, [6])
    wanted = FileInfo(name="weights-2", size_bytes=1, sha256="0" * 64)
    for base, changes, info in (
        (other, delta.read_bytes(), info_of(new)),
        (old, delta.read_bytes()[:-3], wanted),
        (old, b"garbage that is no delta", wanted),
    ):
        delta.write_bytes(changes)
        with pytest.raises(NotTheSame):
            apply(base, delta, info, made)
        assert not made.exists()
