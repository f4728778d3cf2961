"""Fifty small mistakes in a user's rewards, tools and stages: each message names the one thing that is to be mended."""

import asyncio
import inspect
import sys
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
import pytest

from engine.console.failure import shown
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.whereabouts import GroupVanished
from engine.ports import Grade, GraderUnavailable, ToolReply
from engine.rollout.turn import PendingToolCall, ToolLost
from engine.stages.admit import admit
from engine.stages.grading import graded, graded_together
from engine.stages.group import GroupConfig, groups
from engine.telemetry.timeline import Timeline
from engine.tools.function_tool import FunctionTool, as_tools
from engine.user_parts import WrongPart
from tests.support.fakes import Clock, a_prompt, a_trajectory
from tests.unit.engine.pipeline.test_vanished import Stage, run

HERE = "test_wrong_parts.py:"


def timeline():
    return Timeline(Clock())


class Judge:
    """A reward that is an object."""

    def __init__(self, answer):
        self.answer = answer

    async def __call__(self, trajectory):
        return self.answer

    def grade(self, trajectory):
        return self.answer


def forgets(trajectory):
    float(trajectory.sampled_tokens)


async def takes_nothing():
    return 1.0


async def takes_two(trajectory, model):
    return 1.0


async def raises(trajectory):
    raise LookupError("no such answer")


def raises_plainly(trajectory):
    return {}["score"]


async def awaits_what_is_none(trajectory):
    return await trajectory.sampled_tokens


async def is_too_late(trajectory):
    raise TimeoutError("of a library")


async def ends_the_process(trajectory):
    sys.exit(0)


def interrupts(trajectory):
    raise KeyboardInterrupt


async def changes_the_tokens(trajectory):
    trajectory.token_ids_T[:] = 0
    return 1.0


async def fails_in_a_task(trajectory):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(raises(trajectory))


class NoMessage(Exception):
    def __str__(self):
        raise LookupError


def has_no_message(trajectory):
    raise NoMessage


def recurses(trajectory):
    return recurses(trajectory)


async def yields(trajectory):
    yield 1.0


REWARDS = {
    "forgets to return": (forgets, f"the reward forgets ({HERE}"),
    "text": (Judge("1.0"), "answered '1.0'"),
    "number as bytes": (Judge(b"1"), "answered b'1'"),
    "dict": (Judge({"reward": 1.0}), "answered {'reward': 1.0}"),
    "list": (Judge([1.0]), "answered [1.0]"),
    "pair": (Judge((1.0, {})), "answered (1.0, {})"),
    "nan": (Judge(float("nan")), "answered nan"),
    "infinite": (Judge(float("-inf")), "answered -inf"),
    "nan of numpy": (Judge(np.float32("nan")), "answered np.float32(nan)"),
    "an array": (Judge(np.ones(2)), "answered array([1., 1.])"),
    "complex": (Judge(1j), "answered 1j"),
    "the class": (Judge(Grade), "answered <class"),
    "a huge int": (Judge(10**400), f"Judge ({HERE}"),
    "grade of None": (Judge(Grade(reward=None)), "answered None"),
    "grade of text": (Judge(Grade(reward="good")), "answered 'good'"),
    "score of nan": (Judge(Grade(reward=1.0, scores={"style": float("nan")})), "'style'"),
    "score of text": (Judge(Grade(reward=1.0, scores={"style": "bad"})), "'style'"),
    "scores of None": (Judge(Grade(reward=1.0, scores=None)), "scores=None"),
    "a method": (Judge(None).grade, f"Judge.grade ({HERE}"),
    "a lambda": (lambda trajectory: None, f"<lambda> ({HERE}"),
    "a partial": (partial(lambda model, trajectory: None, "m"), f"<lambda> ({HERE}"),
    "a coroutine function as the answer": (Judge(raises), "answered <function"),
    "no parameter": (takes_nothing, "takes_nothing"),
    "two parameters": (takes_two, "takes_two"),
    "raises": (raises, "no such answer"),
    "raises in def": (raises_plainly, "'score'"),
    "awaits a number": (awaits_what_is_none, "awaits_what_is_none"),
    "a timeout of its own": (is_too_late, "of a library"),
    "a coroutine as the answer": (lambda trajectory: raises, "answered <function raises"),
    "an error as the answer": (Judge(GraderUnavailable("later")), "answered GraderUnavailable"),
    "yields": (yields, "answered <async_generator"),
    "changes the tokens": (changes_the_tokens, "read-only"),
    "fails in a task": (fails_in_a_task, "in the reward fails_in_a_task"),
    "an error without a message": (has_no_message, "NoMessage"),
    "recurses": (recurses, "in the reward recurses"),
}


@pytest.mark.parametrize("name", REWARDS)
async def test_a_wrong_reward(name):
    reward, wanted = REWARDS[name]
    with pytest.raises(Exception) as failure:  # noqa: PT011  each has its own
        await graded(a_trajectory(3), reward, timeline())
    said = shown(failure.value)
    assert wanted in said
    assert "sample 3" in said or "parameter" in name, "whom it graded"
    assert "/engine/stages/grading.py" not in said, "no line of ours"
    assert len(said.splitlines()) < 60
    if isinstance(failure.value, WrongPart):
        assert "Fix: " in said


@pytest.mark.parametrize("answer", [1, True, 0.5, np.float32(0.5), np.int64(1), np.ones(()), Grade(reward=1.0)])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_reward_may_be_a_plain_function(answer, is_async):
    def plain(trajectory):
        return answer

    found = await graded(a_trajectory(), Judge(answer) if is_async else plain, timeline())
    assert found.reward == float(answer.reward if isinstance(answer, Grade) else answer)


@pytest.mark.parametrize("reward", [ends_the_process, interrupts])
async def test_a_reward_does_not_end_the_process(reward):
    with pytest.raises(WrongPart, match=f"{reward.__name__} .*Fix:"):
        await graded(a_trajectory(), reward, timeline())


class Ranking:
    sees_group = True

    def __init__(self, answer):
        self.answer = answer

    async def __call__(self, trajectories):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (None, "answered None"),
        (1.0, "answered 1.0"),
        ("11", "answered '11'"),
        ({0: 1.0, 1: 2.0}, "answered {0: 1.0"),
        ([1.0], "gave 1 grades for 2"),
        ([1.0] * 3, "gave 3 grades for 2"),
        ([1.0, "good"], "answered 'good' for p0, sample 1"),
        ([float("nan"), 1.0], "answered nan for p0, sample 0"),
        ([[1.0], [2.0]], "answered [1.0] for p0, sample 0"),
    ],
)
async def test_a_wrong_reward_of_groups(answer, wanted):
    with pytest.raises(WrongPart) as failure:
        await graded_together([a_trajectory(0), a_trajectory(1)], Ranking(answer), timeline())
    assert wanted in str(failure.value)
    assert f"Ranking ({HERE}" in str(failure.value)


def sorts(trajectories):
    trajectories.sort(key=lambda member: -member.sample)
    return [float(member.sample) for member in trajectories]


def fails_while_it_yields(trajectories):
    yield 1.0
    raise LookupError("the second")


@pytest.mark.parametrize(("grade", "wanted"), [(sorts, "sort"), (fails_while_it_yields, "the second")])
async def test_a_reward_of_groups_that_raises_is_named(grade, wanted):
    class Grades:
        sees_group = True

        def __call__(self, trajectories):
            return grade(trajectories)

    with pytest.raises(Exception, match=wanted) as failure:
        await graded_together([a_trajectory(0), a_trajectory(1)], Grades(), timeline())
    assert "in the reward" in shown(failure.value)
    assert grade.__name__ in shown(failure.value)


async def test_a_plain_function_grades_groups_too():
    class Plain:
        sees_group = True

        def __call__(self, trajectories):
            return (member.sample for member in trajectories)

    found = await graded_together([a_trajectory(0), a_trajectory(1)], Plain(), timeline())
    assert [member.reward for member in found] == [0.0, 1.0]


@pytest.mark.parametrize("error", [GraderUnavailable("service says 503"), GraderUnavailable()])
async def test_a_grader_that_is_not_there_is_no_mistake(error):
    def unavailable(trajectory):
        raise error

    found = await graded(a_trajectory(), unavailable, timeline())
    assert found.reward is None
    assert found.error.message == (str(error) or "GraderUnavailable")


class Tool:
    """A tool of a user's whose call does what it is given."""

    name = "search"

    def __init__(self, act):
        self.act = act

    async def __call__(self, arguments):
        return self.act(arguments)


def fails(arguments):
    raise KeyError("query")


def is_cancelled(arguments):
    raise asyncio.CancelledError


def ends_by_exit(arguments):
    sys.exit(0)


class OfNothing:
    name = "search"

    async def __call__(self):
        return ToolReply(outcome="ok", text="")


TOOLS = {
    "text": (Tool(lambda arguments: "42"), "answered '42'"),
    "None": (Tool(lambda arguments: None), "answered None"),
    "dict": (Tool(lambda arguments: {"text": "42"}), "answered {'text': '42'}"),
    "pair": (Tool(lambda arguments: ("ok", "42")), "answered ('ok', '42')"),
    "unknown outcome": (Tool(lambda arguments: ToolReply(outcome="fine", text="")), "'fine'"),
    "no text": (Tool(lambda arguments: ToolReply(outcome="ok", text=None)), "None"),
    "raises": (Tool(fails), "'query'"),
    "no parameter": (OfNothing(), "OfNothing"),
    "bytes": (Tool(lambda arguments: b"42"), "answered b'42'"),
    "text of bytes": (Tool(lambda arguments: ToolReply(outcome="ok", text=b"42")), "b'42'"),
    "a coroutine": (Tool(lambda arguments: asyncio.sleep), "answered <function sleep"),
    "was cancelled": (Tool(is_cancelled), "cancelled"),
    "ends the process": (Tool(ends_by_exit), "SystemExit(0)"),
}


def pending():
    return PendingToolCall.closed(name="search", arguments="{}", now=0.0, lane=0)


@pytest.mark.parametrize("name", TOOLS)
async def test_a_wrong_tool(name):
    tool, wanted = TOOLS[name]
    with pytest.raises(Exception) as failure:  # noqa: PT011  each has its own
        await pending().run(tool, {"x": 1}, timeline())
    said = shown(failure.value)
    assert wanted in said
    assert type(tool).__name__ in said, "which tool"
    assert HERE in said.replace('.py", line ', ".py:"), "where"


async def test_a_tool_may_be_plain_and_one_that_lost_its_call_is_no_mistake():
    class Plain:
        name = "search"

        def __call__(self, arguments):
            return ToolReply(outcome=arguments["outcome"], text="gone")

    call = pending()
    await call.run(Plain(), {"outcome": "ok"}, timeline())
    assert call.reply.text == "gone"
    with pytest.raises(ToolLost, match="gone"):
        await pending().run(Plain(), {"outcome": "lost"}, timeline())


def weather(city: Annotated[str, "its name"], days: int = 1) -> dict:
    """Tells the weather
    of a city.

    For people who read code.
    """
    if days < 1:
        raise ValueError("days must be positive")
    return {"city": city, "days": days}


async def test_a_typed_function_is_a_tool():
    [tool] = as_tools([weather])
    assert (tool.name, tool.description) == ("weather", "Tells the weather of a city.")
    assert tool.parameters["properties"]["city"] == {"type": "string", "description": "its name"}
    assert tool.parameters["required"] == ["city"]
    assert (await tool({"city": "Rome"})) == ToolReply(outcome="ok", text='{"city": "Rome", "days": 1}')


@pytest.mark.parametrize(
    ("arguments", "wanted", "executed"),
    [
        ({}, "city", False),
        ({"city": 3}, "city", False),
        ({"city": "Rome", "hours": 1}, "hours", False),
        ({"city": "Rome", "days": "many"}, "days", False),
        ({"city": "Rome", "days": 0}, "ValueError: days must be positive", True),
    ],
)
async def test_what_is_wrong_with_its_arguments_is_read_by_the_model(arguments, wanted, executed):
    reply = await FunctionTool(weather)(arguments)
    assert (reply.outcome, reply.executed) == ("error", executed)
    assert wanted in reply.text


def untyped(x):
    return x


def of_many(*words: str):
    return words


def of_a_strange_type(x: asyncio.Event):
    return x


def of_any(**words: str):
    return words


def by_place(x: int, /):
    return x


def silent(x: int = 0):
    pass


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (untyped, "'x'"),
        (of_many, "words"),
        (of_a_strange_type, "Event"),
        (lambda x: x, "<lambda>"),
        (lambda: 1, "<lambda>"),
        (of_any, "words"),
        (by_place, "x: int"),
    ],
)
def test_a_function_that_cannot_be_a_tool(function, wanted):
    with pytest.raises(WrongPart) as failure:
        FunctionTool(function)
    assert wanted in str(failure.value)
    assert HERE in str(failure.value)


async def test_a_function_tool_that_answers_nothing():
    with pytest.raises(WrongPart, match=r"silent .* answered None"):
        await FunctionTool(silent)({})


def stage(act, after=None):
    """A stage that does something with each group, and something at its end."""

    async def mine(inbox, outbox):
        async for group in inbox:
            answer = act(group, outbox)
            if inspect.isawaitable(answer):
                await answer
        if after is not None:
            await after(outbox)

    return mine


async def put_twice(group, outbox):
    await outbox.put(group)
    await outbox.put(group)


def keeps(kept, advantages):
    return lambda group, outbox: outbox.put(replace(group, drop=None, kept=kept, advantages_K=advantages))


async def fails_in_a_stage(group, outbox):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(raises(group))


STAGES = {
    "swallows all": (stage(lambda group, outbox: None), GroupVanished, "p0"),
    "raises": (stage(lambda group, outbox: 1 / 0), ZeroDivisionError, "in the stage mine"),
    "puts twice": (stage(put_twice), ValueError, "p0"),
    "puts text": (stage(lambda group, outbox: outbox.put("p0")), ValueError, "'p0' (str)"),
    "puts None": (stage(lambda group, outbox: outbox.put(None)), ValueError, "None (NoneType)"),
    "puts a list": (stage(lambda group, outbox: outbox.put([group])), ValueError, "(list)"),
    "puts the prompt": (stage(lambda group, outbox: outbox.put(group.prompt)), ValueError, "(Prompt)"),
    "puts another lease": (stage(lambda g, outbox: outbox.put(replace(g, lease=77))), ValueError, "lease 77"),
    "keeps too few advantages": (stage(keeps((0, 1), np.zeros(1))), ValueError, "p0"),
    "keeps one twice": (stage(keeps((0, 0), np.zeros(2))), ValueError, "p0"),
    "keeps what is not there": (stage(keeps((9,), np.zeros(1))), ValueError, "p0"),
    "puts an empty list": (stage(lambda group, outbox: outbox.put([])), ValueError, "empty list"),
    "fails in a task": (stage(fails_in_a_stage), LookupError, "no such answer"),
    "ends the process": (stage(lambda group, outbox: sys.exit(0)), WrongPart, "SystemExit(0)"),
}


@pytest.mark.parametrize("name", STAGES)
async def test_a_wrong_stage(name):
    mine, kind, wanted = STAGES[name]
    with pytest.raises(kind) as failure:
        await run(Stage(name="mine", run=mine))
    assert wanted in shown(failure.value)
    assert "stage mine" in shown(failure.value)


async def test_a_group_of_which_nobody_says_what_is_trained():
    with pytest.raises(WrongPart, match=r"p0 .*neither kept nor drop.*Fix:"):
        await run(Stage(name="mine", run=stage(lambda group, outbox: outbox.put(replace(group, drop=None)))))


@pytest.mark.parametrize("select", [lambda group: None, lambda group: [group], lambda group: (0, 1)])
async def test_a_selection_that_gives_no_group_is_named(select):
    with pytest.raises(WrongPart, match=r"<lambda> \(test_wrong_parts.py:\d+\), for the group of p0, .*Fix:"):
        await selected(select)


async def test_what_a_selection_raises_is_named():
    for select, wanted in [(lambda group: 1 / 0, "division"), (lambda group: sys.exit(0), "SystemExit(0)")]:
        with pytest.raises((ZeroDivisionError, WrongPart)) as failure:
            await selected(select)
        said = shown(failure.value)
        assert wanted in said
        assert "in the selection <lambda>" in said


async def selected(select):
    config = GroupConfig(samples=1)
    rollouts = Ended()
    stages = [
        Stage(name="admit", run=admit(iter([a_prompt()]), Leases(1, 0), 1)),
        Stage(name="groups", run=groups(rollouts, Judge(1.0), select, iter(()), config, timeline())),
    ]
    await Pipeline(stages).run()


class Ended:
    """Rollouts that have ended."""

    async def run(self, prompt, sample, group, *, tally=None, log=None):
        return a_trajectory(sample, prompt=prompt)


async def test_a_stage_that_ends_after_its_first_group_is_named():
    async def mine(inbox, outbox):
        await outbox.put(await anext(aiter(inbox)))

    with pytest.raises(RuntimeError, match="stage mine ended before its inbox was closed"):
        await run(Stage(name="mine", run=mine))


async def test_what_takes_one_parameter_is_named():
    async def mine(inbox):
        return None

    with pytest.raises(WrongPart, match=r"the stage \S*mine \(test_wrong_parts.py:\d+\)"):
        await run(Stage(name="mine", run=mine))
