"""Encodes `engine.types` as bytes, for the journal, for the record, and between machines.

Invariants
- Decoding gives what was encoded, to the last bit. Arrays are stored as their bytes, little-endian, and come back
  read-only.
- A frame whose bytes have changed is not read, nor is anything after it.

A frame is the length and the CRC-32 of its payload (both uint32, little-endian), then the payload, in msgpack.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec
import numpy as np

HEADER = struct.Struct("<II")


def encode(value: Any) -> bytes:
    """Returns the value as msgpack. Raises TypeError for what has no encoding."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Returns a decoder of values of this type. It raises msgspec.DecodeError for bytes of another type."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_to_array)


def frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def frames(data: bytes) -> tuple[list[bytes], int]:
    """Returns the payloads of the whole frames at the start of data, and where they end."""
    payloads, end = list[bytes](), 0
    while end + HEADER.size <= len(data):
        length, checksum = HEADER.unpack_from(data, end)
        start = end + HEADER.size
        payload = data[start : start + length]
        if not length or len(payload) != length or zlib.crc32(payload) != checksum:
            break
        payloads.append(payload)
        end = start + length
    return payloads, end


def _plain(value: Any) -> Any:
    """Returns the bytes of an array, or the number of a numpy scalar, which a policy or a reward may give."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value)} has no encoding")


def _to_array(kind: Any, data: bytes) -> Any:
    """kind: one of the array types of engine.types, NDArray[scalar]."""
    return np.frombuffer(data, kind.__args__[1].__args__[0])
