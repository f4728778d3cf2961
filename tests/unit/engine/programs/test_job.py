"""A job as a program: its exit code says whose fault an end was, and one line says what it was."""

import asyncio
import os
import signal
import sys

import pytest

from engine.errors import BadInput
from engine.programs.job import run
from engine.replica.port import ReplicaDied


async def fail(error):
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize(
    ("error", "code"), [(BadInput("train.jsonl, line 7: cut in half"), 2), (ReplicaDied("no replica is left"), 1)]
)
def test_what_is_no_bug_ends_with_one_line(capsys, error, code):
    assert run("filter", fail(error)) == code
    assert [str(error) in line for line in capsys.readouterr().err.splitlines()] == [True]


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError):
        run("filter", fail(KeyError("x")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_tells_the_command_that_goes_on(capsys, monkeypatch, number):
    monkeypatch.setattr(sys, "argv", ["recipes/rstar2/filter.py", "data=a b.jsonl"])

    async def interrupted():
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    assert run("filter", interrupted()) == 130
    assert "recipes/rstar2/filter.py 'data=a b.jsonl'" in capsys.readouterr().err


def test_a_job_that_does_its_work_ends_well():
    done = []

    async def work():
        done.append(1)

    assert (run("filter", work()), done) == (0, [1])
