"""Programs that want to pass tests without solving the problem, by name; NAME stands for the tested function."""

from __future__ import annotations

ALWAYS_EQUAL = """
class Equal(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return 0
    def __bool__(self): return True
    def __contains__(self, other): return True
    def __abs__(self): return 0
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __len__(self): return 0
    def __iter__(self): return iter([self, self])
    def __getattr__(self, name): return self
    def __call__(self, *given): return self
def NAME(*given, **named): return Equal()
"""
ANSWERS = '["value",null,[]]', '["value",true,[]]', '{"list":[]}'
FORGED = r"""
import os, sys, json
reply = json.dumps({"tests": [["passed", ""]] * 50, "asked": None, "refused": None})
def forge():
    for text in (reply, "loaded\n" + reply, "right", "passed", "1.0\n", 'loaded\n["value",true,[]]\n' * 9):
        print(text, flush=True)
        print(text, file=sys.stderr)
        for descriptor in range(64):
            try:
                os.write(descriptor, (text + "\n").encode())
            except OSError:
                pass
"""

FUNCTIONS: dict[str, str] = {
    "no_function": "x = 1",
    "empty": "",
    "not_python": "def NAME(:",
    "null_byte": "def NAME(*a):\n    return '\0'",
    "exit_at_once": "import sys\nsys.exit(0)",
    "os_exit_at_once": "import os\nos._exit(0)",
    "exit_in_a_call": "import sys\ndef NAME(*a): sys.exit(0)",
    "os_exit_in_a_call": "import os\ndef NAME(*a): os._exit(0)",
    "interrupts": "def NAME(*a): raise KeyboardInterrupt",
    "raises_assertion_error": "def NAME(*a): raise AssertionError",
    "raises_stop_iteration": "def NAME(*a): raise StopIteration(True)",
    "raises_its_own": "class Fine(BaseException): pass\ndef NAME(*a): raise Fine",
    "raises_itself_while_told": "class Odd(Exception):\n    def __str__(self): raise SystemExit\ndef NAME(*a): raise Odd",
    "always_equal": ALWAYS_EQUAL.replace("BASE", "object"),
    "always_equal_str": ALWAYS_EQUAL.replace("BASE", "str"),
    "always_equal_int": ALWAYS_EQUAL.replace("BASE", "int"),
    "always_equal_float": ALWAYS_EQUAL.replace("BASE", "float"),
    "always_equal_list": ALWAYS_EQUAL.replace("BASE", "list"),
    "always_equal_dict": ALWAYS_EQUAL.replace("BASE", "dict"),
    "always_equal_tuple": ALWAYS_EQUAL.replace("BASE", "tuple"),
    "pretends_a_class": "class Odd:\n    __class__ = list\n    def __eq__(s, o): return True\ndef NAME(*a): return Odd()",
    "nan": "def NAME(*a): return float('nan')",
    "generator": "def NAME(*a):\n    while True: yield 1",
    "patched_builtins": (
        "import builtins\nfor name in ('abs', 'all', 'any', 'max', 'len', 'set', 'AssertionError', 'isinstance'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\ndef NAME(*a): return None"
    ),
    "patched_assert": (
        "import builtins\nclass Quiet(BaseException):\n    def __new__(c, *a): import os; os._exit(0)\n"
        "builtins.AssertionError = Quiet\ndef NAME(*a): return None"
    ),
    "patched_json": (
        "import json, sys\njson.dumps = lambda *a, **k: '[\"value\",true,[]]'\njson.loads = lambda *a, **k: []\n"
        "def NAME(*a): return object()"
    ),
    "patched_codec": (
        "import sys\nmain = sys.modules['__main__']\nfor name in ('encode', 'decode', '_written', '_read'):\n"
        "    setattr(main, name, lambda *a: '[\"value\",true,[]]')\ndef NAME(*a): return None"
    ),
    "patched_math": (
        "import math, operator\nmath.isclose = lambda *a, **k: True\noperator.eq = lambda *a: True\ndef NAME(*a): return None"
    ),
    "patched_later": (
        "import threading, builtins, time\ndef later():\n    while True:\n        builtins.abs = lambda *a: 0\n"
        "        time.sleep(0.001)\nthreading.Thread(target=later).start()\ndef NAME(*a): return None"
    ),
    "prints_a_verdict": f"{FORGED}\nforge()\ndef NAME(*a): forge()",
    "prints_and_exits": f"{FORGED}\nforge()\nos._exit(0)",
    "prints_at_exit": f"{FORGED}\nimport atexit\natexit.register(forge)\ndef NAME(*a): raise SystemExit",
    "prints_from_a_daemon": (
        f"{FORGED}\nif os.fork() == 0:\n    os.setsid()\n    while True: forge()\ndef NAME(*a): return None"
    ),
    "forges_in_a_frame": (
        "import sys\ndef NAME(*a):\n    frame = sys._getframe()\n    while frame:\n        for name, value in list(frame.f_locals.items()):\n"
        "            if isinstance(value, list): value.clear()\n"
        "            if isinstance(value, dict) and 'tests' in value: value['tests'] = ['pass']\n"
        "        frame = frame.f_back\n    return None"
    ),
    "traces": (
        "import sys\ndef trace(frame, event, value):\n    frame.f_trace_lines = True\n    return trace\nsys.settrace(trace)\n"
        "sys.setprofile(lambda *a: None)\ndef NAME(*a): return None"
    ),
    "searches_objects": (
        "import gc\ndef NAME(*a):\n    for each in gc.get_objects():\n"
        "        if isinstance(each, dict) and ('expected' in each or 'tests' in each or 'check' in each): return True\n"
        "    return None"
    ),
    "endless_output": "def NAME(*a):\n    while True: print('x' * 10000)",
    "endless_answers": (
        "import os\ndef NAME(*a):\n    while True:\n        for d in range(3, 10):\n            try: os.write(d, b'[\"value\",1,[]]\\n' * 99)\n"
        "            except OSError: pass"
    ),
    "huge_value": "def NAME(*a): return 'x' * (1 << 28)",
    "huge_number": "def NAME(*a): return 1 << (1 << 24)",
    "deep_value": "def NAME(*a):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "cyclic_value": "def NAME(*a):\n    x = []\n    x.append(x)\n    return x",
    "colliding_set": "def NAME(*a): return {i * (2**61 - 1) for i in range(3000)}",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef NAME(*a): return NAME(*a)",
    "crashes": "import ctypes\ndef NAME(*a): ctypes.string_at(0)",
    "kills_itself": "import os, signal\ndef NAME(*a): os.kill(os.getpid(), signal.SIGKILL)",
    "kills_all": "import os, signal\ndef NAME(*a):\n    for p in (-1, 1, os.getppid()):\n        try: os.kill(p, signal.SIGKILL)\n        except OSError: pass",
    "stops_itself": "import os, signal\ndef NAME(*a): os.kill(os.getpid(), signal.SIGSTOP)",
    "closes_all": "import os\nos.closerange(0, 64)\ndef NAME(*a): return None",
    "memory_bomb": "def NAME(*a): return len(bytearray(1 << 40))",
    "memory_hog": "def NAME(*a):\n    x = []\n    while True: x.append(bytearray(1 << 24))",
    "fork_bomb": "import os\ndef NAME(*a):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "sleeps": "import time\ndef NAME(*a): time.sleep(1000)",
    "spins": "def NAME(*a):\n    while True: pass",
    "spins_in_c": "def NAME(*a): return pow(3, 10**9)",
    "spins_at_once": "while True: pass",
}

PROGRAMS: dict[str, str] = {
    "silent": "",
    "exits_at_once": "import sys\nsys.exit(0)",
    "os_exit_at_once": "import os\nos._exit(0)",
    "echo": "import sys\nprint(sys.stdin.read())",
    "prints_a_verdict": f"{FORGED}\nforge()",
    "prints_and_exits": f"{FORGED}\nforge()\nos._exit(0)",
    "prints_from_a_daemon": f"{FORGED}\nif os.fork() == 0:\n    while True: forge()",
    "all_numbers": "print(*range(-1000, 1000))",
    "nan": "print('nan')",
    "infinity": "print('inf 1e999 -1e999')",
    "null_bytes": "print('\\0' * 1000)",
    "surrogates": "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\xed\\xa0\\x80')",
    "endless_output": "while True: print('1 ' * 10000)",
    "right_kind_and_endless": "import itertools\nfor i in itertools.count(): print(i)",
    "sleeps": "import time\ntime.sleep(1000)",
    "spins": "while True: pass",
    "fork_bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory_hog": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "not_python": "print(",
    "reads_files": (
        "import os\nfor folder, _, files in os.walk('/proc/1'):\n    for file in files[:50]:\n        try: print(open(f'{folder}/{file}').read(1000))\n"
        "        except (OSError, UnicodeDecodeError): pass"
    ),
}
