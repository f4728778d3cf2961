"""Stateful tools in rollouts: one session for each trajectory, closed however the trajectory ends."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from engine.ports import ToolReply
from engine.tools.python_tool import PythonSessions
from engine.types import Boundary, StopReason
from sandbox.wire import ToolResult
from tests.support.fakes import Die, Gate, ScriptedSessions, settle
from tests.support.node import ANSWER, END, Setup, call


def codes(session):
    return [code for code, _, _ in session.calls]


async def test_the_calls_of_all_turns_share_a_session_of_their_trajectory():
    sessions = ScriptedSessions()
    turns = [call("x = 1") + call("x += 1") + END], [call("print(x)") + END], [ANSWER]
    async with Setup(*turns, tools=[PythonSessions(sessions)]) as node, asyncio.TaskGroup() as group:
        running = [group.create_task(node.run(f"What is {n} + 1?")) for n in range(3)]
    assert [codes(session) for session in sessions.made] == [["x = 1", "x += 1", "print(x)"]] * 3
    assert [session.open for session in sessions.made] == [False] * 3
    assert all([use.executed for use in task.result().tool_uses] == [True] * 3 for task in running)


async def test_calls_of_one_turn_run_one_after_the_other_in_their_order():
    sessions = ScriptedSessions(hold=True)
    text = "".join(call(f"print({n})") for n in range(4))
    async with Setup([text + END], [ANSWER], tools=[PythonSessions(sessions)]) as node, asyncio.TaskGroup() as group:
        group.create_task(node.run())
        await settle(80)
        [session] = sessions.made
        assert codes(session) == ["print(0)"]
        session.release()
    assert codes(session) == [f"print({n})" for n in range(4)]
    assert session.most_running == 1


@pytest.mark.parametrize("ending", ["deadline", "lost", "cancelled", "bug"])
async def test_the_session_is_closed_however_the_trajectory_ends(ending):
    """A cell that still runs has been cancelled by then: ScriptedSessions checks it."""
    answer = {"lost": lambda code: ToolResult(outcome="lost"), "bug": lambda code: {}[code]}.get(ending)
    sessions = ScriptedSessions(answer, hold=ending in ("deadline", "cancelled"))
    rest = Gate()
    budget = {"deadline_s": 0.05} if ending == "deadline" else {}
    node = Setup([call("print(1)"), rest, END], tools=[PythonSessions(sessions)], **budget)
    async with node, asyncio.TaskGroup() as group:
        running = group.create_task(outcome(node, sessions))
        await rest.started.wait()
        [session] = sessions.made
        if ending == "cancelled":
            await session.started.wait()
            assert session.open
            running.cancel()
    assert not session.open
    assert session.cancelled == (ending in ("deadline", "cancelled"))
    if ending == "lost":
        assert running.result().error.boundary is Boundary.SANDBOX
    elif ending == "bug":
        assert isinstance(running.result(), KeyError)


async def outcome(node, sessions):
    """The trajectory or the bug; the session is closed at once, and not by the garbage collector later."""
    try:
        return await node.run()
    except KeyError as error:
        return error
    finally:
        assert [session.open for session in sessions.made] == [False]


async def test_a_trajectory_that_changes_replicas_keeps_its_session():
    sessions = ScriptedSessions()
    turns = [call("x = 1"), Die(), END], [call("print(x)"), END], [ANSWER]
    async with Setup(*turns, tools=[PythonSessions(sessions)], replicas=2) as node:
        trajectory = await node.run()
        assert node.fleet.deaths == 1
    [session] = sessions.made
    assert codes(session) == ["x = 1", "print(x)"]
    assert trajectory.stop is StopReason.ANSWER


class Slow:
    """A stateful tool whose opening waits for ever."""

    name = "slow"
    left = False

    @asynccontextmanager
    async def open(self):
        try:
            await asyncio.Event().wait()
            yield None
        finally:
            self.left = True


async def test_opening_is_within_the_deadline():
    slow, sessions = Slow(), ScriptedSessions()
    async with Setup([ANSWER], tools=[PythonSessions(sessions), slow], deadline_s=0.02) as node:
        trajectory = await node.run()
    assert (trajectory.stop, trajectory.turns, slow.left) == (StopReason.DEADLINE, (), True)
    assert [session.open for session in sessions.made] == [False]


async def test_stateful_and_stateless_tools_side_by_side():
    class Clock:
        name = "clock"

        async def __call__(self, arguments):
            return ToolReply(outcome="ok", text="12:00")

    sessions = ScriptedSessions()
    text = call("x", "clock") + call("print(1)") + call("x", "bash") + END
    async with Setup([text], [ANSWER], tools=[Clock(), PythonSessions(sessions)]) as node:
        trajectory = await node.run()
    assert [use.response for use in trajectory.tool_uses] == [
        "12:00",
        "print(1)",
        "NameError: no tool 'bash' (there is: clock, python)",
    ]
