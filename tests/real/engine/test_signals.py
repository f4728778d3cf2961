"""A run that is told to end by a signal."""

import signal
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

INTERRUPTED = """
import asyncio, os, signal, sys
from engine.telemetry.watchdog import end_on_signals

async def main():
    end_on_signals(asyncio.current_task())
    os.kill(os.getpid(), int(sys.argv[1]))
    try:
        await asyncio.sleep(0.1)
        print("goes on")
    except asyncio.CancelledError:
        print("writes what it has")

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("command", "number", "end"),
    [
        ([], signal.SIGTERM, "writes what it has"),
        ([], signal.SIGHUP, "writes what it has"),
        (["nohup"], signal.SIGHUP, "goes on"),
        (["nohup"], signal.SIGTERM, "writes what it has"),
    ],
)
def test_a_run_that_is_told_to_end_writes_what_it_has(command, number, end):
    command = [*command, sys.executable, "-c", INTERRUPTED, str(int(number))]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True}
    done = subprocess.run(command, text=True, timeout=20, check=False, cwd=ROOT, **pipes)
    assert done.stdout == f"{end}\n"
