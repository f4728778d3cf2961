"""A bench notices what other processes use."""

import os
import subprocess
import sys
import time

import psutil

from bench.measuring import disturbance
from bench.measuring.disturbance import Surroundings

BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\ninput()"


def test_the_cpu_of_a_process_outside_the_family_is_seen(monkeypatch):
    monkeypatch.setattr(disturbance, "family", lambda pid: [psutil.Process(pid)])
    surroundings, began = Surroundings(), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"done\n"
        assert surroundings.others() * (time.monotonic() - began) * os.cpu_count() > 0.15
        other.communicate(b"\n")
