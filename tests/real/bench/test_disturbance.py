"""A bench notices what other processes use."""

import os
import subprocess
import sys
import time

import psutil

from bench.measuring.disturbance import Surroundings
from engine.telemetry import others

ORPHAN = "import os\nif os.fork(): os._exit(0)\nprint(os.getppid(), flush=True)\ninput()"
BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\ninput()"


def test_the_cpu_of_a_process_outside_the_family_is_seen(monkeypatch):
    monkeypatch.setattr(others, "family", lambda pid: [psutil.Process(pid)])
    command = [sys.executable, "-c", BURN]
    began = time.monotonic()
    with (
        Surroundings() as surroundings,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        assert other.stdout.readline() == b"done\n"
        assert surroundings.others() * (time.monotonic() - began) * os.cpu_count() > 0.15
        other.communicate(b"\n")


def test_an_orphan_of_the_bench_stays_in_its_family():
    with (
        Surroundings(),
        subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent,
    ):
        parent.wait()
        [orphan] = psutil.Process().children()
        parent.communicate(b"\n")
        os.waitpid(orphan.pid, 0)
