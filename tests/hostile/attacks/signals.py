"""Attacks by signals: on itself, its parent, its group, everybody (A1, A3, B9, C13)."""

from __future__ import annotations

from .record import HANGS, SYSCALLS, Attack

ATTACKS = (
    Attack(
        name="daemon_that_ignores_all_signals",
        point="A3",
        code="""
import os, signal
if os.fork() == 0:
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True: pass
print('early')
""",
        stdout="early\n",
    ),
    Attack(
        name="kill_everybody",
        point="B9",
        code="""
import os, signal
for number in range(1, 65):
    try: os.kill(-1, number)
    except OSError: pass
os._exit(8)
""",
        outcomes=("error", "killed"),
    ),
    Attack(
        name="kill_the_process_group",
        point="B9",
        code="import os\nos.kill(0, 9)",
        outcomes=("killed",),
    ),
    Attack(
        name="the_group_and_session_of_the_slot",
        point="B9",
        # where both have the same id, a signal to the group would reach the slot
        code="import os\nif {os.getpgrp(), os.getsid(0)} != {os.getpid()}: print(os.getpgrp(), os.getsid(0))",
    ),
    Attack(
        name="stop_the_process_group",
        point="B9",
        limits=HANGS,
        code="""
import os, signal
signal.signal(signal.SIGTSTP, signal.SIG_IGN)
for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGSTOP):
    try: os.kill(0, number)
    except OSError: pass
while True: pass
""",
        outcomes=("timeout",),
    ),
    Attack(
        name="signals_to_low_pids",
        point="B9",
        code="""
import os
for pid in (*range(0, -3, -1), *range(1, os.getpid())):
    for number in (0, 1, 2, 3, 10, 12, 15, 19, 18, 9):
        try: os.kill(pid, number) if pid > 0 else os.getpgid(pid) if not pid else None
        except OSError: pass
print('alive')
""",
        stdout="alive\n",
    ),
    Attack(
        name="kill_the_parent_and_the_tracer",
        point="B9",
        code="""
import os, signal
for number in (signal.SIGSTOP, signal.SIGKILL):
    for pid in {os.getppid(), os.getpgid(0), os.getsid(0)} - {0, os.getpid()}:
        try: os.kill(pid, number)
        except OSError: pass
    for group in {os.getpgid(0), os.getsid(0)} - {0}:
        try: os.killpg(group, 0) if group != os.getpid() else None
        except OSError: pass
print('alive')
""",
        stdout="alive\n",
    ),
    Attack(
        name="a_child_kills_the_main_process",
        point="A1",
        code="import os, signal\nif os.fork() == 0: os.kill(os.getppid(), 9); os._exit(0)\nsignal.pause()",
        outcomes=("killed",),
    ),
    Attack(
        name="a_child_stops_the_main_process",
        point="C13",
        limits=HANGS,
        code="import os, signal\nif os.fork() == 0: os.kill(os.getppid(), signal.SIGSTOP); os._exit(0)\nsignal.pause()",
        outcomes=("timeout",),
    ),
    Attack(
        name="killed_by_its_own_abort",
        point="A1",
        code="import os\nprint('out', flush=True)\nos.abort()",
        outcomes=("killed",),
        stdout="out\n",
    ),
    Attack(
        name="segmentation_fault",
        point="A1",
        code="import ctypes\nprint('out', flush=True)\nctypes.string_at(1)",
        outcomes=("killed",),
        stdout="out\n",
    ),
    Attack(
        name="illegal_instruction_and_trap",
        point="A1",
        code="import os, signal\nos.fork() or os.kill(os.getpid(), 5)\nos.wait()\nos.kill(os.getpid(), 4)",
        outcomes=("killed",),
    ),
    Attack(
        name="a_death_signal_for_later",
        point="A3",
        code=SYSCALLS
        + """
import signal, time
for number in (signal.SIGSTOP, signal.SIGKILL):
    libc.prctl(1, number, 0, 0, 0)
if os.fork() == 0:
    libc.prctl(1, signal.SIGCONT, 0, 0, 0)
    time.sleep(60)
print('set')
""",
        stdout="set\n",
    ),
    Attack(
        name="timers_and_signals_pending_at_the_end",
        point="A3",
        code="""
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGCONT): os.kill(os.getpid(), number)
print('pending')
""",
        stdout="pending\n",
    ),
    Attack(
        name="signals_queued_with_forged_senders",
        point="B9",
        code=SYSCALLS
        + """
info = (ctypes.c_int * 32)(9, 0, -1, 0, 1, 0)
for pid in range(0, os.getpid()):
    call(129 if x86 else 138, pid, 9, info)  # rt_sigqueueinfo
    call(234 if x86 else 131, pid, pid, 9)  # tgkill
print('alive')
""",
        stdout="alive\n",
    ),
    Attack(
        name="stopped_children_left",
        point="A3",
        code="""
import os, signal
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        while True: signal.pause()
    os.kill(pid, signal.SIGSTOP)
print('left')
""",
        stdout="left\n",
    ),
)
