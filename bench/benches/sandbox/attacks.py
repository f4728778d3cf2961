"""Measures what a hostile call costs the next one, and what running calls and idle sessions cost in memory.

Attacks run in a service with ONE slot: the honest call after an attack goes through the very slot that was attacked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from bench.benches.sandbox.contenders import CASES, Box
from bench.benches.sandbox.load import CELLS
from bench.measuring.terminal import say
from sandbox import Limits, Sandbox

ATTACKS = {
    "endless loop": "while True: pass",
    "signals ignored": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except Exception: pass
time.sleep(60)
""",
    "lock-holding C loop": "import re\nre.match('(a*)*b', 'a' * 60)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: signal.pause()",
    "memory": "x = []\nwhile True: x.append(bytearray(b'x') * (1 << 24))",
    "memory of many": """
import os
for _ in range(3): os.fork()
x = bytearray(b'x') * (200 << 20)
while True: pass
""",
    "fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "output flood": "while True: print('x' * 100000)",
    "full disk": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "many files": "for i in range(10**6): open(str(i), 'w').close()",
    "deep folders": "import os\nfor _ in range(10**5): os.mkdir('d'); os.chdir('d')",
    "descriptors": "import os\nwhile True: os.dup(0)",
    "writes to descriptors": """
import os
for fd in range(1, 4096):
    try: os.write(fd, bytes(64)); os.close(fd)
    except OSError: pass
""",
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return [f() for _ in (1,)]\nf()",
    "kills all": "import os\nos.kill(-1, 9)\nos.killpg(0, 9)",
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(0.01)
    os._exit(0)
""",
    "poisoned modules": """
import builtins, sys
builtins.print = builtins.exec = None
for name in list(sys.modules): sys.modules[name] = None
""",
    "os._exit": "import os\nos._exit(0)",
}
RIGHT_DEADLINE_S = 20.0  # an honest call that is not right by then is counted as never right


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What followed an attack. recovery_s: from its verdict until an honest call was right; None: never.

    wrong: honest calls before that one.
    """

    attack: str
    recovery_s: float | None
    wrong: int


async def attack(sandbox: Sandbox, limit_s: float) -> list[Recovery]:
    """Makes each attack once, with `limit_s` of wall and CPU time, and then honest calls until one is right."""
    recoveries = []
    case = CASES[0]
    limits = Limits(wall_s=limit_s, cpu_s=limit_s)
    for name, code in ATTACKS.items():
        say(f"attacks: {name}")
        await sandbox.run(code, limits=limits)
        ended = time.perf_counter()
        wrong = 0
        while (await sandbox.run(case.code)).stdout != case.stdout and time.perf_counter() < ended + RIGHT_DEADLINE_S:
            wrong += 1
        after_s = time.perf_counter() - ended
        recoveries.append(
            Recovery(attack=name, recovery_s=after_s if after_s < RIGHT_DEADLINE_S else None, wrong=wrong)
        )
    return recoveries


async def child_bytes(box: Box, children: int, seconds: float) -> float:
    """Returns the memory of a running call beyond its slot: `children` calls that sleep against the idle service."""
    idle = box.meter.memory_bytes()
    calls = [box.sandbox.run(f"import time; time.sleep({seconds})") for _ in range(children)]
    return (await _while_running(calls, box, seconds / 2) - idle) / children


async def session_bytes(box: Box, sessions: int, cells: int) -> float:
    """Returns the memory of an idle session after its first `cells` cells."""
    idle = box.meter.memory_bytes()
    async with AsyncExitStack() as stack:
        for _ in range(sessions):
            session = await stack.enter_async_context(box.sandbox.session(tier=CASES[-1].tier.name))
            for cell in CELLS[:cells]:
                await session.run(cell)
        return (box.meter.memory_bytes() - idle) / sessions


async def _while_running(calls: list[Coroutine[Any, Any, Any]], box: Box, after_s: float) -> int:
    async with asyncio.TaskGroup() as group:
        for index, call in enumerate(calls):
            group.create_task(call, name=f"sleeper-{index}")
        await asyncio.sleep(after_s)
        return box.meter.memory_bytes()
