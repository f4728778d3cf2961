"""Each Protocol's check passes on ours and on the example in its docstring, and fails on what breaks its promise."""

import asyncio
import contextlib
import inspect
import textwrap
from itertools import count

import pytest

from algo.group.roc import RoC
from algo.group.selection import KeepAll, RandomSubset
from algo.reward.math_reward import MathReward
from engine import contracts, ports
from engine.balancing.kv_aware import KvAware
from engine.balancing.round_robin import RoundRobin
from engine.ports import ToolReply
from engine.replica import port
from engine.tools.python_tool import PythonSessions, PythonTool
from engine.types import StopReason
from sandbox.wire import ToolResult
from tests.support.fakes import Echo, ScriptedReplica, ScriptedRunner, ScriptedSessions, a_trajectory, a_use

TRAJECTORIES = [
    a_trajectory(0, reward=1.0, uses=[a_use(), a_use("error")]),
    a_trajectory(1, reward=0.0),
    a_trajectory(2, reward=1.0, sampled=90, stop=StopReason.LENGTH),
    a_trajectory(3, reward=0.0, stop=StopReason.DEADLINE),
]
CALLS = count()
GROUPS = [TRAJECTORIES, TRAJECTORIES[::-1], TRAJECTORIES[:2]]


def example(protocol):
    """The first class in a Protocol's docstring, executed as written, in the Protocol's own module."""
    lines = inspect.getdoc(protocol).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("class "))
    body = [lines[first]]
    for line in lines[first + 1 :]:
        if line and not line.startswith((" ", "class ")):
            break
        body.append(line)
    assert len(body) <= 20, "an example is at most 20 lines"
    module = {
        "asynccontextmanager": contextlib.asynccontextmanager,
        "contextlib": contextlib,
        **vars(inspect.getmodule(protocol)),
    }
    exec(textwrap.dedent("\n".join(body)), module)
    return module[lines[first].split()[1].partition(":")[0]]


@pytest.mark.parametrize("tool", [example(ports.Tool)(), Echo(), PythonTool(ScriptedRunner())])
async def test_tools(tool):
    await contracts.check_tool(tool, {"code": "print(1)"})


async def test_a_held_tool_is_cancelled():
    runner = ScriptedRunner(hold=True)
    await contracts._check_cancellable(lambda: PythonTool(runner)({"code": "x"}))
    assert runner.cancelled == 1


@pytest.mark.parametrize("runner", [ScriptedRunner(), ScriptedRunner(lambda code: ToolResult(outcome="error"))])
async def test_tool_runners(runner):
    await contracts.check_tool_runner(runner)


def kept(code):
    return ToolResult(outcome="ok", stdout=code, session_state="kept")


async def test_session_runners():
    await contracts.check_session_runner(ScriptedSessions(kept))


@pytest.mark.parametrize("tool", [example(ports.StatefulTool)(), PythonSessions(ScriptedSessions(kept))])
async def test_stateful_tools(tool):
    await contracts.check_stateful_tool(tool, {"code": "print(1)"})


@pytest.mark.parametrize("reward", [example(ports.Reward)(), MathReward(), MathReward(integers_only=True)])
async def test_rewards(reward):
    await contracts.check_reward(reward, TRAJECTORIES)


async def test_group_rewards():
    await contracts.check_group_reward(example(ports.GroupReward)(), GROUPS)


@pytest.mark.parametrize("selector", [example(ports.Selector)(), KeepAll(), RandomSubset(keep=2), RoC(keep=2)])
def test_selectors(selector):
    contracts.check_selector(selector, GROUPS)


async def test_generators():
    await contracts.check_generator(example(port.Generator)(), [5, 6, 7], stop_token_id=2)


async def test_replicas():
    await contracts.check_replica(ScriptedReplica(), [5, 6, 7, 8], 2, "/w/1", 1)


@pytest.mark.parametrize("make", [RoundRobin, lambda: KvAware(max_tokens=200, hold_s=30.0)])
@pytest.mark.parametrize("seed", range(5))
def test_balancers(make, seed):
    contracts.check_balancer(make, seed=seed)


# A check that cannot fail checks nothing.


class Raises(Echo):
    async def __call__(self, arguments):
        return ToolReply(outcome="ok", text=arguments["code"])


class Unknown(Echo):
    async def __call__(self, arguments):
        return ToolReply(outcome="malformed", text="")


@pytest.mark.parametrize(("tool", "error"), [(Raises(), KeyError), (Unknown(), AssertionError)])
async def test_a_bad_tool_is_found(tool, error):
    with pytest.raises(error):
        await contracts.check_tool(tool, {"code": "x"})


class Counter:
    """A world whose one tool counts: `call` changes the state after its only await."""

    name = "counter"
    tools = (ports.ToolSpec(name="add", description="Adds one.", parameters={"type": "object", "properties": {}}),)

    def __init__(self, hasty: bool = False) -> None:
        self.hasty = hasty

    @contextlib.asynccontextmanager
    async def open(self, prompt):
        yield Count(self.hasty)


class Count:
    def __init__(self, hasty):
        self.hasty, self.value = hasty, 0

    async def call(self, tool, arguments):
        if self.hasty:
            self.value += 1
        await asyncio.sleep(0)
        if not self.hasty:
            self.value += 1
        return ToolReply(outcome="ok", text=str(self.value))

    def state(self):
        return str(self.value).encode()


async def test_a_world_whose_cancelled_call_leaves_an_effect_is_found():
    prompt = TRAJECTORIES[0].prompt
    await contracts.check_world(Counter(), prompt, "add", {})
    with pytest.raises(AssertionError, match="cancelled"):
        await contracts.check_world(Counter(hasty=True), prompt, "add", {})


async def test_a_bad_session_runner_is_found():
    class Unordered(ScriptedSessions):
        @contextlib.asynccontextmanager
        async def session(self):
            async with super().session() as session:

                async def run(code, *_):
                    for _ in range(9 - int(code[6]) if code[6].isdigit() else 0):  # the later, the sooner
                        await asyncio.sleep(0)
                    return kept(code)

                session.run = run
                yield session

    with pytest.raises(AssertionError, match="in the order"):
        await contracts.check_session_runner(Unordered())
    with pytest.raises(BaseExceptionGroup) as stateless:
        await contracts.check_session_runner(ScriptedSessions())
    assert stateless.group_contains(AssertionError, match="session_state is None")


async def test_a_bad_stateful_tool_is_found():
    class Shared:
        name, one = "echo", Echo()

        @contextlib.asynccontextmanager
        async def open(self):
            yield self.one

    class Swallows(Shared):
        @contextlib.asynccontextmanager
        async def open(self):
            with contextlib.suppress(LookupError):
                yield Echo()

    class Both(Shared, Echo):
        pass

    for tool, message in ((Shared(), "has its own"), (Swallows(), "swallowed"), (Both(), "stateless")):
        with pytest.raises(AssertionError, match=message):
            await contracts.check_stateful_tool(tool, {})


async def test_a_tool_that_swallows_its_cancellation_is_found():
    class Swallows(Echo):
        async def __call__(self, arguments):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return ToolReply(outcome="ok", text="")

    with pytest.raises(AssertionError, match="swallowed"):
        await contracts._check_cancellable(lambda: Swallows()({"code": "x"}))


@pytest.mark.parametrize("value", [float("nan"), None, "1"])
async def test_a_bad_reward_is_found(value):
    async def reward(trajectory):
        return value

    with pytest.raises(AssertionError, match="a reward is"):
        await contracts.check_reward(reward, TRAJECTORIES)


async def test_a_reward_of_groups_is_not_taken_for_one_of_a_trajectory():
    with pytest.raises(AssertionError, match="sees_group"):
        await contracts.check_reward(example(ports.GroupReward)(), TRAJECTORIES)
    with pytest.raises(AssertionError, match="sees_group"):
        await contracts.check_group_reward(example(ports.Reward)(), GROUPS)


@pytest.mark.parametrize(
    ("grades", "message"),
    [
        (lambda group: [1.0], "one grade for each"),
        (lambda group: [float("nan")] * len(group), "finite"),
        (lambda group: ["1"] * len(group), "a number or a Grade"),
        (lambda group: [ports.Grade(reward=1.0, scores={"style": float("inf")})] * len(group), "finite"),
        (lambda group: [float(next(CALLS))] * len(group), "same rewards"),
    ],
)
async def test_a_bad_reward_of_groups_is_found(grades, message):
    class Bad:
        sees_group = True

        async def __call__(self, trajectories):
            return grades(trajectories)

    with pytest.raises(AssertionError, match=message):
        await contracts.check_group_reward(Bad(), GROUPS)


@pytest.mark.parametrize(
    "selector",
    [lambda t, rng: [1, 0], lambda t, rng: [0, 0], lambda t, rng: [len(t)], lambda t, rng: [int(rng.integers(2))] * 2],
)
def test_a_bad_selector_is_found(selector):
    with pytest.raises(AssertionError):
        contracts.check_selector(selector, GROUPS)


def test_a_bad_balancer_is_found():
    class Forgets(RoundRobin):
        def replica_down(self, replica): ...

    class Repeats(RoundRobin):
        def trajectory_ended(self, key, tokens, finished): ...

    for make, message in ((Forgets, "which is not up"), (Repeats, "is placed while")):
        with pytest.raises(AssertionError, match=message):
            contracts.check_balancer(make)


async def test_a_bad_replica_is_found():
    class Deaf(ScriptedReplica):
        async def abort(self, request_id): ...

    late = ScriptedReplica()
    late.engine_version = 0
    for replica, message in ((Deaf(), "aborted ends with 'length'"), (late, "each token's version")):
        with pytest.raises(AssertionError, match=message):
            await contracts.check_replica(replica, [5, 6, 7, 8], 2, "/w/1", 1)
