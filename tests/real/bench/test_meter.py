"""The bench's meter: CPU of a whole process tree, those that came and ended meanwhile included."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.measuring.meter import Meter, listeners

BURN = "import time\nwhile time.process_time() < 0.3: pass"
# for each line on stdin: a child burns 0.3 s of CPU and ends
PARENT = f"""import subprocess, sys
for _ in sys.stdin: print(subprocess.run([sys.executable, "-c", {BURN!r}]), flush=True)"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def burn(parent: subprocess.Popen[str]) -> None:
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    parent.stdout.readline()


def test_cpu_of_an_ended_grandchild_is_counted_once(parent: subprocess.Popen[str]) -> None:
    meter = Meter([parent.pid])
    try:
        burn(parent)  # the interpreter has started
        before = meter.cpu_s()
        burn(parent)
        assert 0.28 <= meter.cpu_s() - before < 0.58
    finally:
        meter.close()


def test_a_closed_meter_leaves_the_processes_where_they_were(parent: subprocess.Popen[str]) -> None:
    groups = Path(f"/proc/{parent.pid}/cgroup")
    before = groups.read_text()
    meter = Meter([parent.pid])
    meter.close()
    assert groups.read_text() == before
    left = f"rocstar-bench-{os.getpid()}-"
    assert not any(name.startswith(left) for _, names, _ in os.walk("/sys/fs/cgroup") for name in names)


def test_the_process_that_listens_on_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listeners(port) == [os.getpid()]
    assert listeners(port) == []
