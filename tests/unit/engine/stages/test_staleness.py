"""Staleness over random schedules: real stages, leases, groups, rollouts and fleet; only engines and learner are fakes.

The fake engine's model says the number of its weights with every token, so a trajectory shows which weights really
sampled it, whatever the records say. Every token, tool call, training step and weight load waits for the schedule.
"""

import asyncio
import random
import zlib
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from algo.group.batch import make_batch, select_and_score
from algo.group.selection import KeepAll
from engine.balancing.kv_aware import KvAware
from engine.learner.messages import Trained
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Pipeline, Stage
from engine.ports import ToolReply
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.stages.admit import admit
from engine.stages.batch import batch_groups
from engine.stages.group import GroupConfig, groups
from engine.stages.train import TrainStage
from engine.telemetry.timeline import Timeline
from tests.support.examples import examples
from tests.support.fakes import Clock, ScriptedReplica, a_prompt, fleet_of, settle
from tests.support.node import CHAT, call

FIRST, KINDS = 350, 8  # token FIRST + KINDS * version + kind, below 400: none of them is in a call
CALL = CHAT._encode(call("1"))
CLOSE, STOP = CALL[-1], CHAT.end_of_turn
PROMPT = len(CHAT.prompt_ids(a_prompt(0, "problem 0").messages))
REPLICAS, WORDS = 2, 2  # version tokens per turn


class Schedule:
    """Everything that takes time waits here under the name of what it is; the test lets one after the other go on."""

    def __init__(self):
        self.waiting = []

    async def turn(self, *name):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((name, future))
        await future

    def allow(self, choice, may=lambda name: True):
        """One of those that may; False when there is none."""
        self.waiting = [entry for entry in self.waiting if not entry[1].done()]
        allowed = [entry for entry in self.waiting if may(entry[0])]
        if allowed:
            allowed[choice % len(allowed)][1].set_result(None)
        return bool(allowed)


def said_version(token):
    return (token - FIRST) // KINDS if FIRST <= token < 400 else None


class Engine(ScriptedReplica):
    """Two turns: WORDS tokens that say the version and a call; then as many and the end."""

    def __init__(self, schedule, *arguments):
        super().__init__(*arguments)
        self.schedule, self.engine_version = schedule, 0

    async def _tokens(self, token_ids, sampling, aborted):
        number = problem(token_ids)
        tail = token_ids[PROMPT:]
        said = sum(said_version(token) is not None for token in tail) - (WORDS if STOP in tail else 0)
        for _ in range(said, WORDS):
            if await self._aborted(self.schedule.turn("token", number), aborted):
                return
            kind = zlib.crc32(repr((token_ids, self.engine_version)).encode()) % KINDS
            token_ids.append(FIRST + KINDS * self.engine_version + kind)
            yield token_ids[-1], False
        rest = [STOP] if STOP in tail else [*CALL, STOP]
        for token in rest[sum(token in CALL for token in tail) if STOP not in tail else 0 :]:
            yield token, token == STOP

    async def update_weights(self, path, version):
        await self.schedule.turn("load", self.index)
        self.engine_version = version
        await self.schedule.turn("loaded", self.index)  # until then the node labels tokens with the version before
        await super().update_weights(path, version)


def problem(token_ids):
    return int(CHAT.decode(token_ids[:PROMPT]).rpartition("problem ")[2].split("<")[0])


@dataclass
class Tool:
    schedule: Schedule
    name: str = "python"

    async def __call__(self, arguments):
        await self.schedule.turn("tool")
        return ToolReply(outcome="ok", text="12")


class Learner:
    """In place of the learner's process: remembers the groups of the newest step."""

    def __init__(self, schedule):
        self.schedule = schedule

    def join(self, step, groups):
        self.groups = groups
        return make_batch(step, groups)

    async def train(self, batch, version):
        await self.schedule.turn("train")
        assert batch.step == version
        trained = Trained(step=version, version=version, weights="", metrics={})
        return trained, np.zeros(0, np.float32)


async def reward(trajectory):
    return float(trajectory.token_ids_T[-2] % 2)


@dataclass(frozen=True)
class Plan:
    steps: int
    groups_per_step: int
    samples: int
    max_staleness: int
    on_update: str = "continue"


async def train(plan, seed, may=lambda name, live: True):
    """Runs the pipeline to its end. Returns the (metrics, groups) of each step.

    may: whether what waits under a name may go on while weights `live` are the newest that are live everywhere.
    """
    schedule, timeline, trained = Schedule(), Timeline(Clock(tick=0.001)), []
    leases = Leases(plan.groups_per_step, plan.max_staleness)
    rng = random.Random(seed)
    make = lambda index, core, on_step: Engine(schedule, index, on_step)  # noqa: E731
    prompts = (a_prompt(number, f"problem {number % 10}") for number in range(10_000))
    fleet_options = {"balancer": KvAware(max_tokens=1000), "timeline": timeline, "on_update": plan.on_update}
    async with fleet_of(make, REPLICAS, **fleet_options) as fleet:
        rollouts = Rollouts(RolloutConfig(max_tokens=400), CHAT, fleet, [Tool(schedule)], timeline, seed=3)
        select = select_and_score(KeepAll(), seed=3)
        made = groups(rollouts, reward, select, prompts, GroupConfig(samples=plan.samples), timeline)
        learner = Learner(schedule)

        async def stepped(step, metrics):
            trained.append((metrics, learner.groups))

        learn = TrainStage(
            learner=learner,
            fleet=fleet,
            leases=leases,
            make_batch=learner.join,
            on_trained=stepped,
            stats=lambda: (),
            timeline=timeline,
        )
        pipeline = Pipeline(
            [
                Stage(name="admit", run=admit(prompts, leases, plan.steps)),
                Stage(name="groups", run=made, workers=leases.capacity),
                Stage(name="batch", run=batch_groups(leases)),
                Stage(name="learn", run=learn),
            ]
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pipeline.run(), name="pipeline")
            while not running.done():
                await settle(15)
                schedule.allow(rng.randrange(1000), lambda name: may(name, len(trained)))
    return trained


def check(plan, trained):
    """Nothing lost or twice, records true, no token older than the bound, and the metric says so."""
    leases = [group.lease for _, batch in trained for group in batch]
    assert leases == list(range(plan.steps * plan.groups_per_step))
    for step, (metrics, batch) in enumerate(trained):  # the step trains on weights of that number
        ages = []
        for group in batch:
            assert group.prompt.id == f"p{group.lease}"
            assert [member.sample for member in group.trajectories] == list(range(plan.samples))
            for member in group.trajectories:
                assert member.error is None
                assert len(member.turns) == 2
                told = [said_version(token) for token in member.token_ids_T[member.sampled_T].tolist()]
                recorded = member.versions_T[member.sampled_T].tolist()
                for version_recorded, version_said in zip(recorded, told, strict=True):
                    assert version_said in (None, version_recorded), "recorded is what sampled the token"
                assert recorded == sorted(recorded)
                assert step - recorded[0] <= plan.max_staleness
                ages += [step - recorded[0]] if member.sample in group.kept else []
        assert max(ages, default=0) <= plan.max_staleness
        said = (metrics.get("rollout/staleness_max"), metrics.get("rollout/staleness_mean"))
        assert said == ((max(ages), sum(ages) / len(ages)) if ages else (None, None))


plans = st.builds(
    Plan,
    steps=st.integers(1, 4),
    groups_per_step=st.integers(1, 2),
    samples=st.integers(1, 2),
    max_staleness=st.integers(0, 3),
    on_update=st.sampled_from(["continue", "restart"]),
)


@examples(25)
@given(plans, st.integers(0, 2**32))
def test_no_trained_token_is_older_than_the_bound_and_its_recorded_version_is_true(plan, seed):
    check(plan, asyncio.run(train(plan, seed)))


def test_the_schedules_do_reach_the_bound_and_updates_within_a_turn():
    """Else the property above would hold for want of trouble."""
    plan = Plan(steps=4, groups_per_step=2, samples=2, max_staleness=2)
    oldest, within = 0, 0
    for seed in range(8):
        for metrics, batch in asyncio.run(train(plan, seed)):
            oldest = max(oldest, metrics.get("rollout/staleness_max", 0))
            for member in (member for group in batch for member in group.trajectories):
                within += any(len(set(member.versions_T[turn.start : turn.end])) > 1 for turn in member.turns)
    assert oldest == 2
    assert within > 0


@examples(10)
@given(st.integers(1, 3), st.integers(0, 2**32))
def test_where_nothing_is_stale_the_bound_changes_no_bit(max_staleness, seed):
    """Rollouts admitted early sample nothing until their step's weights are live: the same batches as strictly."""
    steps, size = 3, 2

    def may(name, live):
        return name[0] != "token" or name[1] // size <= live

    def batches(bound, seed):
        plan = Plan(steps=steps, groups_per_step=size, samples=2, max_staleness=bound)
        trained = asyncio.run(train(plan, seed, may))
        check(plan, trained)
        return [make_batch(step, batch).arrays() for step, (_, batch) in enumerate(trained)]

    for strict, loose in zip(batches(0, seed), batches(max_staleness, seed + 1), strict=True):
        assert strict.keys() == loose.keys()
        for name, array in strict.items():
            np.testing.assert_array_equal(array, loose[name], name)
