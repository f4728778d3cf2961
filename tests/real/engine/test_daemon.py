"""Blocking calls in a thread that neither the event loop nor an exit waits for."""

import asyncio
import subprocess
import sys
import threading

import pytest

from engine.process.daemon_thread import DaemonThread
from tests.support.paths import ROOT

EXIT = """
import asyncio, threading
from engine.process.daemon_thread import DaemonThread

async def main():
    thread, begun = DaemonThread("endless"), threading.Event()

    def endless():
        begun.set()
        threading.Event().wait()

    task = asyncio.create_task(thread.run(endless))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.wait([task])
    print(task.cancelled())

asyncio.run(main())
"""


async def test_calls_run_one_after_the_other_in_one_thread_that_ends_when_it_is_closed():
    thread = DaemonThread("builder")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(thread.run(threading.current_thread)) for _ in range(3)]
    [worker] = {task.result() for task in tasks}
    assert (worker.name, worker.daemon) == ("builder", True)
    thread.close()
    thread.close()
    await asyncio.to_thread(worker.join, 20)
    assert not worker.is_alive()


async def test_what_a_call_raises_comes_out_and_the_thread_goes_on():
    thread = DaemonThread("builder")
    with pytest.raises(ValueError, match="invalid literal"):
        await thread.run(int, "x")
    assert await thread.run(int, "7", base=8) == 7
    thread.close()


async def test_one_that_is_closed_unused_never_had_a_thread():
    before = threading.active_count()
    DaemonThread("builder").close()
    assert threading.active_count() == before


def test_an_exit_does_not_wait_for_a_call_that_never_returns():
    done = subprocess.run([sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
