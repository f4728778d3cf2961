"""Kills a quick start while its engine starts, interrupts it in a step, and resumes it: what is left each time?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench import ROOT

STARTS_S = 1.0  # an engine that has so long been a process has begun to start
END_S = 60.0  # seconds in which every process of a run has to end


def resumed(runs: Path, fields: Sequence[str]) -> dict[str, float]:
    """Kills a run (-9) while its engine starts, interrupts it (Ctrl-C) in its second step, and has it end.

    Returns the seconds from the interruption until no process of the run is left, and from the start of the resumed run
    until its first step has ended. Raises RuntimeError where a process is left, or a run ends otherwise.
    """
    command = [
        sys.executable,
        "-u",
        "recipes/quickstart.py",
        f"runs={runs}",
        f"name=resume-{int(time.time())}",
        *fields,
    ]
    with _begun(command) as first:
        _until_an_engine_starts(first.pid)
        _end(first, signal.SIGKILL, -signal.SIGKILL)
    with _begun(command) as second:
        _until(second, "step   1")
        began = time.perf_counter()
        _end(second, signal.SIGINT, 128 + signal.SIGINT)
        stopped_s = time.perf_counter() - began
    began = time.perf_counter()
    with _begun(command) as third:
        _until(third, "resuming")
        _until(third, "step   2")
        resumed_s = time.perf_counter() - began
        _rest(third)
    if code := third.wait():
        raise RuntimeError(f"the resumed run ended with exit code {code}")
    return {"stopped_s": stopped_s, "resumed_s": resumed_s}


def _begun(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _until(run: subprocess.Popen[str], text: str) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        print(line, end="", flush=True)
        if text in line:
            return
    raise RuntimeError(f"the run ended before it said {text!r}")


def _rest(run: subprocess.Popen[str]) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        print(line, end="", flush=True)


def _until_an_engine_starts(pid: int) -> None:
    """A forked engine has its parent's command line at first, a spawned one that of multiprocessing."""
    own = psutil.Process(pid).cmdline()
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                line = child.cmdline()
                is_engine = line == own or "spawn_main" in " ".join(line) or "EngineCore" in " ".join(line)
                if is_engine and time.time() - child.create_time() > STARTS_S:
                    return
        time.sleep(0.05)
    raise RuntimeError(f"no engine had begun to start after {END_S:g} s")


def _end(run: subprocess.Popen[str], how: signal.Signals, code: int) -> None:
    """Sends the signal to the run alone, and waits until all that it has started is gone."""
    everything = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, how)
    _rest(run)
    if run.wait(END_S) != code:
        raise RuntimeError(f"after {how.name} the run ended with exit code {run.returncode}")
    _, alive = psutil.wait_procs(everything, timeout=END_S)
    if alive := [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]:
        raise RuntimeError(f"after {how.name} these are left: {alive}")
