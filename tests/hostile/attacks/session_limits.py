"""Attacks on the limits of a session, a little in each cell (C15)."""

from __future__ import annotations

from .cells import COSTLY, DIES, HANGS, LITTLE, X_IS_1, Turn, X, attack
from .record import QUICK, SYSCALLS

# processes that share this one's memory and end at once: 33,000 numbers in a second or two
NUMBERS = (
    SYSCALLS
    + """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
stack, end = ctypes.create_string_buffer(1 << 16), ctypes.cast(libc._exit, ctypes.c_void_p)
top = ctypes.c_void_p(ctypes.addressof(stack) + 65520 & -16)
for _ in range(33_000): assert libc.clone(end, top, 0x4111, None) > 0
"""
)

ATTACKS = (
    attack(
        "memory_over_several_cells",
        "C15",
        Turn(code="x, hoard = 1, []", limits=LITTLE),
        *[Turn(code="hoard.append(bytearray(b'x') * (60 << 20))", outcomes=("ok", "memory"), limits=LITTLE)] * 4,
        Turn(code="print('held') if len(hoard) > 2 else None", limits=LITTLE),
        Turn(code="x", display="1", limits=LITTLE),
    ),
    attack(
        "memory_of_children_over_several_cells",
        "C15",
        Turn(code="x, pids = 1, []", limits=LITTLE),
        *[
            Turn(
                code="import os, time\npid = os.fork()\nif pid == 0:\n    hoard = bytearray(b'x') * (60 << 20)\n"
                "    time.sleep(60)\n"
                "time.sleep(0.2)",
                outcomes=("ok", "memory", "killed"),
                states=("kept", "restored"),
                limits=LITTLE,
            )
        ]
        * 4,
        Turn(code="x", display="1", states=("kept", "restored"), limits=LITTLE),
    ),
    attack(
        "disk_over_several_cells",
        "C15",
        X,
        *[Turn(code="open('f', 'ab').write(bytes(6 << 20))", outcomes=("ok", "error", "killed"))] * 3,
        Turn(code="import os\nprint('held') if os.stat('f').st_size > 8 << 20 else x", display="1"),
    ),
    attack(
        "processes_over_several_cells",
        "C15",
        Turn(code="x = 1\n" + COSTLY),
        *[
            Turn(
                code="import os, time\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(60)\n"
                "except OSError: pass",
            )
        ]
        * 3,
        X_IS_1,
    ),
    attack(
        "numbers_beyond_those_of_old_kernels",
        "B9",
        Turn(code="x = 1\n" + COSTLY),
        Turn(code=NUMBERS, limits=QUICK),
        Turn(
            code="import os, time\nif os.fork() == 0:\n    os.setsid()\n"
            "    while True: open('late', 'a').write('.'); time.sleep(0.001)\n"
            "while not os.path.exists('late'): time.sleep(0.01)"
        ),
        DIES,
        Turn(code="size = os.stat('late').st_size\ntime.sleep(0.2)\nos.stat('late').st_size - size", display="0"),
        X_IS_1,
    ),
    attack(
        "fork_bomb_in_a_cell",
        "C13",
        X,
        Turn(
            code="import os\nx = 2\nwhile True:\n    try: os.fork()\n    except OSError: pass",
            outcomes=("timeout",),
            states=("kept", "restored"),
            stdout=None,
            limits=HANGS,
        ),
        Turn(code="print(x in (1, 2))", stdout=None, states=("kept", "restored"), check=lambda r: "True\n" in r.stdout),
    ),
)
