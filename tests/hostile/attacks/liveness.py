"""Attacks on the time and the attention of the host: programs that do not end, floods, messes to clean up (C13-C16)."""

from __future__ import annotations

from .record import HANGS, QUICK, SMALL, SYSCALLS, Attack

TIMEOUT = {"limits": HANGS, "outcomes": ("timeout",), "point": "C13"}

ATTACKS = (
    Attack(name="endless_loop", code="while True: pass", **TIMEOUT),
    Attack(name="endless_sleep", code="import time\ntime.sleep(1e6)", **TIMEOUT),
    Attack(name="c_code_that_holds_the_interpreter_lock", code="pow(3, 10 ** 9)", **TIMEOUT),
    Attack(name="catastrophic_expression", code="import re\nre.match('(a*)*b', 'a' * 40)", **TIMEOUT),
    Attack(name="infinite_sum", code="import itertools\nsum(itertools.repeat(0))", **TIMEOUT),
    Attack(
        name="every_signal_ignored_and_blocked",
        code="""
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: signal.sigtimedwait(signal.valid_signals(), 60)
""",
        **TIMEOUT,
    ),
    Attack(name="stops_itself", code="import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", **TIMEOUT),
    Attack(name="exit_hook_that_hangs", code="import atexit, time\natexit.register(time.sleep, 1e6)", **TIMEOUT),
    Attack(
        name="thread_that_never_ends",
        code="import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,)).start()",
        **TIMEOUT,
    ),
    Attack(
        name="exceptions_swallowed",
        code="""
def again():
    while True:
        try:
            while True: pass
        except BaseException: again()
        finally: again()
again()
""",
        **TIMEOUT,
    ),
    Attack(
        name="finaliser_that_hangs",
        code="class X:\n    def __del__(self):\n        while True: pass\nx = X()\ndel x",
        **TIMEOUT,
    ),
    Attack(
        name="deadlock",
        code="import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        **TIMEOUT,
    ),
    Attack(name="fifo_without_a_writer", code="import os\nos.mkfifo('f')\nopen('f').read()", **TIMEOUT),
    Attack(
        name="waits_for_a_child_that_hangs",
        code="import os, time\nif os.fork() == 0: time.sleep(1e6)\nos.wait()",
        **TIMEOUT,
    ),
    Attack(
        name="threads_that_spin_in_c",
        code="""
import hashlib, threading
def spin():
    while True: hashlib.sha256(bytes(1 << 20))
for _ in range(6): threading.Thread(target=spin, daemon=True).start()
spin()
""",
        **TIMEOUT,
    ),
    Attack(
        name="fork_bomb",
        code="import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        **TIMEOUT,
    ),
    Attack(
        name="exec_bomb",
        code="""
import os, sys
code = "import os, sys; os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', sys.argv[1], sys.argv[1]])"
os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', code, code])
""",
        **TIMEOUT,
    ),
    Attack(
        name="a_filter_that_forbids_its_own_exit",
        code=SYSCALLS
        + """
import struct
ends = (60, 231) if x86 else (93, 94)
lines = [(0x20, 0, 0, 0), (0x15, 1, 0, ends[0]), (0x15, 0, 1, ends[1]), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
body = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', len(lines), ctypes.addressof(body)))
libc.prctl(22, ctypes.c_ulong(2), program, 0, 0)
while True: pass
""",
        **TIMEOUT,
    ),
    Attack(
        name="a_grandchild_holds_the_output",
        point="C14",
        code="import os, time\nif os.fork() == 0: time.sleep(60)\nprint('done')",
        stdout="done\n",
        check=lambda r: r.wall_s < 5,
    ),
    Attack(
        name="both_outputs_flooded",
        point="C14",
        limits=SMALL,
        code="import os\nwhile True:\n    os.write(1, b'o' * 65536)\n    os.write(2, b'e' * 65536)",
        outcomes=("output",),
        stdout="o" * 4096,
        check=lambda r: r.truncated and r.stderr[:100] == "e" * 100,
    ),
    Attack(
        name="stderr_flooded_by_tracebacks",
        point="C14",
        limits=SMALL,
        code="import traceback\nwhile True:\n    try: open('v' * 50000)\n    except OSError: traceback.print_exc()",
        outcomes=("output", "error"),
        check=lambda r: r.truncated and len(r.stderr) == 4096,
    ),
    Attack(
        name="output_by_many_processes",
        point="C14",
        limits=SMALL,
        code="""
import os
for _ in range(3): os.fork()
while True: os.write(1, b'm' * 4096)
""",
        outcomes=("output",),
        stdout="m" * 4096,
    ),
    Attack(
        name="an_exception_of_a_megabyte",
        point="C14",
        limits=SMALL,
        code="raise ValueError('v' * (1 << 20))",
        outcomes=("error", "output"),
        check=lambda r: r.truncated,
    ),
    Attack(
        name="an_exception_whose_text_explodes",
        point="C14",
        limits=SMALL,
        code="""
class Bomb(Exception):
    def __str__(self): return 'e' * (1 << 26)
raise Bomb
""",
        outcomes=("error", "output", "memory"),
        stdout="",
    ),
    Attack(
        name="a_very_deep_tree",
        point="C16",
        code="""
import os
try:
    for _ in range(5000): os.mkdir('d' * 20); os.chdir('d' * 20)
except OSError: pass
""",
    ),
    Attack(
        name="a_very_wide_tree",
        point="C16",
        code="""
import os
try:
    for n in range(10000): os.close(os.open(f'file{n}', os.O_CREAT))
except OSError: pass
""",
    ),
    Attack(
        name="odd_names",
        point="C16",
        code="""
import os
for name in (b'\\n', b'-rf', b'\\xff\\xfe', b'a' * 255, b' ', b'*', b'$(reboot)',
             b"'", b'..x', 'é'.encode(), b'\\x1b[2J'):
    os.mkdir(name); open(name + b'/' + name, 'wb').close()
os.mkdir('x'); os.chmod('x', 0)
""",
    ),
    Attack(
        name="links_to_what_is_not_ours",
        point="C16",
        code="""
import os
for n, target in enumerate(('/', '/etc', '/usr/lib', '/root', '..', '.', '/proc/1/root', '/tmp')):
    os.symlink(target, f'l{n}')
os.symlink('loop', 'loop')
os.mkfifo('fifo')
open('f', 'w').close()
for n in range(50): os.link('f', f'h{n}')
for path in ('/usr/lib/os-release', os.__file__):
    try: os.link(path, 'hard'); print('linked', path)
    except OSError: pass
""",
    ),
    Attack(
        name="file_held_by_a_mapping_and_a_child",
        point="C16",
        code="""
import mmap, os, time
f = open('m', 'w+b'); f.truncate(1 << 20)
m = mmap.mmap(f.fileno(), 1 << 20); m[:5] = b'dirty'
if os.fork() == 0:
    os.chdir('/tmp')
    while True: m[:] = bytes(1 << 20)
""",
    ),
    Attack(
        name="forty_children_one_by_one",
        point="C13",
        limits=QUICK,
        code="import os\nfor _ in range(40):\n    if os.fork() == 0: os._exit(0)\n    os.wait()\nprint('end')",
        stdout="end\n",
    ),
)
