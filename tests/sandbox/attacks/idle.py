"""Attacks on the rest between cells: nothing that a session started may go on while it is idle."""

from __future__ import annotations

from .cells import CLONE_PARENT, REST, RESTED, STAMPS, SessionAttack, Turn, attack


def idles(name: str, code: str) -> SessionAttack:
    """What was started must not run while the session is idle."""
    return attack(name, "A3", Turn(code=STAMPS + code, stdout=None), REST, RESTED)


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
if libc.prctl(1, 18, 0, 0, 0) == 0: print('death signal')
child(stamp)
""",
    ),
    idles(
        "woken_by_an_orphaned_group",
        """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def leave():
    memory = bytearray(b'x') * (200 << 20)  # takes long to end
    pid = child(lambda: (os.setpgid(0, 0), stamp()))
    time.sleep(0.05)
    os.kill(os.getppid(), signal.SIGUSR1)
    os._exit(0)
signal.signal(signal.SIGUSR1, lambda *_: None)
child(leave)
signal.pause()
""",
    ),
)
