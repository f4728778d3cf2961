"""Attacks on the rest between cells: nothing that a session started may go on while it is idle."""

from __future__ import annotations

from .cells import CLONE_PARENT, REST, RESTED, STAMPS, SessionAttack, Turn, attack


def idles(name: str, code: str) -> SessionAttack:
    """What was started must not run while the session is idle."""
    return attack(name, "A3", Turn(code=STAMPS + code), REST, RESTED)


ATTACKS = (
    idles("a_thread_goes_on", "threading.Thread(target=stamp, daemon=True).start()"),
    idles("a_daemon_goes_on", "child(lambda: (os.setsid(), child(stamp)))"),
    idles("a_child_that_ignores_all_goes_on", "[signal.signal(n, 1) for n in (1, 2, 15, 18, 20)]\nchild(stamp)"),
    idles("a_child_of_the_keeper_goes_on", CLONE_PARENT + "if sibling() == 0: stamp()"),
    idles(
        "woken_by_a_timer",
        """
event = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0)
refused('timer_create', 222, 107, 1, event, ctypes.byref(ctypes.c_int()))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
signal.signal(signal.SIGALRM, lambda *_: None)
threading.Thread(target=stamp, daemon=True).start()
""",
    ),
    idles(
        "woken_by_each_other",
        """
pids = struct.Struct('4i')
for how in (lambda: os.kill(os.getpid(), 18), lambda: os.kill(-1, 18), lambda: os.kill(0, 18)):
    try: how(); print('woken')
    except PermissionError: pass
refused('tgkill', 234, 131, os.getpid(), os.getpid(), 18)
refused('tkill', 200, 130, os.getpid(), 18)
info = (ctypes.c_int * 32)(18, 0, -1, 0, 1, 0)
refused('rt_sigqueueinfo', 129, 138, os.getpid(), 18, info)
refused('rt_tgsigqueueinfo', 297, 240, os.getpid(), os.getpid(), 18, info)
refused('pidfd_send_signal', 424, 424, call(434, os.getpid(), 0), 18, None, 0)
def wake():
    threading.Thread(target=stamp, daemon=True).start()
    while True:
        for pid in (*pids.unpack_from(page, 64), -1, 0):
            for how in (lambda: os.kill(pid, signal.SIGCONT), lambda: call(234 if x86 else 131, pid, pid, 18)):
                try: how()
                except OSError: pass
pids.pack_into(page, 64, *[child(wake) for _ in range(4)])
""",
    ),
    idles(
        "woken_by_the_end_of_a_child",
        """
for flags in (18, 0x8000 | 18):  # an exit signal of its own
    if (pid := call(56 if x86 else 220, flags, 0, 0, 0, 0)) == 0: os._exit(0)
    if pid > 0 and not flags & 0x8000: print('exit signal')
for option in (1, 1 << 32 | 1): refused('death signal', 157, 167, option, 18, 0, 0, 0)
child(stamp)
""",
    ),
    # the kernel wakes a stopped group when the last process that held it in its session ends: here one that takes long
    # to, and begins when the cell ends
    attack(
        "woken_by_an_orphaned_group",
        "A3",
        Turn(
            code=STAMPS
            + """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
def leave():
    child(lambda: (os.setpgid(0, 0), stamp()))
    memory = bytearray(b'x') * (300 << 20)
    page[100] = 1
    while not page[101]: time.sleep(0.001)
    os.kill(os.getppid(), signal.SIGUSR1)
    os._exit(0)
child(leave)
while not page[100]: time.sleep(0.001)
"""
        ),
        Turn(code="before = ran()\npage[101] = 1\nif signal.sigwait([signal.SIGUSR1]) != signal.SIGUSR1: print(0)"),
        RESTED,
    ),
)
