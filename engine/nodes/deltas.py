"""Deltas between two versions of the weights, block by block, for slow links.

A delta is a sequence of blocks. Each has a length (uint32, little-endian) and that many bytes, which are old XOR new
compressed by zlib; length 0 stands for an unchanged block. From step to step few weights change in bfloat16, and nearly
all in float32.

Invariant: `apply` gives the new file bit by bit or raises, because the whole file has a hash.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

from engine.nodes.messages import FileInfo

BLOCK_BYTES = 1 << 20
WORTH = 0.8  # a delta larger than this share of the whole file is not sent
_LENGTH = struct.Struct("<I")


class NotTheSame(ValueError):
    """The delta does not fit this file, or its result is not the new file."""


def write(old: Path, new: Path, delta: Path) -> str | None:
    """Writes the delta and returns the SHA-256 of the new file. If a delta is not worth it, returns None without one.

    It takes a second for some 50 MB of changed weights.
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
    """Makes the new file, which info describes. Raises NotTheSame or OSError, and leaves no file then."""
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
            raise NotTheSame(f"{info.name}: the result of a delta has another SHA-256 than the lead's file")
    except (NotTheSame, ValueError, zlib.error, struct.error) as error:
        new.unlink(missing_ok=True)
        raise NotTheSame(str(error)) from error
    except OSError:  # a full disk, which what is left here would keep full
        new.unlink(missing_ok=True)
        raise


def _xor(one: bytes, other: bytes) -> bytes:
    """Raises ValueError for blocks of different sizes."""
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)).tobytes()
