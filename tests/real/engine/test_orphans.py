"""A fork for the node dies with it, at whatever moment, and shares neither its signals nor its imports."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.paths import ROOT

FORKING = """
import os, threading, time
from engine.process.forks import forks_die_with_us

def fork():
    if not (pid := os.fork()):
        time.sleep(100)
    return pid

def build():
    with forks_die_with_us():
        bound = fork()
    print(bound, fork(), flush=True)
    time.sleep(100)

threading.Thread(target=build).start()
"""

WORKERS = """
import os, time
from engine.process.forks import forks_die_with_us

with forks_die_with_us():
    if os.fork():
        os.wait()
    elif os.fork():  # an engine, which has workers
        os.wait()
    else:
        print(os.getppid(), os.getpid(), flush=True)
        time.sleep(100)
"""

LATE = """
import os, time
from engine.process.forks import die_with

parent = os.getpid()
if not os.fork():
    time.sleep(0.5)  # its parent has ended
    die_with(parent)
    print("alive", flush=True)
"""

IMPORTING = """
import os, sys, threading
from importlib.machinery import ModuleSpec
from engine.process.forks import forks_die_with_us

node, importing = os.getpid(), threading.Event()

class Endless:  # an import that takes until the process ends; in the fork there is no such module
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "endless" else None

    def create_module(self, spec):
        if os.getpid() != node:
            raise ImportError
        importing.set()
        threading.Event().wait()

    def exec_module(self, module): ...

def try_import():
    try:
        import endless
    except ImportError:
        os._exit(7)

sys.meta_path.insert(0, Endless())
threading.Thread(target=try_import, daemon=True).start()
importing.wait()
with forks_die_with_us():
    if not (fork := os.fork()):
        try_import()
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""

HALF_IMPORTED = """
import os, sys, threading
from engine.process.forks import forks_die_with_us

sys.path.insert(0, sys.argv[1])
threading.Thread(target=lambda: __import__("long_module")).start()
while "long_module" not in sys.modules:
    pass
with forks_die_with_us():
    if not (fork := os.fork()):
        import long_module
        os._exit(long_module.CODE)
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""

SIGNALLED = """
import asyncio, os, signal, sys, threading, time, uvloop
from engine.process.forks import forks_die_with_us

SENT = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2]

def fork(number):
    with forks_die_with_us():
        if not (pid := os.fork()):
            time.sleep(2)
            os._exit(7)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

async def main():
    loop, heard, last = asyncio.get_running_loop(), [], asyncio.Event()
    for number in SENT:
        loop.add_signal_handler(number, heard.append, number)
    loop.add_signal_handler(signal.SIGUSR1, last.set)
    ends = [await asyncio.to_thread(fork, number) for number in SENT]
    os.kill(os.getpid(), signal.SIGUSR1)  # heard after whatever the forks wrote
    await last.wait()
    print(ends == [-number for number in SENT], heard, flush=True)

with asyncio.Runner(loop_factory=getattr(sys.modules[sys.argv[1]], "new_event_loop")) as runner:
    runner.run(main())
"""

GIVEN_UP = """
import os, threading, time
from engine.process.forks import forks_die_with_us

entered, forked, ended = [], threading.Event(), threading.Event()

def fork():
    if not (pid := os.fork()):
        time.sleep(100)
    return pid

def build():
    with forks_die_with_us() as forks:
        entered.append(forks)
        pids = [fork()]
        forked.set()
        ended.wait()
        pids.append(fork())
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)

thread = threading.Thread(target=build)
thread.start()
forked.wait()
entered[0].end()
ended.set()
thread.join()
entered[0].end()
"""

NODE = """
import asyncio, os
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.replica import Replica

async def main():
    replica = Replica(ReplicaConfig(checkpoint="recipes/tiny/agent", kv_blocks=64), 0, None, lambda *_: None)
    await replica.start()

os.register_at_fork(after_in_child=lambda: print(os.getpid(), flush=True))
prepare_environment()
asyncio.run(main())
"""


SIDE_BY_SIDE = """
import os, select, threading, time
from engine.process.forks import forks_die_with_us

forked, seen = threading.Barrier(2), threading.Event()

def build(long_s):
    with forks_die_with_us(alone=True):
        ours, theirs = os.pipe()
        time.sleep(0.1 if long_s else 0.5)  # the long one would be forked in between
        if not os.fork():
            time.sleep(long_s)
            os._exit(0)
        os.close(theirs)
    forked.wait()
    if long_s:
        seen.wait()
    else:
        print(select.select([ours], [], [], 5)[0] == [ours], flush=True)
        seen.set()

for long_s in (0, 100):
    threading.Thread(target=build, args=(long_s,)).start()
"""

HANGING = """
import asyncio, os, select, threading
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.replica import Replica

async def main():
    config = ReplicaConfig(checkpoint="recipes/tiny/agent", kv_blocks=64)
    replica = Replica(config, 0, None, lambda *_: None)
    begun, child = os.pipe()

    def hang():
        os.write(child, b"%d" % os.getpid())
        threading.Event().wait()

    os.register_at_fork(after_in_child=hang)
    async with asyncio.TaskGroup() as group:
        start = group.create_task(replica.start())
        engine = os.pidfd_open(int(await asyncio.to_thread(os.read, begun, 20)))
        start.cancel()
    await replica.shutdown()
    ended, _, _ = await asyncio.to_thread(select.select, [engine], [], [], 20)
    print(ended == [engine], flush=True)

prepare_environment()
asyncio.run(main())
"""


def started(code: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes that the first line names."""
    assert process.stdout
    return [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


def test_a_fork_dies_with_the_process_only_where_this_was_asked_for() -> None:
    with started(FORKING) as node:
        bound, free = said(node)
        node.kill()
        _, left = psutil.wait_procs([bound], timeout=20)
        assert not left
        assert free.is_running()
        free.kill()


def test_what_a_fork_forks_lives_as_long_as_that() -> None:
    with started(WORKERS) as node:
        both = said(node)
        assert len(both) == 2
        node.kill()
        assert not psutil.wait_procs(both, timeout=20)[1]


def test_one_that_learns_of_it_late_ends_at_once() -> None:
    with started(LATE) as node:
        assert node.communicate(timeout=20)[0] == ""


def answered(code: str, *arguments: str, timeout_s: float = 20) -> str:
    """What it prints. It ends within the time by itself."""
    with started(code, *arguments) as process:
        try:
            return process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def test_a_fork_can_import_what_another_thread_was_importing() -> None:
    """As two engines that start side by side: each tries to import ray, and there is none."""
    assert answered(IMPORTING) == "7\n"


def test_a_fork_waits_for_an_import_of_another_thread_and_finds_the_whole_module(tmp_path: Path) -> None:
    (tmp_path / "long_module.py").write_text("import time\ntime.sleep(0.5)\nCODE = 7\n")
    assert answered(HALF_IMPORTED, str(tmp_path)) == "7\n"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_signal_to_a_fork_ends_it_and_is_not_heard_by_the_node(loop: str) -> None:
    assert answered(SIGNALLED, loop) == "True []\n"


def test_what_is_given_up_is_killed_and_what_it_forks_later_ends_at_once() -> None:
    assert answered(GIVEN_UP) == "-9 1\n"


def test_the_end_of_one_of_two_that_are_forked_side_by_side_is_seen() -> None:
    """By the pipe whose other end it held, which is how vLLM sees that an engine has died while it starts."""
    assert answered(SIDE_BY_SIDE) == "True\n"


@pytest.mark.timeout(120)
def test_a_node_killed_while_its_engine_starts_leaves_none() -> None:
    with started(NODE) as node:
        engine = said(node)
        node.kill()
        _, left = psutil.wait_procs(engine, timeout=20)
        for process in left:
            process.kill()
        assert not left


@pytest.mark.timeout(120)
def test_an_engine_that_hangs_while_it_starts_is_killed_when_it_is_given_up() -> None:
    assert answered(HANGING, timeout_s=100) == "True\n"
