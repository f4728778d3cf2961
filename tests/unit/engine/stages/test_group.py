"""The life of a group: which rollouts form it, which are stopped, and where every sampled token is counted."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import first_error
from engine.pipeline.pipeline import Pipeline, Stage
from engine.ports import GraderUnavailable
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.stages.admit import AdmittedPrompt
from engine.stages.group import GroupConfig, GroupDecision, GroupProgress, groups
from engine.telemetry import metrics
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonSessions
from engine.types import Boundary, PublishedWeights
from tests.support.examples import examples
from tests.support.fakes import (
    Clock,
    Gate,
    Prompts,
    Replicas,
    ScriptedRunner,
    ScriptedSessions,
    SlowReward,
    a_prompt,
    a_trajectory,
    fleet_of,
    settle,
)
from tests.support.held import HeldRollouts, reward
from tests.support.node import ANSWER, CHAT, END, Setup, call

# The decisions, without an event loop


def decide(config, *ends):
    """The decision, and how many of the ends it took."""
    progress = GroupProgress(GroupConfig(**config))
    for number, (sample, value) in enumerate(ends, 1):
        if decision := progress.rollout_ended(sample, value):
            assert progress.decision is decision
            return decision.members, decision.drop, number
    return None


@pytest.mark.parametrize(
    ("config", "ends", "wanted"),
    [
        ({"samples": 2}, [(1, 0.0)], None),
        ({"samples": 2}, [(1, 0.0), (0, 0.0)], ((0, 1), None, 2)),
        ({"samples": 2}, [(1, None), (0, 1.0)], ((0, 1), None, 2)),
        ({"samples": 2}, [(1, None), (0, None)], ((0, 1), None, 2)),
        # more were started than are needed
        ({"samples": 2, "extra_samples": 2}, [(3, 0.0), (1, 1.0)], ((1, 3), None, 2)),
        ({"samples": 2, "extra_samples": 1}, [(2, None), (1, 1.0)], None),
        ({"samples": 2, "extra_samples": 1}, [(2, None), (1, 1.0), (0, 1.0)], ((0, 1), None, 3)),
        ({"samples": 2, "extra_samples": 1}, [(0, None), (2, 1.0), (1, None)], ((0, 2), None, 3)),
        ({"samples": 1, "extra_samples": 1}, [(1, None), (0, None)], ((1,), None, 2)),
        # stopped early
        ({"samples": 4, "stop_flat_after": 2}, [(3, 1.0), (0, 1.0)], ((0, 3), "flat", 2)),
        ({"samples": 4, "stop_flat_after": 2}, [(3, 1.0), (0, None)], None),
        ({"samples": 4, "stop_flat_after": 2}, [(3, 1.0), (0, None), (1, 1.0)], ((1, 3), "flat", 3)),
        ({"samples": 4, "stop_flat_after": 2}, [(3, 1.0), (0, 0.0), (1, 1.0)], None),
        ({"samples": 3, "stop_flat_after": 2}, [(2, 1.0), (0, 0.5), (1, 1.0)], ((0, 1, 2), None, 3)),
        ({"samples": 2, "stop_flat_after": 2}, [(0, 0.0), (1, 0.0)], ((0, 1), None, 2)),
    ],
)
def test_the_decision(config, ends, wanted):
    assert decide(config, *ends) == wanted


@given(
    samples=st.integers(1, 6),
    extra=st.integers(0, 3),
    stop=st.none() | st.integers(2, 6),
    rewards=st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=9, max_size=9),
    order=st.permutations(range(9)),
)
def test_every_order_of_ends_decides_a_group_once(samples, extra, stop, rewards, order):
    config = GroupConfig(
        samples=samples, extra_samples=extra, stop_flat_after=stop if stop and stop <= samples else None
    )
    progress, ended = GroupProgress(config), []
    for sample in order:
        if sample < config.started and progress.decision is None:
            ended.append(sample)
            progress.rollout_ended(sample, rewards[sample])
    decision = progress.decision
    assert decision is not None
    assert set(decision.members) <= set(ended)
    assert list(decision.members) == sorted(set(decision.members))
    good = [sample for sample in ended if rewards[sample] is not None]
    assert set(good) <= set(decision.members), "what was graded before the decision is in the group"
    if decision.drop is None:
        assert len(decision.members) == samples
        assert len(good) == samples or len(ended) == config.started
    else:
        assert (decision.drop, decision.waste_reason) == ("flat", "flat")
        assert len(good) == stop < samples
        assert len({rewards[sample] for sample in good}) == 1


def test_a_rollout_ends_once_and_before_the_verdict():
    progress = GroupProgress(GroupConfig(samples=3))
    progress.rollout_ended(0, 1.0)
    progress.rollout_ended(1, None)
    for sample in (0, 1, 3, -1):
        with pytest.raises(AssertionError):
            progress.rollout_ended(sample, 0.0)
    assert progress.rollout_ended(2, 0.0) == GroupDecision(members=(0, 1, 2))
    with pytest.raises(AssertionError):
        progress.rollout_ended(2, 0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"extra_samples": -1}, "extra_samples must be at least 0, got -1"),
        ({"refills": -2}, "refills must be at least 0, got -2"),
        ({"graders": 0}, "graders must be at least 1, got 0"),
        ({"stop_flat_after": 1}, "stop_flat_after must be from 2 to the 8 samples of a group, got 1"),
        ({"stop_flat_after": 9}, "stop_flat_after must be from 2 to the 8 samples of a group, got 9"),
    ],
)
def test_impossible_settings_name_the_field(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GroupConfig(**{"samples": 8, **wrong})


# The stage, on rollouts that a test holds


def select(group):
    """As algo.group.batch.select_and_score, keeping everything."""
    usable = tuple(index for index, member in enumerate(group.trajectories) if member.error is None)
    if len(usable) < 2:
        return replace(group, drop="error")
    if len({group.trajectories[index].reward for index in usable}) == 1:
        return replace(group, drop="flat")
    return replace(group, kept=usable)


class Leased:
    """The stage under way on `leases` leases: `async with Leased(...) as stage`; leaving it waits for its end."""

    def __init__(self, leases=1, *, rollouts=None, prompts=None, reward=reward, select=select, ticks=30, **config):
        self.rollouts = HeldRollouts() if rollouts is None else rollouts
        self.prompts = Prompts() if prompts is None else prompts
        self.timeline = Timeline(Clock(tick=0.001))
        self.out = []
        self.leases, self.ticks = leases, ticks
        self.parts = reward, select, self.prompts, GroupConfig(**config), self.timeline

    async def __aenter__(self):
        stage = groups(self.rollouts, *self.parts)
        tickets = [AdmittedPrompt(prompt=next(self.prompts), lease=lease) for lease in range(self.leases)]

        async def admit(inbox, outbox):
            for admitted in tickets:
                await outbox.put(admitted)

        async def collect(inbox, outbox):
            async for group in inbox:
                self.out.append(group)

        stages = [("admit", admit, 1), ("groups", stage, self.leases), ("collect", collect, 1)]
        pipeline = Pipeline([Stage(name=name, run=run, workers=workers) for name, run, workers in stages])
        self.scope = asyncio.TaskGroup()
        await self.scope.__aenter__()
        self.running = self.scope.create_task(pipeline.run(), name="pipeline")
        await settle(self.ticks)
        return self

    async def __aexit__(self, *error):
        await self.scope.__aexit__(*error)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("rollout-")]

    async def end(self, sample, value, tokens=0):
        """The held rollout of a sample says so many tokens more, and ends."""
        [rollout] = [rollout for rollout in self.rollouts.held if rollout.sample == sample]
        rollout.say(tokens)
        rollout.end(value)
        await settle()


async def test_a_group_is_what_its_rollouts_gave_in_sample_order():
    async with Leased(samples=3) as stage:
        assert [rollout.sample for rollout in stage.rollouts.held] == [0, 1, 2], "all start at once"
        await stage.end(2, 0.0, 5)
        await stage.end(0, 1.0, 3)
        assert stage.out == []
        await stage.end(1, None, 4)
    [group] = stage.out
    assert [(member.sample, member.reward, member.sampled_tokens) for member in group.trajectories] == [
        (0, 1.0, 3),
        (1, None, 4),
        (2, 0.0, 5),
    ]
    assert (group.lease, group.kept, group.drop, group.waste, group.refills) == (0, (0, 2), None, {}, 0)


async def test_the_first_to_finish_form_the_group_and_the_others_are_surplus():
    async with Leased(samples=2, extra_samples=2) as stage:
        for number, rollout in enumerate(stage.rollouts.held):
            rollout.say(10 + number)
        await stage.end(3, 0.0)
        await stage.end(1, 1.0)
        assert [rollout.sample for rollout in stage.rollouts.cancelled] == [0, 2]
    [group] = stage.out
    assert [member.sample for member in group.trajectories] == [1, 3]
    assert group.waste == {"surplus": 10 + 12}


async def test_a_failed_rollout_is_made_up_by_an_extra_one_and_its_tokens_are_counted():
    async with Leased(samples=2, extra_samples=1) as stage:
        await stage.end(0, None, 7)
        await stage.end(1, 1.0, 1)
        await stage.end(2, 0.0, 2)
    [group] = stage.out
    assert [member.sample for member in group.trajectories] == [1, 2]
    assert (group.kept, group.waste) == ((0, 1), {"error": 7})


async def test_a_group_that_looks_flat_is_stopped_and_not_selected():
    def never(group):
        raise AssertionError("selected")

    async with Leased(samples=4, stop_flat_after=2, select=never) as stage:
        for rollout in stage.rollouts.held:
            rollout.say(1)
        await stage.end(0, 1.0, 4)
        await stage.end(1, None, 1)
        await stage.end(2, 1.0, 9)
        assert [rollout.sample for rollout in stage.rollouts.cancelled] == [3]
    [group] = stage.out
    assert (group.drop, group.kept, group.waste) == ("flat", (), {"flat": 1, "error": 2})
    assert [member.sample for member in group.trajectories] == [0, 2]
    found = metrics.step([group], 0)
    assert (found["waste/flat_tokens"], found["waste/error_tokens"], found["tokens/generated"]) == (16, 2, 18)


async def test_tokens_that_were_sampled_anew_are_counted():
    async with Leased(samples=2) as stage:
        first, _ = stage.rollouts.held
        first.say(8)
        first.lose()
        await stage.end(0, 1.0, 5)
        await stage.end(1, 0.0, 3)
    [group] = stage.out
    assert [member.sampled_tokens for member in group.trajectories] == [5, 3]
    assert group.waste == {"superseded": 8}


async def test_a_dropped_group_is_refilled_by_the_next_prompt():
    async with Leased(samples=2, refills=2) as stage:
        for value in (1.0, None):  # flat, then failed
            await stage.end(0, value, 3)
            await stage.end(1, value, 4)
        await stage.end(0, 1.0, 5)
        await stage.end(1, 0.0, 6)
    [group] = stage.out
    assert (group.prompt.id, group.lease, group.kept, group.drop) == ("p2", 0, (0, 1), None)
    assert {member.prompt.id for member in group.trajectories} == {"p2"}
    assert (group.waste, group.refills, stage.prompts.taken) == ({"flat": 7, "error": 7}, 2, 3)
    assert len({rollout.group for rollout in stage.rollouts.started}) == 3, "other siblings than those given up"
    instants = [instant.name for instant in stage.timeline.drain().instants]
    assert instants == ["flat: refilled", "error: refilled"]


async def test_after_the_last_refill_a_group_is_dropped():
    async with Leased(samples=2, refills=1) as stage:
        for _ in range(2):
            await stage.end(0, 0.0, 3)
            await stage.end(1, 0.0, 4)
    [group] = stage.out
    assert (group.prompt.id, group.drop, group.waste, group.refills) == ("p1", "flat", {"flat": 7}, 1)
    assert metrics.step([group], 0)["tokens/generated"] == 14


async def test_without_another_prompt_a_group_is_dropped():
    async with Leased(samples=2, refills=3, prompts=iter([a_prompt(0), a_prompt(1)])) as stage:
        for _ in range(2):
            await stage.end(0, 0.0, 3)
            await stage.end(1, 0.0, 4)
    [group] = stage.out
    assert (group.prompt.id, group.drop, group.refills) == ("p1", "flat", 1)


async def test_whatever_selection_drops_is_refilled():
    def hard_only(group):
        return replace(group, drop="easy") if group.rewards_G.mean() > 0.4 else replace(group, kept=(0, 1))

    async with Leased(samples=2, refills=1, select=hard_only) as stage:
        await stage.end(0, 1.0, 3)
        await stage.end(1, 0.0, 4)
        await stage.end(0, 0.5, 1)
        await stage.end(1, 0.0, 2)
    [group] = stage.out
    assert (group.drop, group.waste) == (None, {"easy": 7})


async def test_leases_do_not_wait_for_each_other():
    async with Leased(2, samples=1, select=drop_nothing) as stage:
        first, second = stage.rollouts.held
        assert [first.prompt.id, second.prompt.id] == ["p0", "p1"]
        second.end()
        await settle()
        assert [group.lease for group in stage.out] == [1]
        first.end()
    assert [group.lease for group in stage.out] == [1, 0]


async def test_so_many_are_graded_at_once():
    slow = SlowReward(reward)
    async with Leased(samples=5, graders=2, reward=slow) as stage:
        for sample in range(5):
            await stage.end(sample, float(sample))
        assert slow.running == slow.most == 2
        slow.release()
    assert slow.most == 2
    assert len(stage.out[0].trajectories) == 5


async def test_a_rollout_that_waits_for_its_grade_is_cancelled_too():
    gates = {sample: Gate() for sample in range(3)}

    async def slow(trajectory):
        await gates[trajectory.sample].passed()
        return await reward(trajectory)

    async with Leased(samples=1, extra_samples=2, graders=2, reward=slow, select=drop_nothing) as stage:
        for sample in range(3):
            await stage.end(sample, 1.0, 10**sample)
        gates[1].release()
    [group] = stage.out
    assert [member.sample for member in group.trajectories] == [1]
    assert group.waste == {"surplus": 101}
    assert stage.timeline.idle._flags["reward"] == 0
    lanes = stage.timeline.lanes["reward"]
    assert len(lanes._free) == lanes._next


async def test_ends_in_the_same_tick_decide_once():
    async with Leased(samples=2, extra_samples=2) as stage:
        for rollout in list(stage.rollouts.held):
            rollout.say(10**rollout.sample)
            rollout.end(float(rollout.sample % 2))
    [group] = stage.out
    assert [member.sample for member in group.trajectories] == [0, 1]
    assert group.waste == {"surplus": 1100}


async def test_a_rollout_that_ends_in_spite_of_its_cancellation_is_surplus():
    class Stubborn(HeldRollouts):
        async def run(self, prompt, sample, group, *, tally, log):
            try:
                return await super().run(prompt, sample, group, tally=tally, log=log)
            except asyncio.CancelledError:
                self.cancelled[-1].future = asyncio.get_running_loop().create_future()
                self.cancelled[-1].end(1.0)
                return self.cancelled[-1].future.result()

    async with Leased(samples=2, extra_samples=1, rollouts=Stubborn()) as stage:
        stage.rollouts.held[1].say(5)
        await stage.end(0, 0.0, 1)
        await stage.end(2, 1.0, 1)
    [group] = stage.out
    assert [member.sample for member in group.trajectories] == [0, 2]
    assert group.waste == {"surplus": 5}


async def test_a_grader_that_is_gone_is_a_failed_rollout():
    async def gone(trajectory):
        raise GraderUnavailable("the verifier died")

    async with Leased(samples=2, reward=gone) as stage:
        await stage.end(0, 1.0, 3)
        await stage.end(1, 1.0, 3)
    [group] = stage.out
    assert {member.error.boundary for member in group.trajectories} == {Boundary.REWARD}
    assert group.drop == "error"


async def test_a_bug_ends_the_run_and_every_rollout():
    async def broken(trajectory):
        raise LookupError("a bug")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with Leased(2, samples=2, reward=broken) as stage:
            stage.rollouts.held[0].end(1.0)
    assert repr(first_error(caught.value)) == "LookupError('a bug')"
    assert stage.rollouts.held == []
    assert len(stage.rollouts.cancelled) == 3


async def test_a_run_that_is_cancelled_leaves_no_rollout():
    async with Leased(3, samples=2, extra_samples=1, refills=1) as stage:
        assert len(stage.rollouts.held) == 9
        stage.running.cancel()
    assert stage.rollouts.held == stage.out == []


events = st.tuples(st.integers(0, 40), st.integers(0, 5), st.sampled_from([None, 0.0, 0.0, 1.0, 1.0, "say", "lose"]))


@examples(150)
@given(
    leases=st.integers(1, 3),
    samples=st.integers(1, 4),
    extra=st.integers(0, 2),
    stop=st.none() | st.integers(2, 4),
    refills=st.integers(0, 2),
    limit=st.none() | st.integers(0, 4),
    script=st.lists(st.lists(events, min_size=1, max_size=4), max_size=60),
)
def test_every_lease_gives_one_group_and_every_token_is_counted(leases, samples, extra, stop, refills, limit, script):
    """Several rollouts may end in one tick; when the script is over the rest end well."""
    stop = stop if stop and stop <= samples else None
    prompts = Prompts() if limit is None else iter([a_prompt(number) for number in range(leases + limit)])
    config = {"samples": samples, "extra_samples": extra, "stop_flat_after": stop, "refills": refills}

    async def play():
        async with Leased(leases, prompts=prompts, **config) as stage:
            script.reverse()
            while not stage.running.done():
                held = [rollout for rollout in stage.rollouts.held if not rollout.future.done()]
                for number, tokens, what in script.pop() if script else [(0, 1, 1.0)]:
                    rollout = held[number % len(held)] if held else None
                    if rollout is None or rollout.future.done():
                        continue
                    rollout.say(tokens)
                    if what == "lose":
                        rollout.lose()
                    elif what != "say":
                        rollout.end(what)
                await settle()
                decided = {group.lease for group in stage.out}
                assert len(decided) == len(stage.out)
                mine = [rollout for rollout in stage.rollouts.held if rollout.prompt in done_prompts(stage)]
                assert mine == [], "a rollout of a group that is out still runs"
        return stage

    def done_prompts(stage):
        return [group.prompt for group in stage.out]

    stage = asyncio.run(play())
    assert sorted(group.lease for group in stage.out) == list(range(leases))
    for group in stage.out:
        assert len(group.trajectories) == samples or group.drop == "flat"
        assert group.refills <= refills
        assert (group.drop is None) == bool(group.kept)
        assert min(group.waste.values(), default=1) > 0
    found = metrics.step(stage.out, 0)
    waste = sum(value for name, value in found.items() if name.startswith("waste/"))
    assert found["tokens/generated"] == stage.rollouts.tokens_sampled == found["tokens/trained"] + waste
    assert found["groups/refilled"] == len({rollout.prompt.id for rollout in stage.rollouts.started}) - leases


# The stage, on real rollouts and a scripted fleet: what is cancelled leaves nothing behind, wherever it was


class Racing:
    """Sample 0 ends when the test says so; the others are real. The node checks at its end that nothing is left."""

    def __init__(self, node):
        self.node = node
        self.finish = asyncio.Event()

    async def run(self, prompt, sample, group, *, tally, log):
        if sample:
            return await self.node.rollouts.run(prompt, sample, group, tally=tally)
        await self.finish.wait()
        return a_trajectory(0, prompt=prompt, sampled=0)


async def one(trajectory):
    return 1.0


def drop_nothing(group):
    return group


def passable():
    """A place in a script where the loop turns a few times."""
    gate = Gate()
    gate.release()
    return gate


def node(*rest, **options):
    """A node where a turn takes a while, with a tool call in it."""
    pieces = [piece for word in ("I ", "use ", "python. ", call("print(1)")) for piece in (word, passable())]
    return lambda: Setup([*pieces, *rest, END], [ANSWER], **options)


def crowded(replica):
    """One trajectory fits, the other waits for a place."""
    replica.usable_blocks = 8


NODES = {
    "nowhere for long": (node(), 2),
    "in a tool call": (node(runner=ScriptedRunner(hold=True)), 2),
    "talking beside a tool call": (node(Gate(), runner=ScriptedRunner(hold=True)), 2),
    "in a session": (node(tools=[PythonSessions(ScriptedSessions(hold=True))]), 2),
    "waiting for a place": (node(Gate(), prepare=crowded), 1),
}


@pytest.mark.parametrize("where", NODES)
async def test_what_is_cancelled_is_gone_and_counted_wherever_it_was(where):
    make, generating = NODES[where]
    surplus, aborted = set(), set()
    for ticks in range(0, 60, 3):
        async with make() as node:
            rollouts, config = Racing(node), {"samples": 1, "extra_samples": 2}
            async with Leased(rollouts=rollouts, reward=one, select=drop_nothing, ticks=ticks, **config) as stage:
                rollouts.finish.set()
        [group] = stage.out
        generated = sum(member.sampled_tokens for member in group.trajectories) + sum(group.waste.values())
        assert generated == node.rollouts.tokens_sampled
        surplus.add(group.waste.get("surplus", 0))
        [replica] = node.replicas.made
        assert replica.in_flight == 0
        aborted.add(len(replica.aborted))
    assert len(surplus) >= 5
    assert aborted == {0, generating}


@pytest.mark.parametrize("on_update", ["continue", "restart"])
async def test_tokens_add_up_on_real_rollouts_while_replicas_die_and_weights_change(on_update):
    async def parity(trajectory):
        return float(trajectory.sampled_tokens % 2)

    timeline, replicas = Timeline(Clock(tick=0.001)), Replicas()
    config = {"samples": 4, "extra_samples": 2, "stop_flat_after": 3, "refills": 2}
    async with fleet_of(replicas, 2, restarts=5, timeline=timeline, on_update=on_update) as fleet:
        rollouts = Rollouts(RolloutConfig(max_tokens=60), CHAT, fleet, [], timeline, seed=1)
        async with Leased(12, rollouts=rollouts, reward=parity, ticks=0, **config) as stage:
            for version in range(1, 6):
                await settle(20)
                next(replica for replica in replicas.made if not replica.died.is_set()).die()
                await settle(20)
                await fleet.update_weights(PublishedWeights("weights", version, np.zeros(3, np.float32)))
        assert fleet.deaths > 3
    assert sorted(group.lease for group in stage.out) == list(range(12))
    found = metrics.step(stage.out, 5)
    assert found["tokens/generated"] == rollouts.tokens_sampled
    assert min(found[f"waste/{reason}_tokens"] for reason in ("surplus", "flat")) > 0
    assert found["groups/refilled"] > 0
    assert found["rollout/trajectories_failed"] == 0
    assert found["rollout/staleness_max"] > 0
    assert (found.get("waste/superseded_tokens", 0) > 0) == (on_update == "restart")
