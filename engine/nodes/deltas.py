"""What has changed between two versions of the weights, block by block, for links that are slow.

A delta is a block after another: its length (uint32, little-endian) and that many bytes: zlib of old XOR new. Length 0:
the block is as it was. Weights of bfloat16 change little from step to step, those of float32 nearly all.

Invariant: `apply` gives the new file bit by bit, or raises: the whole has a hash.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

from engine.nodes.messages import FileInfo

BLOCK_BYTES = 1 << 20
WORTH = 0.8  # of the whole: a delta that is larger is not sent
_LENGTH = struct.Struct("<I")


class NotTheSame(ValueError):
    """The delta is not of this file, or its result is not the new one."""


def write(old: Path, new: Path, delta: Path) -> str | None:
    """Writes the delta; returns the SHA-256 of the new file, or None where a delta is not worth it (and is not there).

    Takes a second for some 50 MB that have changed.
    """
    size = new.stat().st_size
    if old.stat().st_size != size:
        return None
    digest, written = hashlib.sha256(), 0
    with old.open("rb") as before, new.open("rb") as after, delta.open("wb") as file:
        while block := after.read(BLOCK_BYTES):
            digest.update(block)
            same = before.read(BLOCK_BYTES)
            changed = b"" if block == same else zlib.compress(_xor(same, block), 1)
            written += file.write(_LENGTH.pack(len(changed)) + changed)
            if written > WORTH * size:
                break
        else:
            return digest.hexdigest()
    delta.unlink()
    return None


def apply(old: Path, delta: Path, info: FileInfo, new: Path) -> None:
    """Makes the new file, which info describes. Raises NotTheSame, and leaves nothing then."""
    digest = hashlib.sha256()
    try:
        with old.open("rb") as before, delta.open("rb") as changes, new.open("wb") as file:
            while header := changes.read(_LENGTH.size):
                block = before.read(BLOCK_BYTES)
                (length,) = _LENGTH.unpack(header)
                if length:
                    block = _xor(block, zlib.decompress(changes.read(length)))
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != info.sha256:
            raise NotTheSame(f"{info.name}: what a delta gives has another SHA-256 than the lead's file")
    except (NotTheSame, ValueError, zlib.error, struct.error) as error:
        new.unlink(missing_ok=True)
        raise NotTheSame(str(error)) from error


def _xor(one: bytes, other: bytes) -> bytes:
    """Raises ValueError for blocks of two sizes."""
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)).tobytes()
