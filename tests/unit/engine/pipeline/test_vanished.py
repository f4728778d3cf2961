"""A stage that swallows a group ends the run at once, by name; one that holds groups on purpose is left alone."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Pipeline, Stage
from engine.pipeline.whereabouts import GroupVanished, StageState, is_dead
from engine.stages.admit import AdmittedPrompt, admit
from engine.stages.batch import batch_groups
from engine.types import Group, Prompt
from tests.support.fakes import Gate

B, STEPS = 4, 3
ADMIT = StageState(name="admit", queue=0, waits=False, holds=0)


def at(name="mine", *, queue=0, waits=True, holds=0, may_act=False):
    return StageState(name=name, queue=queue, waits=waits, holds=holds, may_act=may_act)


@pytest.mark.parametrize(
    ("stages", "dead"),
    [
        ([at(holds=1), at("learn")], True),
        ([at(), at("learn")], True),  # the group is nowhere: somebody released it twice, say
        ([at("groups", waits=False, holds=1), at(holds=1)], False),  # a rollout is under way
        ([at(holds=1, queue=1), at("learn")], False),  # it is about to take another one
        ([at(holds=1, may_act=True), at("learn")], False),  # it waits for a service, in a task of its own
        ([at("groups", may_act=True), at(holds=1)], True),  # who holds nothing has nothing to put out
        ([at(holds=1), at("learn", waits=False)], False),  # the learner trains
    ],
)
def test_which_states_are_dead(stages, dead):
    assert is_dead([ADMIT, *stages], waits_for_lease=True) is dead
    assert not is_dead([ADMIT, *stages], waits_for_lease=False)


states = st.builds(
    StageState,
    name=st.just("s"),
    queue=st.integers(0, 2),
    waits=st.booleans(),
    holds=st.integers(0, 2),
    may_act=st.booleans(),
)


@given(st.lists(states, min_size=1, max_size=5), st.integers(0, 4))
def test_a_stage_that_can_act_makes_any_state_a_living_one(stages, index):
    index %= len(stages)
    for change in ({"queue": 1}, {"waits": False}, {"holds": 1, "may_act": True}):
        living = [*stages]
        living[index] = replace(living[index], **change)
        assert not is_dead([ADMIT, *living], waits_for_lease=True)


async def prompts_to_groups(inbox, outbox):
    async for admitted in inbox:
        await asyncio.sleep(0)
        await outbox.put(Group(prompt=admitted.prompt, trajectories=(), lease=admitted.lease, drop="flat"))


async def run(*own, steps=STEPS):
    """The steps that were trained, with the user's stages between groups and batch."""
    leases, trained = Leases(B, 0), []
    prompts = (Prompt(id=f"p{number}", messages=(), answer="") for number in range(1000))

    async def learn(inbox, outbox):
        async for groups in inbox:
            trained.append([group.prompt.id for group in groups])
            for group in groups:
                leases.release(group.lease)

    stages = [
        Stage(name="admit", run=admit(prompts, leases, steps)),
        Stage(name="groups", run=prompts_to_groups, workers=2, takes=AdmittedPrompt),
        *own,
        Stage(name="batch", run=batch_groups(leases), takes=Group, collects=True),
        Stage(name="learn", run=learn, takes=list),
    ]
    pipeline = Pipeline(stages, leases=leases)
    try:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(pipeline.watch(look_s=0.001))
            await pipeline.run()
            watching.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return len(trained)


def swallows(number):
    async def mine(inbox, outbox):
        async for group in inbox:
            if group.prompt.id != f"p{number}":
                await outbox.put(group)

    return mine


async def swallows_with_a_helper(inbox, outbox):
    async def step(group):
        if group.prompt.id != "p5":
            await outbox.put(group)

    async for group in inbox:
        await asyncio.create_task(step(group))


async def collects_five(inbox, outbox):
    """A step has four."""
    held = []
    async for group in inbox:
        held.append(group)
        if len(held) == 5:
            for each in held:
                await outbox.put(each)
            held.clear()


async def swallows_all(inbox, outbox):
    async for _ in inbox:
        pass


@pytest.mark.parametrize(
    ("mine", "prompt"),
    [
        (swallows(5), "p5"),
        (swallows(0), "p0"),
        (swallows(B * STEPS - 1), "p11"),  # the last one: nobody waits for a lease any more
        (swallows_with_a_helper, "p5"),
        (collects_five, "p0"),
        (swallows_all, "p0"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
async def test_who_swallows_a_group_is_named_at_once(mine, prompt, workers):
    with pytest.raises(GroupVanished) as failure:
        await run(Stage(name="kind", run=forwards), Stage(name="mine", run=mine, workers=workers))
    message = str(failure.value)
    assert "stage mine took" in message
    assert prompt in message
    assert "kind" not in message
    assert "batch" not in message


async def test_all_groups_of_the_last_step_are_missed_too():
    async def mine(inbox, outbox):
        async for group in inbox:
            if group.lease < B * (STEPS - 1):
                await outbox.put(group)

    with pytest.raises(GroupVanished, match="stage mine took 12 groups and put out 8"):
        await run(Stage(name="mine", run=mine))


async def forwards(inbox, outbox):
    async for group in inbox:
        await outbox.put(group)


def waits_in_tasks(service):
    async def mine(inbox, outbox):
        async def ask(group):
            await service()
            await outbox.put(group)

        async with asyncio.TaskGroup() as tasks:
            async for group in inbox:
                tasks.create_task(ask(group))

    return mine


def flushes_beside(service):
    async def mine(inbox, outbox):
        held = []

        async def flush():
            while True:
                await service()
                while held:
                    await outbox.put(held.pop(0))

        flushing = asyncio.create_task(flush())
        async for group in inbox:
            held.append(group)
        while held:
            await outbox.put(held.pop(0))
        flushing.cancel()
        with suppress(asyncio.CancelledError):
            await flushing

    return mine


async def next_or_none(inbox, seconds):
    try:
        async with asyncio.timeout(seconds):
            return await anext(aiter(inbox))
    except TimeoutError:
        return None


async def collects_for_a_time(inbox, outbox):
    held = []
    with suppress(StopAsyncIteration):
        while True:
            group = await next_or_none(inbox, 0.05)
            if group is not None:
                held.append(group)
            if group is None or len(held) == 7:
                while held:
                    await outbox.put(held.pop(0))
    while held:
        await outbox.put(held.pop(0))


async def collects_with_wait_for(inbox, outbox):
    held, over = [], False
    while not over:
        try:
            held.append(await asyncio.wait_for(anext(aiter(inbox)), 0.05))
        except TimeoutError:
            while held:
                await outbox.put(held.pop(0))
        except StopAsyncIteration:
            over = True
    while held:
        await outbox.put(held.pop(0))


async def in_time(inbox, seconds):
    """A generator of a helper's own: lists of what came together."""
    held, over = [], False
    while not over:
        try:
            async with asyncio.timeout(seconds):
                held.append(await anext(aiter(inbox)))
        except TimeoutError:
            yield held
            held = []
        except StopAsyncIteration:
            over = True
    yield held


async def collects_in_a_generator(inbox, outbox):
    async for groups in in_time(inbox, 0.05):
        for group in groups:
            await outbox.put(group)


async def wakes_itself(inbox, outbox):
    """With a timer of the loop in place of a timeout."""
    loop, held = asyncio.get_running_loop(), []

    def put_all():
        sending.append(asyncio.create_task(send()))

    async def send():
        while held:
            await outbox.put(held.pop(0))

    sending = []
    async for group in inbox:
        held.append(group)
        timer = loop.call_later(0.05, put_all)
    timer.cancel()
    await send()


HOLD = {
    "timeout": collects_for_a_time,
    "wait_for": collects_with_wait_for,
    "generator": collects_in_a_generator,
    "timer": wakes_itself,
    "tasks": waits_in_tasks(lambda: asyncio.sleep(0.05)),
    "beside": flushes_beside(lambda: asyncio.sleep(0.05)),
}


@pytest.mark.parametrize("name", HOLD)
def test_who_holds_groups_for_a_while_is_left_alone(name):
    for loop_factory in (None, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            assert runner.run(run(Stage(name="mine", run=HOLD[name]))) == STEPS


async def test_who_waits_for_a_service_is_left_alone():
    gate = Gate()

    async def service():
        await gate.passed()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(Stage(name="mine", run=waits_in_tasks(service))))
        await gate.started.wait()
        for _ in range(20):  # looks of the watch
            await asyncio.sleep(0.001)
        assert not running.done()
        gate.release()
    assert running.result() == STEPS


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda group: group, "stage mine put out the group of prompt p0 .* a second time"),
        (lambda group: "text", "stage mine put out 'text' .str., and stage batch takes a Group"),
        (lambda group: None, "stage mine put out None"),
        (lambda group: replace(group, lease=99), "stage mine put out the group of prompt p0 .lease 99."),
    ],
)
async def test_what_a_stage_may_not_put_out(again, message):
    async def mine(inbox, outbox):
        async for group in inbox:
            await outbox.put(group)
            await outbox.put(again(group))

    with pytest.raises(ValueError, match=message):
        await run(Stage(name="mine", run=mine))


BEHAVIOURS = {"forwards": forwards, "timeout": collects_for_a_time, "tasks": HOLD["tasks"], "five": collects_five}


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from(["forwards", "tasks", "swallows"]), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, B * STEPS - 1),
)
def test_a_run_ends_with_all_its_steps_or_says_who_swallowed_what(names, workers, number):
    made = {**BEHAVIOURS, "swallows": swallows(number)}
    own = [Stage(name=f"{name}{at}", run=made[name], workers=workers) for at, name in enumerate(names)]
    if "swallows" not in names:
        assert asyncio.run(run(*own)) == STEPS
        return
    with pytest.raises(GroupVanished, match=f"stage swallows{names.index('swallows')} took .* p{number} "):
        asyncio.run(run(*own))
