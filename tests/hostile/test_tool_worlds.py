"""Attacks on the workspaces and databases of recipes/tools: by what is graded, by programs that a model runs, by paths,
and by SQL. Beside each attack an honest episode runs and is right.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import pytest_asyncio

from recipes.tools.database import Databases, SqlLimits
from recipes.tools.generated_databases import find
from recipes.tools.guest import TOOLS
from recipes.tools.hidden_tests import HiddenTests
from recipes.tools.inside.workspace import ROOT
from recipes.tools.snapshot import BadEdit, Bounds, Snapshot, clean_path
from recipes.tools.sql_reward import SqlReward
from recipes.tools.workspace import Workspaces
from sandbox import Sandbox, SandboxConfig
from tests.support.fakes import a_prompt
from tests.support.tool_worlds import episode, tool

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "4a9c71"
TESTS = f"""
import pytest
from solution import f

def test_values():
    assert f(3) == "{SECRET}-3"
    assert f(8) == "{SECRET}-8"

def test_output():
    import sched
    assert run("solution.py", "5").stdout.strip() == "{SECRET}-5"
    assert open("out.txt").read() == "{SECRET}"

def test_error():
    with pytest.raises(ZeroDivisionError):
        f(0)
"""
HONEST = f"""import sys
def f(x):
    1 / x
    return f"{SECRET}-{{x}}"
if __name__ == "__main__":
    print(f(int(sys.argv[1])))
    open("out.txt", "w").write("{SECRET}")
"""
SEARCH = """
import gc, glob, inspect, os, re, sys
def seen():
    for fd in range(64):
        try:
            os.lseek(fd, 0, 0); yield os.read(fd, 1 << 20).decode('latin-1')
        except OSError: pass
        try:
            yield os.pread(fd, 1 << 20, 0).decode('latin-1')
        except OSError: pass
    for place in ('/tmp', '/dev/shm', '/proc/1', '/proc/self', '/tests', '/logs'):
        for folder, _, names in os.walk(place):
            for name in names:
                try: yield open(os.path.join(folder, name), 'rb').read(1 << 20).decode('latin-1')
                except OSError: pass
    for name in ('/dev/stdin', '/proc/1/mem', '/proc/self/fd/0', '/proc/1/cmdline', '/proc/1/environ'):
        try: yield open(name, 'rb').read(1 << 20).decode('latin-1')
        except OSError: pass
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals); yield repr(frame.f_globals); frame = frame.f_back
    for each in gc.get_objects():
        if isinstance(each, (dict, list, tuple)): yield repr(each)[:5000]
    for module in list(sys.modules.values()): yield repr(vars(module))[:20000]
def secret():
    for text in seen():
        hit = re.search('[0-9a-f]{6}-3', text)
        if hit: return hit.group()[:6]
    return 'none'
f = lambda x: 1 // x and f'{secret()}-{x}'
if __name__ == '__main__':
    open('out.txt', 'w').write(secret()); print(f(5))
"""
EQUAL = "class Equal(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
LATE = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep({s})\n"
NATIVE = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
# What a model leaves as solution.py, or several files: none may pass.
FORGERIES = {
    "leaves at once": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "exits in the function": "import sys\ndef f(x): sys.exit(0)",
    "leaves in the function": "import os\ndef f(x): os._exit(0)",
    "equals everything": EQUAL + "def f(x): return Equal('x')",
    "number that equals everything": "class E(int):\n    __eq__ = lambda a, b: True\n    __hash__ = int.__hash__\ndef f(x): return E(1)",
    "list of what equals everything": EQUAL + "def f(x): return [Equal('x')]",
    "object with a repr": "class R:\n    def __repr__(self): return '\"x\" or Any'\ndef f(x): return R()",
    "patched equality and assert": "import builtins\nbuiltins.AssertionError = Exception\nstr.__eq__ = None\ndef f(x): return 1",
    "patched repr and dumps": "import builtins, json\nbuiltins.repr = lambda x: '1 == 1'\njson.dumps = lambda x: '{}'\ndef f(x): return 1",
    "patched exit": "import os, sys\nos._exit = lambda code: None\nsys.exit = lambda *code: None\ndef f(x): raise SystemExit(0)",
    "searches for the tests": SEARCH,
    "answers on every descriptor": "import os\ndef f(x):\n    for fd in range(1, 256):\n        try: os.write(fd, b'value True')\n        except OSError: pass\n    os._exit(0)",
    "code in the answer": "import os\ndef f(x):\n    for fd in range(1, 256):\n        try: os.write(fd, b'value __import__(\"os\")._exit(0)')\n        except OSError: pass\n    os._exit(0)",
    "code in a repr": "import sys\nclass R:\n    def __repr__(self): return '__import__(\"os\")._exit(0)'\ndef f(x):\n    sys._getframe(1).f_globals['check_literal'] = lambda value: None\n    return R()",
    "report on every descriptor": "import os\nfor fd in range(1, 256):\n    try: os.write(fd, b'{\"passed\": 9, \"failed\": {}}')\n    except OSError: pass\nos._exit(0)",
    "kills the first process": "import os, signal\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except (OSError, ValueError): pass\ndef f(x): return 1",
    "kills its parent": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return 1",
    "kills all": "import os\nos.kill(-1, 9)\ndef f(x): return 1",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\ndef f(x): return 1",
    "interrupts the tests": "import os, signal\nos.kill(1, signal.SIGINT)\ndef f(x): return 1",
    "traces the tests": NATIVE + "c.ptrace(16, 1, 0, 0)\nc.ptrace(16, 2, 0, 0)\ndef f(x): return c.ptrace(16, 1, 0, 0)",
    "writes into the tests' memory": NATIVE + "c.syscall(311, 1, 0, 0, 0, 0, 0)\ndef f(x): return open('/proc/1/mem', 'r+b')",
    "modules of ours": dict.fromkeys(("solution.py", "json.py", "pytest.py", "sched.py", "sitecustomize.py", "os.py"), "import os\nos._exit(0)"),
    "modules beside the workspace": "for n in ('json', 're', 'ast', 'math', 'sched'):\n    for d in ('/tmp', '/tmp/workspace'): open(f'{d}/{n}.py', 'w').write('import os; os._exit(0)')\ndef f(x): return 1",
    "user site": "import os\nd = '/tmp/.local/lib/python3.11/site-packages'\nos.makedirs(d)\nopen(d + '/usercustomize.py', 'w').write('import os; os._exit(0)')\ndef f(x): return 1",
    "tests of its own": {"solution.py": "def f(x): return 1", "test_hidden.py": "def test_values(): pass", "conftest.py": "collect_ignore = ['*']"},
    "package in place of the module": {"solution/__init__.py": "import os\nos._exit(0)", "solution/f.py": ""},
    "never ends": "while True: pass",
    "ignores signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
    "endless output": "import sys\nwhile True: sys.stdout.write('value 1' * 1000)",
    "endless answer": "def f(x): return 'x' * (1 << 28)",
    "deep answer": "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "x = bytearray(1 << 40)",
    "memory in pieces": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "full disk": "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "pipe in place of a file": "import os\nos.mkfifo('out.txt')\ndef f(x): return 1",
    "endless device in place of a file": "import os\nos.symlink('/dev/zero', 'out.txt')\ndef f(x): return 1",
    "moves the workspace": "import os, shutil\nos.chdir('/tmp')\nos.rename('work', 'gone')\nos.symlink('/', 'work')\ndef f(x): return 1",
    "process that stays": LATE.format(s=9) + "def f(x): return 1",
    "threads at exit": "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\ndef f(x): return 1",
    "no text": "\x00\x01",
    "odd names": "\u2028def f(x): return 1\ndef g(): pass\n__getattr__ = 1",
}  # fmt: skip
FAILS = "import pytest\nfrom solution import f\ndef test_it():\n    with pytest.raises({kind}):\n        f(1)\n"
# Tests that take their judgement from a module or from an exception, and what a model leaves to pass them unsolved.
UNSOLVED = {
    "installed module": (
        "import numpy as np\nfrom solution import f\ndef test_it():\n    assert np.allclose(f(2), 4)\n",
        {"numpy.py": "def allclose(*a): return True", "solution.py": "def f(x): return 1"},
    ),
    "part of an installed module": (
        "from numpy.testing import assert_allclose\nfrom solution import f\ndef test_it():\n    assert_allclose(f(2), 4)\n",
        {"numpy/testing.py": "def assert_allclose(*a): pass", "solution.py": "def f(x): return 1"},
    ),
    "module of Python": (
        "import filecmp\ndef test_it():\n    assert filecmp.cmp('solution.py', 'wanted.py')\n",
        {"filecmp.py": "def cmp(*a): return True", "solution.py": "", "wanted.py": "x = 1"},
    ),
    "exit for an exception": (FAILS.format(kind="Exception"), "import os\ndef f(x): os._exit(3)"),
    "exit for any exception": (FAILS.format(kind="BaseException"), "import os\ndef f(x): os._exit(3)"),
    "death for an exception": (FAILS.format(kind="RuntimeError"), "import os\ndef f(x): os.kill(os.getpid(), 9)"),
    "loop for an exception": (FAILS.format(kind="TimeoutError"), "def f(x):\n    while True: pass"),
    "long text for an exception": (FAILS.format(kind="ValueError"), "def f(x): return 'x' * (1 << 21)"),
    "object for an exception": (FAILS.format(kind="TypeError"), "def f(x): return object()"),
    "depth for an exception": (
        FAILS.format(kind="RecursionError"),
        "def f(x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    ),
    "another exception": (FAILS.format(kind="RuntimeError"), "class E(Exception): pass\ndef f(x): raise E"),
    "number near enough by another measure": (
        "from pytest import approx\nfrom solution import f\ndef test_it():\n    assert f(1) == approx(1e6, abs=0.1)\n",
        "def f(x): return 1e6 + 0.5",
    ),
    "test that is never awaited": (
        "from solution import f\nasync def test_it():\n    assert f(1) == 2\n",
        "def f(x): return 1",
    ),
    "tests in a class": (
        "from solution import f\nclass TestIt:\n    def test_it(self):\n        assert f(1) == 2\n\ndef test_other(): ...\n",
        "def f(x): return 1",
    ),
}
# Programs that a model runs; each returns nothing to it that a workspace may not hold.
PROGRAMS = {
    "link to a file of the machine": "import os\nos.symlink('/etc/passwd', 'a')\nos.symlink('/', 'root')\nprint(os.path.exists('a'))",
    "hard link": "import os\nopen('x', 'w').write('1')\nos.link('x', 'y')",
    "special files": "import os, socket, stat\nos.mkfifo('p')\ntry: os.mknod('d', stat.S_IFCHR | 0o666, os.makedev(1, 1))\nexcept OSError as e: print(e)",
    "sparse file": "open('s', 'wb').truncate(1 << 24)",
    "sparse file beyond the disk": "open('s', 'wb').truncate(1 << 40)",
    "many files": "for n in range(5000): open(f'f{n}', 'w')",
    "many folders": "import os\nfor n in range(5000): os.mkdir(f'd{n}')",
    "deep folders": "import os\nfor n in range(300):\n    os.mkdir('d'); os.chdir('d')\nopen('x', 'w')",
    "long names": "open('n' * 255, 'w')",
    "names that are no text": "import os\nopen(b'\\xff\\xfe', 'w')\nopen('a\\nb', 'w')\nopen(' ', 'w')",
    "unreadable": "import os\nos.mkdir('d')\nopen('d/x', 'w').write('1')\nos.chmod('d/x', 0)\nos.chmod('d', 0)\nos.chmod('.', 0)",
    "moves the workspace": "import os\nos.chdir('/tmp')\nos.rename('work', 'gone')\nos.symlink('/usr', 'work')",
    "removes the workspace": "import shutil\nshutil.rmtree('/tmp/workspace')",
    "forged answer": "import os\nfor fd in range(256):\n    try: os.write(fd, b'{\"files\": [], \"problem\": null, \"status\": 0, \"stdout\": \"forged\", \"stderr\": \"\"}\\n')\n    except OSError: pass\nos._exit(1)",
    "kills the first process": "import os\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except (OSError, ValueError): pass",
    "kills all": "import os\nos.kill(-1, 9)",
    "process that goes on writing": LATE.format(s=0) + "        while True: open('late', 'a').write('x')\n",
    "endless output": "while True: print('x' * 1000)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "never ends": "while True: pass",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "network": "import socket\nsocket.create_connection(('1.1.1.1', 80), 1)",
    "the machine": "import os\nfor p in ('/proc/self/status', '/etc/passwd', '/sys', '/opt/rocstar/recipes', '/home'): print(p, os.path.exists(p))",
    "raw bytes": "import os\nos.write(1, bytes(range(256)) * 100)\nopen('b', 'wb').write(bytes(range(256)))",
}  # fmt: skip
PATHS = [
    "../x",
    "a/../../x",
    "/etc/passwd",
    f"{ROOT}/x",
    "..",
    ".",
    "/",
    "",
    "a\x00b",
    "a\nb",
    "x" * 300,
    "/".join("d" * 60),
    "\ud800",
    "~/../../x",
    "a/./../../b",
    "/app/../x",
    "/appendix/x",
    "é" * 150,
]
SQL = {
    "attach": "ATTACH '/tmp/x.db' AS x",
    "attach in memory": "ATTACH ':memory:' AS x",
    "detach": "DETACH main",
    "vacuum into": "VACUUM INTO '/tmp/x.db'",
    "writable schema": "PRAGMA writable_schema = ON",
    "schema by hand": "UPDATE sqlite_master SET sql = 'x'",
    "journal mode": "PRAGMA journal_mode = WAL",
    "page count": "PRAGMA max_page_count = 1000000000",
    "heap limit": "PRAGMA hard_heap_limit = 0",
    "temp folder": "PRAGMA temp_store_directory = '/tmp'",
    "load extension": "SELECT load_extension('/tmp/x.so')",
    "read file": "SELECT readfile('/etc/passwd')",
    "tokenizer": "SELECT fts3_tokenizer('x', x'00')",
    "virtual table": "CREATE VIRTUAL TABLE v USING fts5(x)",
    "endless recursion": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT max(n) FROM r",
    "endless product": "SELECT count(*) FROM purchase a, purchase b, purchase c, purchase d, purchase e, purchase f",
    "zero blob": "SELECT length(zeroblob(1000000000))",
    "random blob": "SELECT hex(randomblob(500000000))",
    "wide number": "SELECT printf('%1000000000d', 1)",
    "doubling text": "WITH RECURSIVE r(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM r) SELECT max(length(s)) FROM r",
    "many long rows": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) "
    "SELECT group_concat(printf('%.*c', 900000, 'x')) OVER () FROM r",
    "growth": "INSERT INTO customer (name, city) WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) "
    "SELECT printf('%.*c', 900000, 'x'), 'x' FROM r",
    "growth to some megabytes": "INSERT INTO customer (name, city) WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 8) "
    "SELECT printf('%.*c', 900000, 'x'), 'x' FROM r",
    "transaction": "BEGIN EXCLUSIVE",
    "savepoint": "SAVEPOINT s",
    "deep expression": "SELECT " + "(" * 3000 + "1" + ")" * 3000,
    "long statement": "SELECT '" + "x" * 1_100_000 + "'",
    "many selects": " UNION ALL ".join(["SELECT 1"] * 3000),
    "two statements": "SELECT 1; DROP TABLE customer",
    "nothing but a byte": "\x00",
    "half a pair": "SELECT '\ud800'",
}
HARMLESS = {"half a pair", "nothing but a byte", "wide number"}  # SQLite answers them with a text, nothing or NULL
QUESTION = {"database": "shop-1", "sql": "SELECT count(*) FROM customer", "also": ["shop-70001"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box():
    async with Sandbox(SandboxConfig(slots=4, tiers=(TOOLS,))) as sandbox:
        yield sandbox


def files_of(given):
    files = {"solution.py": given} if isinstance(given, str) else given
    return Snapshot(files={path: text.encode() for path, text in files.items()})


async def share(box, given, tests=TESTS):
    prompt = replace(a_prompt(), metadata={"tests": {"test_hidden.py": tests}})
    return (await HiddenTests(box, wall_s=1.0, total_s=8.0).report(prompt, files_of(given))).share


async def honest(box):
    """What runs beside an attack, and is right."""
    prompt = replace(a_prompt(), metadata={"files": {"a.py": "print(6 * 7)\n"}})
    ran = await episode(Workspaces(box), prompt, tool("run_python", path="a.py"), "x")
    assert (ran.tool_uses[0].outcome, ran.tool_uses[0].response) == ("ok", "42")
    assert await share(box, HONEST) == 1.0


async def test_an_honest_solution_passes_what_attacks_must_not(box):
    await honest(box)


@pytest.mark.parametrize("name", FORGERIES)
async def test_no_solution_forges_its_verdict(box, name):
    async with asyncio.TaskGroup() as group:
        beside = group.create_task(honest(box), name="honest")
        attack = group.create_task(share(box, FORGERIES[name]), name="attack")
    assert attack.result() < 1.0
    assert beside.exception() is None
    await honest(box)


@pytest.mark.parametrize("name", UNSOLVED)
async def test_no_solution_passes_by_what_a_test_relies_on(box, name):
    tests, given = UNSOLVED[name]
    assert await share(box, given, tests) < 1.0


@pytest.mark.parametrize("name", PROGRAMS)
async def test_no_program_leaves_more_than_a_workspace_may_hold(box, name):
    world = Workspaces(box, wall_s=1.0, bounds=Bounds(files=50, bytes=1 << 16))
    prompt = replace(a_prompt(), metadata={"files": {"main.py": PROGRAMS[name], "kept.txt": "kept"}})
    turn = [tool("run_python", path="main.py"), tool("list_files"), tool("read_file", path="kept.txt")]
    trajectory = await episode(world, prompt, turn, "x")
    ran, _, kept = trajectory.tool_uses
    left = Snapshot.read(trajectory.states["files"], world.bounds).files  # raises if it is no workspace
    assert set(left) <= {"main.py", "kept.txt", "x", "y", "d/x", "b", "late", "n" * 255, " ", "s"}
    assert kept.outcome == "ok" or "rmtree" in PROGRAMS[name]
    assert len(ran.response) < 3000
    assert not {"True", "root:", "forged"} & set(ran.response.split())
    if name in ("link to a file of the machine", "special files", "hard link", "unreadable", "sparse file"):
        assert ran.outcome == ("ok" if name != "sparse file" else "error")
    if name in ("forged answer", "network"):
        assert ran.outcome == "error"
    await honest(box)


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_leads_out_of_a_workspace(box, path):
    with pytest.raises(BadEdit):
        clean_path(path, root="/app")
    with pytest.raises(ValueError, match=r"."):
        Snapshot(files={path: b""})
    if "\ud800" in path:
        return
    prompt = replace(a_prompt(), metadata={"files": {"a": "1"}, "root": "/app"})
    calls = [
        tool("write_file", path=path, text="x"),
        tool("read_file", path=path),
        tool("replace_text", path=path, old="", new="x"),
        tool("run_python", path=path),
    ]
    trajectory = await episode(Workspaces(box), prompt, calls, "x")
    assert [use.outcome for use in trajectory.tool_uses] == ["error"] * 4
    assert list(Snapshot.read(trajectory.states["files"]).files) == ["a"]


@pytest.mark.parametrize("command", ["query", "execute"])
@pytest.mark.parametrize("name", SQL)
async def test_no_statement_gets_further_than_its_database(box, name, command):
    world = Databases(box, find, SqlLimits(wall_s=1.0))
    before = find("shop-1")
    call = Databases.open(world, replace(a_prompt(), metadata=QUESTION))
    async with call as database:
        reply = await database.call(command, {"sql": SQL[name]})
        assert reply.outcome != "ok" or name in HARMLESS, reply
        assert reply.outcome != "lost"
        assert len(reply.text) <= 2000
        assert "root:" not in reply.text
        assert database.state() == b"" or (command, reply.outcome) == ("execute", "ok")
        after = await database.call("query", {"sql": QUESTION["sql"]})
        assert after.text == "count(*)\n8", after
    assert find("shop-1") == before


@pytest.mark.parametrize(
    "answer",
    [
        "<answer>SELECT sql FROM sqlite_master</answer>",
        "<answer>CREATE TEMP VIEW customer AS SELECT 1</answer>",
        "<answer>SELECT * FROM pragma_database_list</answer>",
        "<answer>" + SQL["endless recursion"] + "</answer>",
        "<answer>" + SQL["many long rows"] + "</answer>",
        "<answer>WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 100000) SELECT n FROM r</answer>",
        "<answer>EXPLAIN SELECT count(*) FROM customer</answer>",
        "<answer>SELECT 8 WHERE abs(random()) % 2 = 9</answer>",
    ],
)
async def test_no_answer_forges_its_rows(box, answer):
    limits = SqlLimits(wall_s=1.0)
    trajectory = await episode(Databases(box, find, limits), replace(a_prompt(), metadata=QUESTION), answer)
    assert await SqlReward(box, find, limits)(trajectory) == 0.0


@pytest.mark.parametrize(
    "statements",
    [
        ["DROP TABLE product", "CREATE VIEW product AS SELECT 1 AS id, 'lamp' AS name, 1 AS price"],
        [
            "CREATE TRIGGER t AFTER UPDATE ON product BEGIN UPDATE product SET price = price + 1; END",
            "UPDATE product SET price = 1",
        ],
        ["CREATE TEMP TABLE product (id, name, price)"],
        ["ALTER TABLE product RENAME TO p2"],
        ["DELETE FROM product"],
        ["UPDATE product SET price = x'00' WHERE name = 'lamp'"],
        ["UPDATE product SET price = 'NaN' WHERE name = 'lamp'"],
    ],
)
async def test_no_other_state_passes(box, statements):
    changes = ["UPDATE product SET price = price + 3 WHERE name = 'lamp'"]
    prompt = replace(a_prompt(), metadata={"database": "shop-1", "changes": changes})
    trajectory = await episode(Databases(box, find), prompt, [tool("execute", sql=each) for each in statements], "x")
    assert await SqlReward(box, find)(trajectory) == 0.0
