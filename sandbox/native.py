"""The optional C part of the jail (_native.c): builds it, and loads it where it is. `python -m sandbox.native` builds.

Invariants
- Without it everything works the same, only slower: `load` then returns None.
- `Slot` mirrors a structure of _native.c. Standard library only: this file also runs inside the jail.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

LIBRARY = Path(__file__).with_name("_native.so")
SOURCE = Path(__file__).with_name("_native.c")


class Slot(ctypes.Structure):
    """What a slot is, for `Native.serve`."""

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
        self._snapshot = library.snapshot
        self._snapshot.restype = ctypes.c_long
        self.serve = library.serve  # (byref of a Slot, address of five 64-bit integers); returns in the child of a call
        self.serve.restype = None

    def snapshot(self, smaps: bytes) -> int:
        """Cover what this process wrote so far; the bytes covered. `smaps` is the text of /proc/self/smaps."""
        covered = int(self._snapshot(ctypes.create_string_buffer(smaps)))
        if covered < 0:
            raise OSError(-covered, f"snapshot: {os.strerror(-covered)}")
        return covered


def load() -> Native | None:
    """None when it was not built, or was built for another machine."""
    try:
        return Native(LIBRARY)
    except OSError:
        return None


def build() -> None:
    """Compile _native.c beside itself. RuntimeError names what is missing and the mend."""
    import shutil
    import subprocess

    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("no C compiler (cc, gcc or clang) found; on Debian or Ubuntu: apt install gcc libc6-dev")
    partial = LIBRARY.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(partial), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(
                f"{compiler} failed: {done.stderr.strip()[:500]}; on Debian or Ubuntu: apt install libc6-dev"
            )
        os.replace(partial, LIBRARY)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        build()
    except (RuntimeError, OSError) as error:
        sys.exit(f"no memory snapshot, calls cost up to twice as much: {error}")
