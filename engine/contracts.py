"""Checks what an implementation of a Protocol must do, with one check per Protocol. Run them on your own:

    from engine import contracts

    async def test_my_tool():
        await contracts.check_tool(MyTool(), {"query": "x"})

A check raises AssertionError with the promise that was broken. The checks of losses and weight transports are in
`algo.contracts`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, get_args

import numpy as np

from engine.balancing.balancer import Balancer, Place
from engine.ports import (
    Grade,
    GraderUnavailable,
    GroupReward,
    Reward,
    Selector,
    SessionRunner,
    StatefulTool,
    Tool,
    ToolReply,
    ToolRunner,
    ToolSpec,
    World,
)
from engine.replica.port import Delta, Generator, KvSample, ReplicaPort, Sampling
from engine.tools.python_tool import schema
from engine.types import Prompt, Trajectory
from engine.user_parts import call
from sandbox.wire import Limits, Outcome, SessionState, ToolResult

ODD_ARGUMENTS: tuple[Mapping[str, Any], ...] = ({}, {"code": None}, {"code": [1]}, {"": {}}, {"unexpected": "x" * 9999})


async def check_tool(tool: Tool, good: Mapping[str, Any]) -> None:
    """Checks that a tool has a name, answers odd arguments too, with a known outcome, and can be cancelled."""
    check_schema(tool)
    for arguments in (good, *ODD_ARGUMENTS):
        reply = await tool(arguments)
        assert isinstance(reply, ToolReply), f"a tool answers with a ToolReply, not {reply!r}"
        assert reply.outcome in get_args(Outcome), f"outcome {reply.outcome!r} is one of {get_args(Outcome)}"
        assert not (reply.jailed and not reply.executed), "a reply with executed=False must have jailed=False"
    await _check_cancellable(lambda: tool(good))


def check_schema(tool: Tool | StatefulTool | ToolSpec) -> None:
    """Checks that the model is shown the JSON schema of a function with the tool's name."""
    assert isinstance(tool.name, str), "name is a string"
    assert tool.name, "name is not empty"
    shown = schema(tool)
    assert json.loads(json.dumps(shown)) == shown, f"the schema is JSON: {shown}"
    assert shown["function"]["name"] == tool.name, shown
    assert isinstance(shown["function"]["description"], str), "description is a string"
    parameters = shown["function"]["parameters"]
    assert isinstance(parameters, Mapping), "parameters is a JSON schema"
    assert parameters.get("type") == "object", f"the arguments are an object: {parameters}"
    properties = parameters.get("properties")
    assert isinstance(properties, Mapping), f"parameters names the arguments in properties: {parameters}"
    missing = set(parameters.get("required", ())) - properties.keys()
    assert not missing, f"required arguments must be in properties, which lack {missing}"


async def check_stateful_tool(tool: StatefulTool, good: Mapping[str, Any]) -> None:
    """Checks that a stateful tool is not callable itself and opens a tool of its own name for each trajectory.

    Several are open at once, and an exception that leaves one passes through and does not affect the others.
    """
    assert not callable(tool), "a tool that can be called is taken for a stateless one"
    check_schema(tool)
    async with tool.open() as first:
        await check_tool(first, good)
        assert first.name == tool.name, "the model calls both by one name"
        passed = False
        try:
            async with tool.open() as second:
                assert second is not first, "each trajectory has its own"
                await second(good)
                raise LookupError("of the rollout")
        except LookupError:
            passed = True
        assert passed, "the exception was swallowed"
        assert isinstance(await first(good), ToolReply)


async def check_world(world: World, prompt: Prompt, tool: str, good: Mapping[str, Any]) -> None:
    """Checks that a world opens a state of its own for each trajectory, which calls change and cancelled ones do not.

    tool, good: a call that succeeds. Arguments that no tool expects are answered, and do not raise.
    """
    assert not callable(world), "a world that can be called is taken for a tool"
    assert isinstance(world.name, str), "name is a string"
    assert tool in {spec.name for spec in world.tools}, f"{tool!r} is none of the world's tools"
    for spec in world.tools:
        check_schema(spec)
    async with world.open(prompt) as first, world.open(prompt) as second:
        beginning = second.state()
        assert type(beginning) is bytes, f"state() returns bytes, not {beginning!r}"
        assert first.state() == beginning, "trajectories of a prompt begin from one state"
        for arguments in (good, *ODD_ARGUMENTS):
            reply = await first.call(tool, arguments)
            assert isinstance(reply, ToolReply), f"a tool answers with a ToolReply, not {reply!r}"
        assert second.state() == beginning, "a trajectory changed another one's state"
        if await _check_cancellable(lambda: second.call(tool, good)):
            assert second.state() == beginning, "a cancelled call changed the state"
        assert (await second.call(tool, good)).outcome == "ok", "a call after a cancelled one succeeds"


async def check_session_runner(runner: SessionRunner) -> None:
    """Checks that the cells of a session run in the order of the calls and report the state of their variables.

    Sessions run side by side, and a session goes on after a cell was cancelled.
    """
    async with runner.session() as session, runner.session() as other:
        order: list[int] = []

        async def cell(number: int) -> None:
            result = await session.run(f"print({number})")
            order.append(number)
            assert isinstance(result, ToolResult), f"a session answers with a ToolResult, not {result!r}"
            assert result.outcome in get_args(Outcome), result
            assert result.session_state in get_args(SessionState), f"session_state is {result.session_state!r}"

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(cell(number), name=f"cell-{number}")
            beside = await other.run("print(input())", "x", Limits(wall_s=2))
            assert beside.session_state == "kept", f"session_state is {beside.session_state!r}"
        assert order == [0, 1, 2, 3], f"cells ended in the order {order}"
        await _check_cancellable(lambda: session.run("while True: pass"))
        assert isinstance(await session.run("print(5)"), ToolResult), "the session goes on after a cancelled cell"


async def check_tool_runner(runner: ToolRunner) -> None:
    """Checks that each call returns a result, also if its code fails; calls run at once and can be cancelled."""
    programs = [*(f"print({number})" for number in range(4)), "1/0"]
    async with asyncio.TaskGroup() as group:
        started = [group.create_task(runner.run(program), name=program) for program in programs]
    for result in (each.result() for each in started):
        assert isinstance(result, ToolResult), f"a runner answers with a ToolResult, not {result!r}"
        assert result.outcome in get_args(Outcome), result
    assert await runner.run("print(input())", "x", Limits(wall_s=2)), "stdin and limits can be given"
    assert await runner.run("6 * 7", display=True), "a display can be asked for"
    await _check_cancellable(lambda: runner.run("while True: pass"))


async def check_reward(reward: Reward, trajectories: Sequence[Trajectory]) -> None:
    """Checks that a reward is a finite number, the same each time, and does not change the trajectory.

    Some of the trajectories should have no answer.
    """
    assert not isinstance(reward, GroupReward), "a reward with `sees_group` grades whole groups: use check_group_reward"
    for trajectory in trajectories:
        before = _content(trajectory)
        try:
            grades = [await call("reward", reward, trajectory) for _ in range(2)]
        except GraderUnavailable:
            continue
        for grade in grades:
            _check_grade(grade)
        assert Grade.of(grades[0]).reward == Grade.of(grades[1]).reward, "the same trajectory has the same reward"
        assert _content(trajectory) == before, "a reward does not change the trajectory"


async def check_group_reward(reward: GroupReward, groups: Sequence[Sequence[Trajectory]]) -> None:
    """Checks that a reward of groups gives a grade or None for each trajectory, in order and the same each time.

    It grades groups of any size, also of one, and changes no trajectory.
    """
    assert isinstance(reward, GroupReward), "`sees_group` must be there: it marks a reward of groups"
    assert reward.sees_group is True
    for group in [*groups, *(group[:1] for group in groups)]:
        before = [_content(member) for member in group]
        try:
            answers = [await call("reward", reward, group) for _ in range(2)]
        except GraderUnavailable:
            continue
        for grades in answers:
            assert len(grades) == len(group), f"one grade for each of {len(group)} trajectories, not {len(grades)}"
            for grade in grades:
                if grade is not None:
                    _check_grade(grade)
        rewards = [[None if grade is None else Grade.of(grade).reward for grade in grades] for grades in answers]
        assert rewards[0] == rewards[1], "the same group has the same rewards"
        assert [_content(member) for member in group] == before, "a reward does not change the trajectories"


def _content(trajectory: Trajectory) -> tuple[bytes, str]:
    return trajectory.token_ids_T.tobytes(), trajectory.text


def _check_grade(answer: Any) -> None:
    assert isinstance(answer, int | float | Grade), f"a reward is a number or a Grade, not {answer!r}"
    grade = Grade.of(answer)
    values = [grade.reward, *(score for score in grade.scores.values() if score is not None)]
    assert all(isinstance(value, int | float) for value in values), f"a reward is made of numbers, not of {values!r}"
    assert all(math.isfinite(value) for value in values), f"a reward is finite, not {values!r}"


def check_selector(selector: Selector, groups: Sequence[Sequence[Trajectory]]) -> None:
    """Checks that a selector returns different indices of the group, ascending, which only the generator varies."""
    for trajectories in groups:
        for seed in range(5):
            kept = selector(trajectories, np.random.default_rng(seed))
            assert all(isinstance(index, int) for index in kept), f"indices are ints: {kept!r}"
            assert kept == sorted(set(kept)), f"indices ascend and differ: {kept}"
            assert all(0 <= index < len(trajectories) for index in kept), f"indices lie in the group: {kept}"
            assert selector(trajectories, np.random.default_rng(seed)) == kept, "rng alone varies the choice"


async def check_generator(
    generator: Generator, token_ids: Sequence[int], stop_token_id: int, repeatable: bool = True
) -> None:
    """Checks the deltas of a generator: log-probabilities, `finish`, budgets, and that the stream can be closed."""
    for max_tokens in (1, 3, 64):
        sampling = Sampling(max_tokens=max_tokens, temperature=1.0, seed=5, stop_token_ids=(stop_token_id,))
        runs = []
        for attempt in range(2 if repeatable else 1):
            tokens: list[int] = []
            deltas: list[Delta] = []
            async for delta in generator.generate(token_ids, sampling, f"contract-{max_tokens}-{attempt}"):
                assert len(delta.token_ids) == len(delta.logprobs), "each token has its log-probability"
                assert all(value <= 0 for value in delta.logprobs), "a log-probability is not positive"
                tokens += delta.token_ids
                deltas.append(delta)
            assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True], "one end"
            assert deltas[-1].finish in ("stop", "length", "abort"), deltas[-1].finish
            assert len(tokens) <= max_tokens, "max_tokens bounds the turn"
            assert (deltas[-1].finish == "stop") == (tokens[-1] == stop_token_id), "the stop token ends the turn"
            runs.append(tokens)
        assert not repeatable or runs[0] == runs[1], "the same seed samples the same tokens"
    sampling = Sampling(max_tokens=64, temperature=1.0, seed=5, stop_token_ids=(stop_token_id,))
    stream = generator.generate(token_ids, sampling, "contract-closed")
    assert isinstance(stream, AsyncGenerator), "it must be an async generator: closing it aborts"
    async with aclosing(stream) as deltas_to_close:
        await anext(deltas_to_close)


async def check_replica(
    replica: ReplicaPort, token_ids: Sequence[int], stop_token_id: int, weights: str, version: int
) -> None:
    """Checks a replica that has started and serves nobody else; it is alive afterwards.

    It is a generator, counts its requests in flight, ends an aborted request after the tokens that it has, names the
    weights that sampled each token, and scores tokens. weights: an address that its `update_weights` takes.
    """
    assert replica.usable_blocks > 0, "it has KV blocks"
    assert not replica.died.is_set()
    await check_generator(replica, token_ids, stop_token_id)
    endless = Sampling(max_tokens=800, temperature=1.0, seed=5, stop_token_ids=(), ignore_eos=True)
    async with aclosing(replica.generate(token_ids, endless, "contract-aborted")) as deltas:
        received = [await anext(deltas)]
        assert replica.in_flight == 1, "a request under way is in flight"
        await replica.abort("contract-aborted")
        received += [delta async for delta in deltas]
    assert received[-1].finish == "abort", f"a request that is aborted ends with {received[-1].finish!r}"
    assert replica.in_flight == 0, "a request that has ended is not in flight"
    await replica.abort("contract-aborted")  # does nothing for a request that has ended
    await replica.sleep()
    await replica.wake("weights")
    await replica.update_weights(weights, version)
    await replica.wake("kv_cache")
    short = Sampling(max_tokens=8, temperature=1.0, seed=5, stop_token_ids=(), ignore_eos=True)
    received = [delta async for delta in replica.generate(token_ids, short, "contract-updated")]
    assert {delta.version for delta in received} == {version}, "each delta tells the version"
    spans = [(number, begin, end) for number, begin, end in received[-1].spans if end > begin]
    assert {number for number, _, _ in spans} == {version}, f"the last delta tells each token's version, not {spans}"
    assert sum(end - begin for _, begin, end in spans) == 8, f"the spans must cover all 8 tokens: {spans}"
    scored = await replica.logprobs([token_ids])
    assert (scored.dtype, scored.shape) == (np.float32, (len(token_ids) - 1,)), "for each token but the first"
    assert (scored <= 0).all(), "a log-probability is not positive"
    assert not replica.died.is_set()


def check_balancer(make: Callable[[], Balancer], trajectories: int = 40, seed: int = 0) -> None:
    """Drives a policy through a whole run: replicas come, die and come back, trajectories take turns and leave early.

    It must place only waiting trajectories and move only running ones, on live replicas, and leave none waiting.
    """
    rng, policy = np.random.default_rng(seed), make()
    early = range(trajectories, trajectories + 3)
    for key in early:
        policy.request_turn(key, key // 4, 20, 20, 0.0)
    policy.trajectory_ended(early[1], 20, False)
    assert policy.decide(0.0) == [], "without a replica nothing is placed"
    up = {0, 1}
    for replica in up:
        policy.replica_up(replica, 64, 16)
    # "waiting", "tool" or the replica on which it runs
    state: dict[int, str | int] = {early[0]: "waiting", early[2]: "waiting"}
    tokens = dict.fromkeys(range(trajectories + 3), 20)
    done: set[int] = {early[1]}

    def decide(now: float) -> None:
        for place in policy.decide(now):
            assert isinstance(place, Place), f"decide gives a list of Place, not {place!r}"
            where = state.get(place.key)
            assert where == "waiting" or where in up, f"trajectory {place.key} is placed while {where}"
            assert where != place.replica, f"trajectory {place.key} is moved to where it runs"
            assert place.replica in up, f"trajectory {place.key} is placed on replica {place.replica}, which is not up"
            state[place.key] = place.replica

    for now in range(100 * trajectories):
        key = int(rng.integers(trajectories + 3))
        kind = rng.random()
        if kind < 0.02 and up:
            replica = int(rng.choice(sorted(up)))
            up.remove(replica)
            policy.replica_down(replica)
            for other in [other for other, where in state.items() if where == replica]:
                policy.request_turn(other, other // 4, 20, tokens[other], now)
                state[other] = "waiting"
        elif kind < 0.05 and len(up) < 2:
            replica = min({0, 1} - up)
            up.add(replica)
            policy.replica_up(replica, 64, 16)
        elif kind < 0.15 and up:
            replica = int(rng.choice(sorted(up)))
            policy.sample(replica, KvSample(int(rng.integers(30, 65)), 1, 0, 0), now)
        elif key in done:
            continue
        elif key not in state or state[key] == "tool":
            policy.request_turn(key, key // 4, 20, tokens[key], now)
            state[key] = "waiting"
        elif state[key] == "waiting":
            if rng.random() < 0.3:
                _leave(policy, state, done, key, tokens)
        elif rng.random() < 0.5:
            tokens[key] += int(rng.integers(1, 60))
            policy.turn_finished(key, tokens[key], now)
            state[key] = "tool"
        else:
            _leave(policy, state, done, key, tokens)
        decide(now)
    for replica in {0, 1} - up:
        policy.replica_up(replica, 64, 16)
    up = {0, 1}
    for _ in range(4 * trajectories):  # those that wait are placed as the others leave
        decide(1e6)
        for key in [key for key, where in state.items() if where != "waiting"]:
            _leave(policy, state, done, key, tokens)
    assert not state, f"these wait for ever: {sorted(state)}"
    policy.trajectory_ended(0, 10, True)  # idempotent
    assert policy.decide(2e6) == [], "nothing is left to place"


def _leave(policy: Balancer, state: dict[int, str | int], done: set[int], key: int, tokens: dict[int, int]) -> None:
    policy.trajectory_ended(key, tokens[key], True)
    del state[key]
    done.add(key)


async def _check_cancellable(operation: Callable[[], Any]) -> bool:
    """Checks that an operation in flight ends when it is cancelled, and does not swallow the cancellation.

    Returns whether it was in flight: one that awaits nothing has ended before it can be cancelled.
    """
    coroutine = operation()
    assert inspect.isawaitable(coroutine), "a call must be awaitable"
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_awaited(coroutine))
        await asyncio.sleep(0)
        if task.done():
            return False
        task.cancel()
    assert task.cancelled(), "the cancellation was swallowed"
    return True


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
