"""kill -9 of a node leaves no engine behind, at whatever moment: real processes."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

FORKING = """
import os, threading, time
from engine.orphans import forks_die_with_us

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
from engine.orphans import forks_die_with_us

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
from engine.orphans import die_with

parent = os.getpid()
if not os.fork():
    time.sleep(0.5)  # its parent has ended
    die_with(parent)
    print("alive", flush=True)
"""

NODE = """
import asyncio, os
from engine.replica import Replica, ReplicaConfig, prepare_environment

async def main():
    replica = Replica(ReplicaConfig(checkpoint="recipes/tiny", kv_blocks=64), 0, None, lambda *_: None)
    await replica.start()

os.register_at_fork(after_in_child=lambda: print(os.getpid(), flush=True))
prepare_environment()
asyncio.run(main())
"""


def started(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


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


@pytest.mark.timeout(120)
def test_a_node_killed_while_its_engine_starts_leaves_none() -> None:
    with started(NODE) as node:
        engine = said(node)
        node.kill()
        _, left = psutil.wait_procs(engine, timeout=20)
        for process in left:
            process.kill()
        assert not left
