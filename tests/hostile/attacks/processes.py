"""Attacks by processes: outliving the call, joining those above it, confusing who waits for it (A3)."""

from __future__ import annotations

from .record import HANGS, QUICK, SYSCALLS, Attack

CLONE = (
    SYSCALLS
    + """
import signal, time
def clone(flags):
    return call(56 if x86 else 220, flags, 0, 0, 0, 0)
"""
)

ATTACKS = (
    Attack(
        name="daemon_by_double_fork",
        point="A3",
        code="""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.2)
        print('late', flush=True)
        os.system('true')
    os._exit(0)
print('early')
""",
        stdout="early\n",
    ),
    Attack(
        name="orphan_that_goes_on_writing",
        point="A3",
        code="""
import os
r, w = os.pipe()
if os.fork() == 0:
    os.write(w, b'x')
    while True:
        try: os.write(1, b'.' * 100)
        except OSError: pass
os.read(r, 1)
""",
        stdout=None,
        check=lambda r: set(r.stdout) <= {"."} and r.exit_code == 0,
    ),
    Attack(
        name="orphan_that_truncates_later",
        point="A3",
        code="""
import os
if os.fork() == 0:
    while True:
        try: os.ftruncate(2, 0); os.lseek(2, 0, 0); os.write(2, b'forged')
        except OSError: pass
os.write(1, b'mine')
""",
        stdout=None,
        check=lambda r: (r.stdout, r.exit_code) == ("mine", 0) and r.stderr in ("", "forged"),
    ),
    Attack(
        name="many_orphans",
        point="A3",
        code="""
import os, time
for _ in range(10):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(60)
        os._exit(0)
    os.wait()
print('left')
""",
        stdout="left\n",
    ),
    Attack(
        name="a_chain_of_forks",
        point="A3",
        limits=HANGS,
        code="import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n    except OSError: pass",
        outcomes=("ok", "timeout"),
    ),
    Attack(
        name="children_of_our_parent",
        point="A3",
        code=CLONE
        + """
for _ in range(12):
    if clone(0x8000 | signal.SIGCHLD) == 0: os._exit(77)  # CLONE_PARENT
time.sleep(0.1)
os._exit(5)
""",
        outcomes=("error",),
        exit_code=5,
    ),
    Attack(
        name="a_living_child_of_our_parent",
        point="A3",
        code=CLONE
        + """
if clone(0x8000 | signal.SIGCHLD) == 0:
    while True: time.sleep(0.05); os.write(2, b'late')
os._exit(5)
""",
        outcomes=("error",),
        exit_code=5,
    ),
    Attack(
        name="a_child_whose_end_kills",
        point="A3",
        code=CLONE
        + """
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if clone(0x8000 | signal.SIGKILL) == 0: os._exit(0)
if clone(signal.SIGUSR1) == 0:
    if os.fork() == 0: time.sleep(0.05); os._exit(0)  # ends as a child of PID 1
    os._exit(0)
time.sleep(0.1)
print('alive')
""",
        stdout="alive\n",
    ),
    Attack(
        name="vfork_that_never_returns",
        point="C13",
        limits=HANGS,
        code=CLONE + "if clone(0x4000 | signal.SIGCHLD) == 0:\n    while True: time.sleep(1)\n",  # CLONE_VFORK
        outcomes=("timeout",),
    ),
    Attack(
        name="a_child_exits_in_our_place",
        point="A1",
        code="import os, sys\nif os.fork() == 0: sys.exit(0)\nos.wait()\nsys.exit(3)",
        outcomes=("error",),
        exit_code=3,
    ),
    Attack(
        name="both_sides_of_a_fork_return",
        point="A5",
        code="import os\nif os.fork(): os.wait()\nprint('end', flush=True)",
        stdout="end\nend\n",
    ),
    Attack(
        name="a_name_that_confuses_readers_of_proc",
        point="A6",
        code=SYSCALLS
        + """
import time
name = ctypes.create_string_buffer(b') R 1 1\\n0 0 0')
libc.prctl(15, name, 0, 0, 0)
if os.fork() == 0:
    time.sleep(60)
time.sleep(0.05)
print('named')
""",
        stdout="named\n",
    ),
    Attack(
        name="reaper_of_orphans",
        point="A3",
        code=SYSCALLS
        + """
import time
libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(60)
    os._exit(0)
os.wait()
print('reaper')
""",
        stdout="reaper\n",
    ),
    Attack(
        name="zombies_left_unreaped",
        point="A3",
        code="import os, time\nfor _ in range(9):\n    os.fork() or os._exit(1)\ntime.sleep(0.05)\nprint('left')",
        stdout="left\n",
    ),
    Attack(
        name="sessions_and_groups_moved",
        point="A3",
        code="""
import os, time
for leave in (os.setsid, os.setpgrp):
    if os.fork() == 0:
        leave()
        if os.fork() == 0: os.setpgid(0, 0)
        time.sleep(60)
os.setpgid(0, 0) if os.getpgid(0) != os.getpid() else None
print('moved')
""",
        stdout="moved\n",
    ),
    Attack(
        name="execs_in_a_row",
        point="A3",
        limits=QUICK,
        code="""
import os, sys
code = "import os, sys; n = int(sys.argv[2]); n or os._exit(7); "
code += "os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', sys.argv[1], sys.argv[1], str(n - 1)])"
os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', code, code, '3'])
""",
        outcomes=("error",),
        exit_code=7,
    ),
)
