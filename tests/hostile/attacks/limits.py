"""Attacks on what a call may use: memory by every road, disk, inodes, descriptors, threads, time (C15, B10).

No limit is a guest's to lift, and each must end only the call that ran into it. Programs that hoard print when they got
more than twice what they were allowed.
"""

from __future__ import annotations

from sandbox import Limits

from .record import HANGS, MIB, SYSCALLS, Attack

MEMORY = Limits(wall_s=30, cpu_s=20, memory_bytes=192 * MIB, disk_bytes=4 * MIB, processes=16)
FEW = Limits(wall_s=30, cpu_s=20, memory_bytes=512 * MIB, disk_bytes=4 * MIB, processes=8)
SECOND = Limits(wall_s=6, cpu_s=1)
ENDED = ("ok", "memory", "error", "killed")  # how a hoarder ends is its own affair, as long as it does not get it


def hoard(name: str, code: str, outcomes: tuple[str, ...] = ENDED, limits: Limits = MEMORY) -> Attack:
    return Attack(name=name, point="C15", code=code, outcomes=outcomes, limits=limits)


ATTACKS = (
    hoard("one_large_object", "x = bytearray(1 << 31)", ("memory",)),
    hoard("objects_without_end", "x = []\nwhile True: x.append(bytes(1 << 20))", ("memory",)),
    hoard("integers_without_end", "x = 3\nwhile True: x = x * x", ("memory", "timeout"), HANGS),
    hoard(
        "memory_error_swallowed",
        """
x = []
while len(x) < 400:
    try: x.append(bytearray(b'x') * (1 << 20))
    except MemoryError: break
if len(x) >= 384: print(len(x))
""",
    ),
    hoard(
        "private_mappings",
        """
import mmap
x = []
try:
    while len(x) < 400:
        x.append(mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE)); x[-1].write(b'x' * (1 << 20))
except (OSError, MemoryError): pass
if len(x) >= 384: print(len(x))
""",
    ),
    hoard(
        "shared_mappings",
        """
import mmap, os
# each process maps its own: address space alone does not count them together
r, w = os.pipe()
for n in range(8):
    if os.fork() == 0:
        try:
            m = mmap.mmap(-1, 64 << 20)
            m.write(b'x' * (64 << 20))
            os.write(w, b'x')
        except (OSError, MemoryError): pass
        import signal; signal.pause()
import select
held = 0
while held < 8 and select.select([r], [], [], 1.2)[0]: held += len(os.read(r, 8))
if held == 8: print('held', held * 64)
""",
    ),
    hoard(
        "many_processes",
        """
import os, select, signal
r, w = os.pipe()
for n in range(12):
    if os.fork() == 0:
        try:
            x = bytearray(b'x') * (48 << 20)
            os.write(w, b'x')
        except MemoryError: pass
        signal.pause()
held = 0
while held < 12 and select.select([r], [], [], 1.2)[0]: held += len(os.read(r, 16))
if held == 12: print('held', held * 48)
""",
    ),
    hoard(
        "memory_files",
        """
import os
fds = []
try:
    for n in range(4):
        fds.append(os.memfd_create('x'))
        for _ in range(100): os.pwrite(fds[-1], b'x' * (1 << 20), os.fstat(fds[-1]).st_size)
except (OSError, AttributeError): pass
if sum(os.fstat(fd).st_size for fd in fds) >= 384 << 20: print('held')
""",
    ),
    hoard(
        "pipe_buffers",
        """
import fcntl, os
held, pipes = 0, []
try:
    for _ in range(120):
        pipes.append(os.pipe())
        try: fcntl.fcntl(pipes[-1][1], 1031, 1 << 20)
        except OSError: pass
        os.set_blocking(pipes[-1][1], False)
        try:
            while True: held += os.write(pipes[-1][1], b'x' * 65536)
        except BlockingIOError: pass
except OSError: pass
if held > 384 << 20: print('held', held)
""",
    ),
    hoard(
        "socket_buffers",
        """
import socket
held, pairs = 0, []
try:
    while held < 400 << 20 and len(pairs) < 100:
        pairs.append(socket.socketpair())
        for s in pairs[-1]:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            s.setblocking(False)
            try:
                while True: held += s.send(b'x' * 65536)
            except BlockingIOError: pass
except OSError: pass
if held >= 400 << 20: print('held', held)
""",
    ),
    hoard(
        "attributes_of_stdout",
        """
import os
held = 0
try:
    while held < 384 << 20:
        os.setxattr(1, f'user.{held}', b'x' * 65536)
        held += 65536
except OSError: pass
if held >= 384 << 20: print('held', held)
""",
    ),
    hoard(
        "attributes_of_files",
        """
import os
held = 0
open('f', 'w').close()
try:
    while held < 384 << 20:
        os.setxattr('f', f'user.{held}', b'x' * 65536)
        held += 65536
except OSError: pass
if held >= 384 << 20: print('held', held)
""",
    ),
    hoard(
        "locked_memory",
        """
import ctypes, mmap
libc = ctypes.CDLL(None)
if libc.mlockall(7) == 0: print('locked all')
m = mmap.mmap(-1, 16 << 20)
address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m)))
if libc.mlock(address, ctypes.c_size_t(16 << 20)) == 0: print('locked')
""",
    ),
    hoard(
        "huge_pages",  # where the machine has some, no control group of memory counts them
        SYSCALLS
        + """
for size in (0, 21, 30, 63):  # no kernel has the last one: it would say so
    got = call(9 if x86 else 222, 0, 1 << 30, 3, 0x40022 | size << 26, -1, 0)
    if got != -1 or ctypes.get_errno() != errno.ENOMEM: print(size, got, ctypes.get_errno())
""",
    ),
    hoard(
        "timers_and_queued_signals",
        """
import ctypes, os, signal
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
n = sum(libc.sigqueue(os.getpid(), 40, None) == 0 for _ in range(50000))
if n >= 50000: print('queued', n)
""",
    ),
    hoard(
        "disk_in_tmp",
        """
f = open('/tmp/x', 'wb')
try:
    for _ in range(64): f.write(bytes(1 << 20)); f.flush()
    print('written')
except OSError: f = None
""",
        ("ok", "output"),
    ),
    hoard(
        "disk_in_many_files",
        """
import os
n = 0
try:
    for n in range(64):
        with open(f'/dev/shm/{n}', 'wb') as f: f.write(bytes(1 << 20))
    print('written')
except OSError: pass
""",
        ("ok",),
    ),
    hoard(
        "disk_by_allocation",
        """
import os
for path in ('/tmp/x', None):
    fd = 1 if path is None else os.open(path, os.O_RDWR | os.O_CREAT)
    for what in (lambda: os.posix_fallocate(fd, 0, 256 << 20), lambda: os.ftruncate(fd, 1 << 40)):
        try: what(); os.write(2, b'allocated')
        except OSError: pass
""",
        ("ok", "output"),
        Limits(wall_s=6, disk_bytes=4 * MIB),
    ),
    hoard(
        "inodes",
        """
import os
n = 0
try:
    while n < 100000: os.mkdir(f'/tmp/{n}'); n += 1
    print('made', n)
except OSError: pass
""",
        ("ok",),
    ),
    hoard(
        "descriptors",
        """
import os
n = 0
try:
    while n < 5000: os.dup(0); n += 1
    print('opened', n)
except OSError: pass
""",
        ("ok",),
    ),
    hoard(
        "threads",
        """
import threading, time
n = 0
threading.stack_size(65536)
try:
    while n < 300: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1
    print('started', n, flush=True)
except RuntimeError: pass
import os; os._exit(0)
""",
        ("ok",),
        FEW,
    ),
    hoard(
        "processes",
        """
import os, time
n = 0
try:
    while n < 100:
        if os.fork() == 0: time.sleep(60)
        n += 1
except OSError: pass
if n >= 8: print('started', n)
""",
        ("ok",),
        FEW,
    ),
    hoard(
        "processes_that_change_their_session",
        """
import os, time
r, w = os.pipe()
def breed(depth):
    for _ in range(3):
        try:
            if os.fork() == 0:
                os.write(w, b'x'); os.setsid()
                if depth: breed(depth - 1)
                time.sleep(60)
        except OSError: pass
breed(3)
time.sleep(0.3)
os.set_blocking(r, False)
if len(os.read(r, 1000) if True else b'') >= 8: print('bred')
""",
        ("ok",),
        FEW,
    ),
    hoard("recursion", "def f(): f()\nf()", ("error",)),
    hoard(
        "recursion_without_a_limit",
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        ("killed", "memory", "error", "timeout"),
        HANGS,
    ),
    hoard(
        "recursion_in_c",
        "import sys, json\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(2 * 10 ** 5): x = [x]\nrepr(x)",
        ("killed", "memory", "error", "timeout"),
        SECOND,
    ),
    hoard("source_nested_too_deep", "eval('(' * 100000 + ')' * 100000)", ("error", "memory", "killed")),
    hoard("compressed_bomb", "import zlib\nx = zlib.decompress(zlib.compress(bytes(1 << 28), 1))", ("memory",)),
    hoard("processor", "n = 0\nwhile True: n += 1", ("timeout",), SECOND),
    hoard(
        "processor_with_its_signal_ignored",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        ("timeout",),
        SECOND,
    ),
    hoard(
        "processor_by_children",
        """
import os
while True:
    if os.fork() == 0:
        for _ in range(3 * 10 ** 6): pass
        os._exit(0)
    os.wait()
""",
        ("timeout",),
        Limits(wall_s=1.5, cpu_s=1),
    ),
)
