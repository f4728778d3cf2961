"""Honest calls: programs with one exact right answer each, which must come whatever runs beside or ran before.

Each carries a secret in its source and stdin that no other call may ever find (attacks.PLANTED).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import NamedTuple

from sandbox import Limits, ToolResult

PATIENT = Limits(wall_s=60, cpu_s=30, processes=24)  # a busy machine is no excuse for a wrong answer
PROBE = """
import builtins, json, math, os, random, signal, sys, threading
found = []
def expect(what, right):
    if not right: found.append(what)
expect('cwd', os.getcwd() == '/tmp' and sys.path[0] != '')
for place in ('/tmp', '/dev/shm', '.'): expect('left in ' + place, os.listdir(place) == ['main.py'])
expect('main.py', "print('clean'" in open('main.py').read())
mode, used = os.stat('/tmp'), os.statvfs('/tmp')
expect('mode', mode.st_mode & 0o700 == 0o700 and mode.st_uid == os.getuid())
expect('attributes', not os.listxattr('/tmp'))
expect('umask', os.umask(0o22) == 0o22)
expect('builtins', len('ab') == 2 and not hasattr(builtins, 'print_') and type(print).__name__.startswith('builtin'))
expect('modules', json.dumps([1, 5]) == '[1, 5]' and math.sqrt(81) == 9 and random.random() != 0)
expect('numbers', 250 + 7 == 257 and 5 + 2 == 7 and (5, 7) == (10 // 2, 49 // 7))
expect('import', __import__('colorsys').rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0))
expect('hooks', sys.gettrace() is None and sys.excepthook is sys.__excepthook__ and sys.argv == ['main.py'])
expect('recursion', sys.getrecursionlimit() <= 3000 and sys.get_int_max_str_digits() == 4300)
expect('signals', signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and signal.getsignal(signal.SIGINT) is not None)
expect('mask', not signal.pthread_sigmask(signal.SIG_BLOCK, []))
expect('timers', signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0))
expect('environment', not set(os.environ) & {'PYTHONPATH', 'LD_PRELOAD', 'X'})
expect('threads', threading.active_count() == 1)
expect('priority', os.getpriority(os.PRIO_PROCESS, 0) < 19 and os.sched_getscheduler(0) == os.SCHED_OTHER)
expect('name', os.uname().nodename == 'sandbox')
for fd in range(3, 64):
    try: os.fstat(fd); found.append(f'descriptor {fd}')
    except OSError: pass
try: os.waitpid(-1, os.WNOHANG); found.append('a child')
except ChildProcessError: pass
open('mine', 'w').write('x'); os.unlink('mine')
print('clean', *found)
"""


class Honest(NamedTuple):
    code: str
    stdin: str
    stdout: str
    exit_code: int = 0

    def complaint(self, result: ToolResult) -> str:
        outcome = "error" if self.exit_code else "ok"
        right = (outcome, self.exit_code, self.stdout) == (result.outcome, result.exit_code, result.stdout)
        return "" if right and result.jailed else f"{self.code[:80]!r} answered {str(result)[:1500]}"


def _secret(number: int) -> str:
    return "PLANTED-" + hashlib.sha256(str(number).encode()).hexdigest()[:16]


def honest(number: int) -> Honest:
    """The `number`th honest call: of eight kinds, no two alike."""
    n, secret = number, _secret(number)
    fork = f"r, w = os.pipe()\nif os.fork() == 0: os.write(w, b'{n}'); os._exit(0)\nos.wait()\nprint(os.read(r, 9))"
    file = f"with tempfile.TemporaryFile() as f: f.write(b'{n}'); f.seek(0); print(f.read())"
    kinds = (
        (f"print(sum(i * i for i in range({n})))", f"{sum(i * i for i in range(n))}\n", 0),
        (f"import json\nprint(json.dumps({{'n': {n}}}))", json.dumps({"n": n}) + "\n", 0),
        (f"print({n})\nraise ValueError({n})", f"{n}\n", 1),
        (f"import sys\nsys.exit({n} % 200 + 1)", "", n % 200 + 1),
        (f"import tempfile\n{file}", f"b'{n}'\n", 0),
        (f"import threading\nt = threading.Thread(target=print, args=({n},))\nt.start(); t.join()", f"{n}\n", 0),
        (f"import os\n{fork}", f"b'{n}'\n", 0),
        (f"import math\nprint(math.factorial({n} % 50), input()[:0])", f"{math.factorial(n % 50)} \n", 0),
    )
    code, stdout, exit_code = kinds[n % len(kinds)]
    return Honest(f"# {secret}\n{code}", f"{secret}\n", stdout, exit_code)


CLEAN = Honest(PROBE, "", "clean\n")
