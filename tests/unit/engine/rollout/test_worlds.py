"""Worlds in rollouts: tools that share a state, made for the prompt of their trajectory."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.errors import BadInput
from engine.ports import ToolReply, ToolSpec
from engine.rollout.open_tools import MOST_STATE_BYTES
from engine.run.journal import Journal
from engine.types import Boundary, StopReason
from engine.user_parts import WrongPart
from tests.support.fakes import Die, Echo, Gate, a_prompt
from tests.support.node import ANSWER, END, Setup, call

TEXT = {"type": "object", "properties": {"code": {"type": "string"}}}


class Pad:
    """The lines of one trajectory."""

    def __init__(self, lines):
        self.lines = lines
        self.closed = False

    async def call(self, tool, arguments):
        if tool == "write":
            self.lines = [*self.lines, arguments["code"]]
        return ToolReply(outcome="ok", text=" ".join(self.lines))

    def state(self):
        return " ".join(self.lines).encode()


class Pads:
    """Opens a pad that begins with the first line of the prompt's metadata."""

    name = "pad"
    tools = tuple(ToolSpec(name=name, description=name, parameters=TEXT) for name in ("write", "read"))

    def __init__(self):
        self.made = []

    @asynccontextmanager
    async def open(self, prompt):
        pad = Pad([prompt.metadata.get("first", "none")])
        self.made.append(pad)
        try:
            yield pad
        finally:
            pad.closed = True


def begins_with(text, number=0):
    return replace(a_prompt(number), metadata={"first": text})


TURNS = [call("a", "write") + call("b", "write") + END], [call("", "read") + END], [ANSWER]


async def test_the_tools_of_a_world_share_a_state_that_the_prompt_begins_and_the_reward_reads():
    pads = Pads()
    async with Setup(*TURNS, tools=[pads]) as node, asyncio.TaskGroup() as group:
        running = [group.create_task(node.rollouts.run(begins_with(str(n), n), 0, n)) for n in range(3)]
    assert [task.result().states for task in running] == [{"pad": f"{n} a b".encode()} for n in range(3)]
    assert [task.result().tool_uses[-1].response for task in running] == [f"{n} a b" for n in range(3)]
    assert [pad.closed for pad in pads.made] == [True] * 3


async def test_members_of_a_group_never_see_one_another():
    pads = Pads()
    async with Setup(*TURNS, tools=[pads]) as node, asyncio.TaskGroup() as group:
        running = [group.create_task(node.rollouts.run(begins_with("0"), sample, 0)) for sample in range(4)]
    assert [task.result().states["pad"] for task in running] == [b"0 a b"] * 4


async def test_a_trajectory_that_changes_replicas_keeps_its_world():
    pads = Pads()
    turns = [call("a", "write"), Die(), END], [call("b", "write"), END], [ANSWER]
    async with Setup(*turns, tools=[pads], replicas=2) as node:
        trajectory = await node.rollouts.run(begins_with("0"), 0, 0)
        assert node.fleet.deaths == 1
    assert len(pads.made) == 1
    assert trajectory.states == {"pad": b"0 a b"}


async def test_a_prompt_is_offered_some_tools_of_a_world_and_those_beside_it():
    async with Setup(*TURNS, tools=[Pads(), Echo()]) as node:
        read_only = replace(begins_with("0"), tools=("read", "echo"))
        trajectory = await node.rollouts.run(read_only, 0, 0)
    assert [use.executed for use in trajectory.tool_uses] == [False, False, True]
    assert trajectory.states == {"pad": b"0"}


async def test_one_that_never_calls_it_has_the_state_of_the_beginning():
    async with Setup([ANSWER], tools=[Pads()]) as node:
        trajectory = await node.rollouts.run(begins_with("0"), 0, 0)
    assert (trajectory.stop, trajectory.states) == (StopReason.ANSWER, {"pad": b"0"})


async def test_a_world_that_does_not_open_in_time_is_a_failure_and_no_answer_of_the_model():
    class Slow(Pads):
        @asynccontextmanager
        async def open(self, prompt):
            await asyncio.Event().wait()
            yield

    async with Setup([ANSWER], tools=[Slow()], deadline_s=0.05) as node:
        trajectory = await node.rollouts.run(begins_with("0"), 0, 0)
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.error.boundary is Boundary.SANDBOX


async def test_a_world_is_closed_when_its_trajectory_is_cancelled():
    pads, rest = Pads(), Gate()
    async with Setup([call("a", "write"), rest, END], tools=[pads]) as node, asyncio.TaskGroup() as group:
        running = group.create_task(node.rollouts.run(begins_with("0"), 0, 0))
        await rest.started.wait()
        running.cancel()
    assert [pad.closed for pad in pads.made] == [True]


async def test_a_resumed_trajectory_has_the_state_that_its_calls_made(tmp_path):
    rest = Gate()
    async with Setup(TURNS[0], [rest], tools=[Pads()]) as node, asyncio.TaskGroup() as group:
        log = Journal(tmp_path).log(0, 0, 0)
        running = group.create_task(node.rollouts.run(begins_with("0"), 0, 0, log=log))
        await rest.started.wait()
        running.cancel()
    pads = Pads()
    async with Setup(*TURNS, tools=[pads]) as node:
        log = Journal(tmp_path).log(0, 0, 0)
        trajectory = await node.rollouts.run(begins_with("0"), 0, 0, log=log)
        assert len(node.replicas.made[0].requests) == 2, "the first turn was not sampled again"
        log.end(trajectory, 0)
    assert trajectory.states == {"pad": b"0 a b"}
    assert Journal(tmp_path).log(0, 0, 0).finished.states == trajectory.states


def test_names_of_tools_and_worlds_must_differ():
    for tools in ([Pads(), Pads()], [Pads(), type("Read", (Echo,), {"name": "read"})()]):
        with pytest.raises(BadInput, match="different names"):
            Setup(tools=tools)


@pytest.mark.parametrize("state", [None, "text", bytearray(b"x"), bytes(MOST_STATE_BYTES + 1)])
async def test_a_world_without_a_state_that_can_be_kept_is_named(state):
    class Empty(Pads):
        @asynccontextmanager
        async def open(self, prompt):
            yield None if state is None else Wordy([])

    class Wordy(Pad):
        def state(self):
            return state

    async with Setup([ANSWER], tools=[Empty()]) as node:
        with pytest.raises(WrongPart, match="pad"):
            await node.rollouts.run(begins_with("0"), 0, 0)
