"""The engine's heap: what is freed is kept, and given back when it has become much."""

import subprocess
import sys

PROGRAM = """
import ctypes
from engine.process import heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def leave_holes(megabytes):
    blocks = []
    for _ in range(megabytes * 16):
        libc.memset(block := libc.malloc(65536), 1, 65536)
        blocks.append(block)
        libc.malloc(64)  # stays, as a kernel does
    for block in blocks:
        libc.free(block)


def held():
    return heap.anonymous_bytes() >> 20


libc.memset(libc.malloc(120 << 20), 1, 120 << 20)  # in use
ours = heap.Heap()
ours.keep()
ours.trim()
start = held()
leave_holes(48)
ours.trim()
print(held() - start)  # not enough to be given back
leave_holes(100)
print(held() - start)
ours.trim()
print(held() - start)
"""


def test_what_is_freed_is_kept_until_it_is_much_and_then_given_back():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    kept, grown, given_back = map(int, done.stdout.split())
    assert 40 < kept < 64
    assert grown > 90
    assert given_back < 20
