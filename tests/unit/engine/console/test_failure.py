"""What a user is told when a part of theirs ends a run: the message, their own lines once, and where the rest is."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.console.failure import shown, tell, write
from engine.stages.grading import graded
from engine.telemetry.timeline import Timeline
from engine.user_parts import WrongPart
from sandbox.printable import UNPRINTABLE, printable
from tests.support.fakes import Clock, a_trajectory


def lookup(scores):
    return scores["style"]


async def broken(trajectory):
    return lookup({})


async def in_three_groups(work):
    async with asyncio.TaskGroup() as outer:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(work)
        outer.create_task(asyncio.sleep(0))


async def fails():
    await in_three_groups(graded(a_trajectory(3), broken, Timeline(Clock())))


def told_of(work, folder, capsys):
    """What is on standard error when this ends a run."""
    with pytest.raises(Exception) as found:  # noqa: PT011  each has its own
        asyncio.run(work)
    tell("mine", found.value, write(folder, found.value))
    return capsys.readouterr().err


def test_a_bug_of_the_users_is_told_by_their_own_lines(tmp_path, capsys):
    told = told_of(fails(), tmp_path, capsys)
    lines = told.splitlines()
    assert "mine: KeyError: 'style'" in lines[0]
    assert "in the reward broken" in lines[1]
    assert "sample 3" in lines[1]
    assert told.count("in lookup") == told.count("in broken") == 1
    assert "engine/stages/grading.py" not in told
    log = tmp_path / "error.log"
    assert str(log) in lines[-1]
    assert "ExceptionGroup" in log.read_text()
    assert "engine/stages/grading.py" in log.read_text()


@pytest.mark.parametrize("folder", ["", "gone"])
def test_what_a_guest_put_into_a_message_is_no_order_to_the_terminal_or_in_the_log(tmp_path, capsys, folder):
    async def quotes(trajectory):
        raise ValueError("it printed \x1b]52;c;cm0=\x07\x9b2J\u202e\r\ud800")

    told = told_of(graded(a_trajectory(3), quotes, Timeline(Clock())), tmp_path / folder, capsys)
    log = tmp_path / folder / "error.log"
    for text in (told, log.read_text() if log.exists() else ""):
        assert text == printable(text)
    assert "it printed" in told


def test_where_no_file_can_be_written_the_whole_traceback_is_told(tmp_path, capsys):
    told = told_of(fails(), tmp_path / "gone", capsys)
    assert "engine/stages/grading.py" in told


def test_a_cause_is_told_too():
    try:
        try:
            lookup({})
        except KeyError as error:
            raise ValueError("no score") from error
    except ValueError as error:
        said = shown(error)
    assert said.index("ValueError: no score") < said.index("caused by KeyError")
    assert said.count("in lookup") == 1


def test_a_bug_of_ours_is_told_by_our_lines():
    with pytest.raises(TypeError) as failure:
        asyncio.run(asyncio.wait_for(None, 1))
    said = shown(failure.value)
    assert said.startswith("TypeError: ")


@given(st.text(max_size=50), st.text(max_size=50))
def test_whatever_an_exception_says_is_printable(message, note):
    error = ExceptionGroup("many", [WrongPart(message)])
    error.add_note(note)
    assert UNPRINTABLE.search(shown(error)) is None
