"""Trajectories that a journal holds go on from the end of their last turn."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from engine.balancing.kv_aware import KvAware
from engine.run.journal import Journal
from engine.tools.python_tool import PythonSessions
from engine.types import PublishedWeights
from sandbox.wire import ToolResult
from tests.support.fakes import Gate, ScriptedRunner, ScriptedSessions, a_prompt
from tests.support.node import ANSWER, END, Setup, call, check

FIRST, SECOND = call("x = 1") + END, call("x += 1") + call("print(x)") + END


async def cut_off(tmp_path, **options):
    """Two turns, and a third one that never ends: what a process that is killed leaves."""
    gate = Gate()
    node = Setup([FIRST], [SECOND], ["<answer>", gate, f"42</answer>{END}"], **options)
    async with node, asyncio.TaskGroup() as group:
        log = Journal(tmp_path).log(0, 0, 0)
        running = group.create_task(node.rollouts.run(a_prompt(), 0, 0, log=log))
        await gate.started.wait()
        running.cancel()


async def go_on(tmp_path, prepare=lambda node: None, **options):
    """(the trajectory, how many turns were generated for it)."""
    async with Setup([FIRST], [SECOND], [ANSWER], **options) as node:
        prepare(node)
        log = Journal(tmp_path).log(0, 0, 0)
        trajectory = await node.rollouts.run(a_prompt(), 0, 0, log=log)
        check(trajectory)
        return trajectory, len(node.replicas.made[0].requests)


def tokens(trajectory):
    return [getattr(trajectory, name).tolist() for name in ("token_ids_T", "sampled_T", "logprobs_T", "versions_T")]


async def test_it_goes_on_after_its_last_turn_and_ends_as_it_would_have(tmp_path):
    await cut_off(tmp_path)
    runner = ScriptedRunner()
    trajectory, turns = await go_on(tmp_path, runner=runner)
    wanted, all_turns = await go_on(tmp_path / "other")
    assert (turns, all_turns) == (1, 3)
    assert runner.calls == [], "what ran without state does not run again"
    assert tokens(trajectory) == tokens(wanted)
    assert (trajectory.text, trajectory.stop, trajectory.seed) == (wanted.text, wanted.stop, wanted.seed)
    responses = [[use.response for use in turn.tool_uses] for turn in trajectory.turns]
    assert responses == [["x = 1"], ["x += 1", "print(x)"], []]
    again, turns = await go_on(tmp_path)
    assert turns == 0, "it had ended, and had not been graded"
    assert tokens(again) == tokens(wanted)


async def test_it_began_with_its_first_turn_whenever_it_goes_on(tmp_path):
    await cut_off(tmp_path)

    def a_day_later(node):
        node.timeline.now.now += 86_400

    resumed, _ = await go_on(tmp_path, a_day_later)
    times = [resumed.started_at, *(turn.queued_at for turn in resumed.turns), resumed.finished_at]
    assert times == sorted(times)
    assert times[-1] - times[0] > 86_000


class Heard(KvAware):
    """Keeps (prompt_tokens, tokens) of each arrival."""

    def __init__(self):
        super().__init__(1000)
        self.heard = []

    def request_turn(self, key, group, prompt_tokens, tokens, now):
        self.heard.append((prompt_tokens, tokens))
        super().request_turn(key, group, prompt_tokens, tokens, now)


async def test_the_policy_hears_which_of_its_tokens_are_the_groups_prompt(tmp_path):
    await cut_off(tmp_path)
    node = Setup([FIRST], [SECOND], [ANSWER])
    node.fleet._balancer = policy = Heard()
    async with node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0, log=Journal(tmp_path).log(0, 0, 0))
    assert policy.heard == [(trajectory.turns[0].start, trajectory.turns[2].start)]


async def test_one_that_failed_by_our_fault_goes_on_from_before_it(tmp_path):
    runner = ScriptedRunner(lambda code: ToolResult(outcome="ok" if code == "x = 1" else "lost", stdout=code))
    async with Setup([FIRST], [SECOND], runner=runner) as node:
        log = Journal(tmp_path).log(0, 0, 0)
        failed = await node.rollouts.run(a_prompt(), 0, 0, log=log)
        assert failed.error is not None
        log.end(failed, 0)
    trajectory, turns = await go_on(tmp_path)
    assert (turns, trajectory.error) == (2, None)


@pytest.mark.parametrize("answers", ["alike", "otherwise"])
async def test_the_state_of_a_session_is_rebuilt_or_it_begins_again(tmp_path, answers):
    await cut_off(tmp_path, tools=[PythonSessions(ScriptedSessions())])
    other = (lambda code: ToolResult(outcome="ok", stdout="now", jailed=True)) if answers == "otherwise" else None
    sessions = ScriptedSessions(other)
    trajectory, turns = await go_on(tmp_path, tools=[PythonSessions(sessions)])
    calls = [[code for code, _, _ in session.calls] for session in sessions.made]
    if answers == "alike":
        assert calls == [["x = 1", "x += 1", "print(x)"]]
        assert (turns, trajectory.discarded_tokens) == (1, 0)
    else:
        assert calls == [["x = 1"], ["x = 1", "x += 1", "print(x)"]], "one that differs is enough"
        assert turns == 3
        assert trajectory.discarded_tokens == sum(turn.end - turn.start for turn in trajectory.turns[:2])
        assert [use.response for use in trajectory.tool_uses] == ["now"] * 3
    log = Journal(tmp_path).log(0, 0, 0)
    assert log.discarded == trajectory.discarded_tokens


async def test_one_that_may_not_go_on_under_new_weights_begins_again(tmp_path):
    await cut_off(tmp_path)
    weights = PublishedWeights("w", 1, np.zeros(3, np.float32))
    async with Setup([FIRST], [SECOND], [ANSWER]) as node:
        node.fleet.config = replace(node.fleet.config, on_update="restart")
        await node.fleet.update_weights(weights)
        trajectory = await node.rollouts.run(a_prompt(), 0, 0, log=Journal(tmp_path).log(0, 0, 0))
    assert trajectory.discarded_tokens > 0
    assert set(trajectory.versions_T[trajectory.sampled_T]) == {1}
