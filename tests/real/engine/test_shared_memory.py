"""Shared memory without a name goes with its processes, and none of them complains when it ends."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

PROGRAM = """
import os, sys
from multiprocessing import shared_memory
from engine.process.shared_memory import unlink_mapped

memory = shared_memory.SharedMemory(create=True, size=4096)
other = shared_memory.SharedMemory(name=memory.name)  # as in another process
named = os.path.exists(f"/dev/shm/{memory.name}")
unlink_mapped()
unlink_mapped()
memory.buf[0] = 7
print(named, os.path.exists(f"/dev/shm/{memory.name}"), other.buf[0])
for each in (other, memory):
    each.close()
if sys.argv[1] == "by its maker too":
    memory.unlink()
"""


@pytest.mark.parametrize("end", ["by nobody", "by its maker too"])
def test_a_name_is_taken_away_once(end):
    command = [sys.executable, "-c", PROGRAM, end]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout.split(), run.stderr) == (0, ["True", "False", "7"], "")
