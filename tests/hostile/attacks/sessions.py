"""Attacks by cells of a session: on its keeper, on the memory through which code comes in and the end of a cell is
told, on the copy of the state, on the limits. All they can reach is their own session.
"""

from __future__ import annotations

from .cells import (
    ANY,
    BOARD,
    CLONE_PARENT,
    COSTLY,
    DIES,
    FORGES,
    HANGS,
    LATE,
    X_IS_1,
    X_OR_DEAD,
    Turn,
    X,
    attack,
)
from .record import SYSCALLS

ATTACKS = (
    attack(
        "descriptors_that_tell_of_events",
        "B9",
        SYSCALLS
        + """
import fcntl, os
for path, command, value in ((os.path.dirname(os.__file__), 1026, 1), (os.__file__, 1024, 0), (os.__file__, 10, 18)):
    fd = os.open(path, os.O_RDONLY)
    try: fcntl.fcntl(fd, command, value); print(command)
    except OSError: pass
    if call(72 if x86 else 25, fd, 1 << 32 | command, value) == 0: print(command, 'with an upper half')
""",
    ),
    attack(
        "text_between_cells",
        "A3",
        Turn(
            code="import os, time\npid = os.fork()\nwhile pid == 0: os.write(1, b'.'); time.sleep(0.001)", stdout=None
        ),
        Turn(code="pass", stdout=None, idle=True, check=lambda r: set(r.stdout) <= {"."} and len(r.stdout) < 100),
        Turn(code="os.kill(pid, 9); print('end')", stdout=None, check=lambda r: r.stdout.endswith("end\n")),
    ),
    attack(
        "signals_to_the_keeper",
        "A3",
        X,
        SYSCALLS
        + """
info = (ctypes.c_int * 32)(9, 0, -1, 0, 1, 0)
for number in range(1, 65):
    for pid in (1, os.getppid(), -os.getppid()):
        try: os.kill(pid, number)
        except OSError: pass
    call(129 if x86 else 138, 1, number, info)  # rt_sigqueueinfo, tgkill, tkill, pidfd_send_signal
    call(234 if x86 else 131, 1, 1, number)
    call(200 if x86 else 130, 1, number)
    fd = call(434, 1, 0)
    if fd >= 0: call(424, fd, number, None, 0); os.close(fd)
""",
        X_IS_1,
        DIES,
        X_IS_1,
    ),
    attack(
        "memory_of_the_keeper",
        "A2",
        SYSCALLS
        + """
for fd in range(3, 256):
    try: os.fstat(fd); print(fd)
    except OSError: pass
buffer = ctypes.create_string_buffer(64)
iov = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
refused('ptrace', 101, 117, 16, 1, 0, 0)
refused('process_vm_writev', 311, 271, 1, iov, 1, iov, 1, 0)
refused('pidfd_getfd', 438, 438, max(call(434, 1, 0), 0), 5, 0)
""",
    ),
    attack(
        "everybody_killed",
        "A3",
        X,
        Turn(
            code="import os\nfor n in (19, 15, 9):\n    try: os.kill(-1, n)\n    except OSError: pass\nprint(x)",
            stdout="1\n",
        ),
        Turn(code="os.kill(os.getpid(), 9)", outcomes=("killed",), states=("restored",)),
        X_IS_1,
    ),
    attack(
        "stops_in_a_cell",
        "C13",
        X,
        Turn(code="import os\nos.kill(os.getpid(), 19)\nx = 3", outcomes=("timeout",), limits=HANGS),
        Turn(code="x in (1, 3)", display="True"),
    ),
    attack(
        "interrupts_ignored",
        "C13",
        X,
        Turn(
            code="import signal\nsignal.signal(2, signal.SIG_IGN)\nx = 2\nwhile True: pass",
            outcomes=("timeout",),
            states=("restored",),
            limits=HANGS,
        ),
        X_IS_1,
    ),
    attack(
        "interrupts_caught",
        "C13",
        X,
        Turn(
            code="while True:\n    try:\n        for _ in iter(int, 1): pass\n    except BaseException: x = 2",
            outcomes=("timeout",),
            states=("restored",),
            limits=HANGS,
        ),
        X_IS_1,
    ),
    attack(
        "the_end_of_this_cell_forged",
        "A1",
        X,
        Turn(code=BOARD + "done(serial(), 0); os.kill(os.getpid(), 19)\nprint('resumed', flush=True)", limits=FORGES),
        LATE,
        ANY,
    ),
    attack(
        "the_end_of_a_later_cell_forged",
        "A1",
        X,
        Turn(code=BOARD + "for n in range(100): done(serial() + n, 0)", limits=FORGES),
        Turn(code="1 / 0", outcomes=("error",)),
        # a thread ends the next cell before it began: an answer without output, of this session
        Turn(
            code=BOARD
            + """
was = serial()
def forge():
    while serial() == was: pass
    done(serial(), 0); os.kill(os.getpid(), 19)
threading.Thread(target=forge, daemon=True).start()
""",
            limits=FORGES,
        ),
        LATE,
        LATE,
        ANY,
    ),
    attack(
        "a_timeout_forged_away",
        "A1",
        X,
        Turn(
            code=BOARD + "signal.signal(2, signal.SIG_IGN)\nwhile True: done(serial(), 0)",
            outcomes=("timeout",),
            states=("restored",),
            limits=HANGS,
        ),
        X_IS_1,
    ),
    attack(
        "exit_codes_of_many_bits",
        "A1",
        Turn(
            code=BOARD + "done(serial(), 1 << 62); os.kill(os.getpid(), 19)",
            outcomes=("error",),
            check=lambda r: r.exit_code == 255,
            limits=FORGES,
        ),
        LATE,
    ),
    attack(
        "an_end_for_memory_forged",
        "A1",
        Turn(code=BOARD + "done(serial(), -1 << 62); os.kill(os.getpid(), 19)", outcomes=("memory",)),
        LATE,
    ),
    attack("an_exit_code_that_is_large", "A1", Turn(code="raise SystemExit(1 << 70)", outcomes=("error",))),
    attack(
        "a_copy_pretended",
        "A1",
        X,
        Turn(
            code=BOARD
            + CLONE_PARENT
            + """
ctypes.memmove(address + 24, struct.pack('q', 1), 8)  # the header says: take a copy
x = 666
if sibling(): time.sleep(0.1); os._exit(1)
while True: os.kill(os.getpid(), 19)
""",
            outcomes=("error",),
            states=("restored",),
        ),
        X_IS_1,
    ),
    attack(
        "a_copy_pretended_beside_the_true_one",
        "A1",
        Turn(code="x = 1\n" + COSTLY),
        Turn(
            code=BOARD
            + CLONE_PARENT
            + "x = 666\nif sibling(): time.sleep(0.1); os._exit(1)\nwhile True: os.kill(os.getpid(), 19)",
            outcomes=("error",),
            states=("restored",),
        ),
        X_IS_1,
    ),
    attack(
        "deaths_right_after_the_copy",
        "A8",
        Turn(code="x = 1\nwhile True: pass", outcomes=("timeout",), limits=HANGS),  # cannot be replayed
        *[DIES, X_IS_1] * 5,
    ),
    attack(
        "a_copy_that_is_killed",
        "A1",
        Turn(code="x = 1\n" + COSTLY),
        Turn(
            code="import os\nfor pid in range(2, 100):\n    if pid != os.getpid():\n        try: os.kill(pid, 9)\n"
            "        except OSError: pass\nos._exit(1)",
            outcomes=("error",),
            states=("restored",),
        ),
        X_OR_DEAD,
        X_IS_1,
    ),
    attack(
        "what_outlives_a_crash",
        "A3",
        Turn(code="x = 1\n" + COSTLY),
        Turn(
            code="import os, time\nopen('f', 'w').close()\nif os.fork():\n    time.sleep(0.1)\n    os._exit(1)\n"
            "while True: os.write(os.open('f', os.O_WRONLY | os.O_APPEND), b'x'); time.sleep(0.001)",
            outcomes=("error",),
            states=("restored",),
        ),
        Turn(code="import os, time\na = os.stat('f').st_size\ntime.sleep(0.2)\nos.stat('f').st_size - a", display="0"),
        X_IS_1,
    ),
    attack(
        "the_board_unmapped",
        "A3",
        X,
        Turn(
            code=BOARD + "libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(9 << 20))",
            outcomes=("killed",),
            states=("restored",),
        ),
        X_IS_1,
    ),
    attack(
        "the_interpreters_loop_patched",
        "A5",
        X,
        Turn(
            code="""
import sys
frame = sys._getframe()
while 'board' not in frame.f_locals: frame = frame.f_back
for name in ('_run', 'HEADER', 'DONE'): frame.f_globals[name] = None
""",
            outcomes=("ok", "error", "killed"),
            states=("kept", "restored"),
        ),
        Turn(code="x", outcomes=("ok", "error", "killed"), states=("kept", "restored")),
        X_IS_1,
    ),
    attack(
        "standard_descriptors_closed",
        "A4",
        X,
        "import os\nfor fd in (0, 1, 2): os.close(fd)\nfor n in range(3): os.open(f'f{n}', os.O_RDWR | os.O_CREAT)",
        Turn(code="print('into a file')"),
        X_IS_1,
    ),
    attack(
        "flags_and_locks_of_the_outputs",
        "A4",
        Turn(
            code="import fcntl, os\nfor fd in (0, 1, 2):\n    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)\n"
            "    fcntl.flock(fd, 2)\nprint('once')",
            stdout="once\n",
        ),
        Turn(code="os.lseek(1, 0, 0)\nprint('twice')", stdout=None, check=lambda r: r.stdout.strip("\0") == "twice\n"),
    ),
    attack(
        "leaves_by_every_door",
        "A1",
        X,
        Turn(code="import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(3)", outcomes=("error",)),
        Turn(code="import sys\nsys.exit(0)"),
        Turn(code="import _thread\n_thread.interrupt_main()\nx = 1", outcomes=("ok", "error")),
        X_IS_1,
        Turn(code="os.abort()", outcomes=("killed",), states=("restored",)),
        Turn(
            code="import os, sys\nos.execv(sys.executable, ['p', '-c', '0'])",
            outcomes=("killed",),
            states=("restored",),
        ),
        X_IS_1,
    ),
    attack(
        "a_dead_state_is_never_fresh",
        "A8",
        Turn(code="import time\nx = 1\nwhile True: pass", outcomes=("timeout",), limits=HANGS),  # cannot be replayed
        Turn(
            code="import os\nif os.fork() == 0: os.kill(os.getppid(), 9)\ntime.sleep(5)",
            outcomes=("killed",),
            states=("restored",),
        ),
        X_IS_1,
    ),
)
