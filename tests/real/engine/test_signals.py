"""A run that is told to end by a signal, and one whose event loop stands still."""

import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.support.paths import ROOT

PROGRAM = """
import asyncio, os, re, sys, time
import uvloop
from engine.telemetry.host_meter import HostMeter
from engine.telemetry.watchdog import end_on_signals, shows_on_signal

STANDS = {
    "none": lambda: None,
    "python": lambda: [None for _ in iter(int, 1)],
    "sleep": lambda: time.sleep(1000),
    "regex": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),  # lets no other thread run
    "sum": lambda: sum(range(10**15)),  # and not even Python's signal handlers
}

async def main(kind, silence_s):
    meter = HostMeter(say=lambda line: print(line, flush=True), end=lambda: os._exit(1), silence_s=silence_s)
    with end_on_signals(asyncio.current_task(), stands_s=1.0), shows_on_signal(list):
        async with asyncio.TaskGroup() as tasks:
            metering = tasks.create_task(meter.run())
            await asyncio.sleep(0.1)
            print("ready", flush=True)
            STANDS[kind]()
            try:
                await asyncio.sleep(1 if "nohup" in sys.argv else 60)
                print("goes on")
            except asyncio.CancelledError:
                print("writes what it has", flush=True)
                await asyncio.sleep(0 if "quick" in sys.argv else 60)
            metering.cancel()

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(sys.argv[1], float(sys.argv[2])))
"""


class Program:
    """The program above with one kind of standing still."""

    def __init__(self, kind, *words, silence_s="inf", before=()):
        command = [*before, sys.executable, "-c", PROGRAM, kind, silence_s, *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, cwd=ROOT, **pipes)
        assert self.process.stdout.readline() == "ready\n"
        self.goes_on(0.3)  # and now it stands

    def goes_on(self, seconds):
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def send(self, *numbers):
        """Signals, with time between them in which one is handled."""
        for number in numbers:
            self.process.send_signal(number)
            self.goes_on(0.7)
        return self

    def ended(self):
        """Exit code, standard output, standard error."""
        try:
            out, errors = self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        return self.process.returncode, out, errors


@pytest.mark.parametrize(
    ("before", "number", "end"),
    [
        ([], signal.SIGINT, "writes what it has"),
        ([], signal.SIGTERM, "writes what it has"),
        ([], signal.SIGHUP, "writes what it has"),
        (["nohup"], signal.SIGHUP, "goes on"),
        (["nohup"], signal.SIGTERM, "writes what it has"),
    ],
)
def test_a_run_that_is_told_to_end_writes_what_it_has(before, number, end):
    words = ["quick", *(["nohup"] if end == "goes on" else [])]
    code, out, _ = Program("none", *words, before=before).send(number).ended()
    assert (code, out) == (0, f"{end}\n")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("none", signal.SIGINT),
        ("none", signal.SIGTERM),
        ("python", signal.SIGTERM),
        ("sleep", signal.SIGINT),
        ("regex", signal.SIGTERM),
        ("sum", signal.SIGINT),
    ],
)
def test_a_second_signal_ends_the_process_at_once_also_while_the_loop_stands(kind, number):
    code, out, _ = Program(kind).send(number, number).ended()
    assert code in (128 + number, -number)
    assert out == ("writes what it has\n" if kind == "none" else "")


@pytest.mark.parametrize("kind", ["python", "sleep", "regex"])
def test_one_signal_is_enough_where_the_loop_stands(kind):
    code, _, errors = Program(kind).send(signal.SIGTERM).ended()
    assert code == -signal.SIGALRM
    assert "<lambda>" in errors, "the stack says where"


@pytest.mark.parametrize("kind", ["python", "sleep", "regex", "sum"])
def test_sigusr1_shows_where_the_loop_stands(kind):
    _, _, errors = Program(kind).send(signal.SIGUSR1, signal.SIGKILL).ended()
    assert "in <lambda>" in errors


def test_sigusr1_shows_what_a_loop_that_moves_waits_for():
    _, _, errors = Program("none").send(signal.SIGUSR1, signal.SIGKILL).ended()
    assert "3 x tasks.py" in errors, "the report of tasks comes too"


@pytest.mark.parametrize(("kind", "code"), [("python", 1), ("sleep", 1), ("regex", -27), ("sum", -27)])
def test_a_loop_that_stands_for_too_long_ends_its_process(kind, code):
    found, out, errors = Program(kind, silence_s="1.5").ended()
    assert found == code
    assert "<lambda>" in out + errors
    assert "been blocked" in out + errors if code == 1 else "most recent call" in errors
