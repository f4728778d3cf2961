"""TensorBoard event files, written in place: a write that fails raises where it happens, nothing runs behind it.

An event file is a row of TFRecord frames (length, masked CRC-32C, data, masked CRC-32C), each an `Event` protocol
buffer (tensorflow/core/util/event.proto). The usual writers do this in a thread, where a full disk goes unseen.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np


class Board:
    """Scalars for TensorBoard in a new folder. Raises OSError when it cannot write."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write(_bytes(3, b"brain.Event:2"))

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        with np.errstate(over="ignore"):  # what single precision cannot hold becomes infinite
            values = np.asarray(list(metrics.values()), np.float64).astype("<f4")
        pairs = zip(metrics, values, strict=True)
        summary = b"".join(_bytes(1, _bytes(1, name.encode()) + b"\x15" + value.tobytes()) for name, value in pairs)
        self._write(b"\x10" + _varint(step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, fields: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        frame = length + _masked_crc(length) + event + _masked_crc(event)
        if self._file.write(frame) != len(frame):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _varint(number: int) -> bytes:
    """Protocol buffers' integers: seven bits a byte, the lowest first.

    >>> _varint(300)
    b'\\xac\\x02'
    """
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _bytes(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_CRC = _table()


def _crc32c(data: bytes) -> int:
    """CRC-32C (RFC 3720, appendix B.4).

    >>> hex(_crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
