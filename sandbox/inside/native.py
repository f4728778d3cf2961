"""The optional C part of the jail, _native.c and _snapshot.c: builds it (`python -m sandbox.inside.native`), loads it.

Invariants
- Without it everything works the same, only slower; `load` then returns None.
- `NativeSlot` mirrors a structure of _native.c. Standard library only: this file also runs inside the jail.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

BUILT = Path(__file__).with_name("_native.so")  # made by `build`
IN_A_WHEEL = BUILT.with_name(f"_native{EXTENSION_SUFFIXES[0]}")  # made by setuptools
LIBRARY = IN_A_WHEEL if IN_A_WHEEL.exists() and not BUILT.exists() else BUILT
SOURCES = [Path(__file__).with_name(name) for name in ("_native.c", "_snapshot.c")]


class NativeSlot(ctypes.Structure):
    """The slot, as `Native.serve` needs it."""

    _fields_ = (
        ("control", ctypes.c_int),
        ("self", ctypes.c_int),
        ("uid", ctypes.c_int),
        ("image_bytes", ctypes.c_int64),
        ("home", ctypes.c_char_p),
        ("filter", ctypes.c_void_p),
    )


class Native:
    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path), use_errno=True)
        self._snapshot, self._forget, self._keep = library.snapshot, library.forget, library.keep
        self._snapshot.restype, self._forget.restype, self._keep.restype = ctypes.c_long, None, None
        # It takes the byref of a NativeSlot and the address of five 64-bit integers, and returns in the child of a
        # call.
        self.serve = library.serve
        self.serve.restype = None

    def forget(self, proc: int) -> None:
        """Unmaps the text of all libraries, so that later use of it can be seen. proc: descriptor of /proc."""
        self._forget(_smaps(proc))

    def keep(self, proc: int) -> None:
        """Takes over the text used since `forget`, where much of it is used side by side."""
        with _pagemap(proc) as pagemap:
            self._keep(_smaps(proc), pagemap.fileno())

    def snapshot(self, proc: int) -> int:
        """Covers what this process wrote so far, takes over the text used since `forget`; returns the bytes covered."""
        with _pagemap(proc) as pagemap:
            covered = int(self._snapshot(_smaps(proc), pagemap.fileno()))
        if covered < 0:
            raise OSError(-covered, f"snapshot: {os.strerror(-covered)}")
        return covered


def _pagemap(proc: int) -> io.FileIO:
    return open(os.open("self/pagemap", os.O_RDONLY, dir_fd=proc), "rb", buffering=0)


def _smaps(proc: int) -> Any:
    with open(os.open("self/smaps", os.O_RDONLY, dir_fd=proc), "rb") as file:
        # No string buffer: its type, made for its length, would be garbage that each call finds.
        return ctypes.byref(ctypes.c_char.from_buffer(bytearray(file.read() + b"\0")))


def load() -> Native | None:
    """Returns the library; None if it was not built, or built for another machine."""
    try:
        return Native(LIBRARY)
    except OSError:
        return None


def build() -> None:
    """Compiles the sources beside them. Raises RuntimeError with what is missing, and what to do about it."""
    import shutil
    import subprocess

    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("no C compiler (cc, gcc or clang) found. Fix: apt install gcc libc6-dev (Debian, Ubuntu)")
    partial = BUILT.with_suffix(f".so.{os.getpid()}")
    command = [compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(partial), *map(str, SOURCES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(
                f"{compiler} failed: {done.stderr.strip()[:500]}. Fix: apt install libc6-dev (Debian, Ubuntu)"
            )
        os.replace(partial, BUILT)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        build()
    except (RuntimeError, OSError) as error:
        sys.exit(f"no memory snapshot, calls cost up to twice as much: {error}")
