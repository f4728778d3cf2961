"""Run as an ordinary user: calls and a session whose results test_sandbox_doctor.py looks at. Prints JSON lines."""

from __future__ import annotations

import asyncio
import json
import sys

from sandbox import Limits, Sandbox, SandboxConfig

RIGHTS = """
import ctypes, json, os, subprocess, sys
look = '''
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, data)
print(json.dumps(list(data)))
'''
libc = ctypes.CDLL(None, use_errno=True)
tries = [('setresuid', 1, 1, 1), ('setgroups', 0, None), ('unshare', 0x10000000), ('unshare', 0x20000), ('setns', 0, 0),
         ('mount', b'x', b'/tmp', b'tmpfs', 0, None), ('umount2', b'/tmp', 2), ('chroot', b'/tmp'), ('ptrace', 0, 0, 0)]
worked = [name for name, *arguments in tries if getattr(libc, name)(*arguments) == 0 or ctypes.get_errno() != 1]
fds = []
for fd in range(4096):
    try: os.fstat(fd); fds.append(fd)
    except OSError: pass
capabilities = [json.loads(subprocess.run([sys.executable, '-c', look], capture_output=True).stdout)]  # after an exec
exec(look.replace('print', 'capabilities.append').replace('json.dumps', ''))
print(json.dumps(dict(fds=fds, worked=worked, capabilities=capabilities)))
"""
LOOP = "while True: pass"
BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
KILL = "import os\nfor pid in (-1, 1) * 50:\n    try: os.kill(pid, 9)\n    except OSError: pass"
SIGNALS = "import os, time\nfor number in range(1, 65): os.kill(1, number)\ntime.sleep(0.1)"  # the same id: it may
THREADS = "import threading\nfor _ in range(3): threading.Thread(target=threading.Event().wait, daemon=True).start()"
LIMIT = "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"


def tell(**said: object) -> None:
    print(json.dumps(said), flush=True)


async def main() -> None:
    async with Sandbox(SandboxConfig(slots=2, limits=Limits(wall_s=30.0))) as box:
        tell(level=box.stats.level, rights=json.loads((await box.run(RIGHTS)).stdout))
        long, short = (Limits(wall_s=wall_s, memory_bytes=256 << 20) for wall_s in (30.0, 1.0))
        programs = [LOOP, "x = bytearray(1 << 30)", BOMB, KILL, SIGNALS, "1 / 0", "print(input())"]
        outcomes = []
        for program in programs:
            outcomes.append((await box.run(program, "in", short if program in (LOOP, BOMB) else long)).outcome)
            assert (await box.run("print('next')", limits=long)).stdout == "next\n"
        for processes in (4, 1 << 40):  # the kernel counts the sandbox's own processes too
            outcomes.append((await box.run(THREADS, limits=Limits(processes=processes))).outcome)
        tell(outcomes=outcomes)
        async with box.session() as session:
            tell(rights=json.loads((await session.run(RIGHTS)).stdout))
            cells = [
                await session.run(cell, limits=short if cell == LOOP else long)
                for cell in ("x = 1", "1 / 0", LOOP, LIMIT, "x")
            ]
        tell(cells=[(cell.outcome, cell.session_state, cell.display) for cell in cells])
        async with asyncio.TaskGroup() as group:
            sleeper = group.create_task(box.run("import time; time.sleep(60)", limits=long), name="sleeper")
            tell(sleeps=True)
            await asyncio.to_thread(sys.stdin.readline)
            sleeper.cancel()


asyncio.run(main())
