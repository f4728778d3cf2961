"""Whatever happens in any order: every turn that nobody cancels gives its tokens in the end, and nothing is left."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from engine.fleet.fleet import DeadlyTurn, Superseded
from engine.replica.port import Sampling
from tests.support.examples import examples
from tests.support.fakes import Replicas, fleet_of, next_token, settle
from tests.support.faults import Restless
from tests.unit.engine.fleet.test_fleet import weights

STOP = (1,)
TURNS = 6


def expected(key):
    ids, found = [key, 3], []
    while not found or found[-1] not in STOP:
        found.append(next_token(ids, key + len(found), STOP))
        ids.append(found[-1])
    return found


async def turn(fleet, key):
    """Begins again when it is superseded, or two replicas died under it."""
    sampling = Sampling(max_tokens=400, temperature=1.0, seed=key, stop_token_ids=STOP)
    while True:
        found = []
        try:
            async for _, delta in fleet.turn(key, key, [key, 3], sampling):
                assert len(delta.token_ids) == len(delta.logprobs) > 0
                found += delta.token_ids
            return found
        except (Superseded, DeadlyTurn):
            pass
        finally:
            fleet.trajectory_ended(key, 2 + len(found), finished=False)


async def storm(seed, on_update):
    rng, policy, replicas = random.Random(seed), Restless(), Replicas()
    policy.every = rng.choice([0, 1, 3])
    fleet = fleet_of(replicas, 3, balancer=policy, restarts=10_000, on_update=on_update, drain_s=0.001)
    async with fleet, asyncio.TaskGroup() as group:
        tasks = {key: group.create_task(turn(fleet, key), name=f"turn-{key}") for key in range(5, 5 + TURNS)}
        cancelled, drained, version = set(), False, 0
        while not all(task.done() for task in tasks.values()) and version < 100:
            await settle(rng.randrange(4))
            kind = rng.randrange(8)
            if kind == 0 and fleet.live:
                fleet._supervisor.live[rng.choice(fleet.live)].die()
            elif kind == 1:
                version += 1
                await fleet.update_weights(weights(version))
            elif kind == 2 and rng.random() < 0.2:
                key = rng.choice(list(tasks))
                cancelled |= {key} if tasks[key].cancel() else set()
            elif kind == 3 and not drained and len(fleet.live) == 3:
                drained = True
                await fleet.drain(rng.choice(fleet.live))
            else:
                fleet._schedule()
        for key, task in tasks.items():
            if key not in cancelled:
                assert await task == expected(key), key
        await asyncio.wait(tasks.values())
        await settle()
        assert fleet._turns == fleet._homes == fleet._first_version == policy.running == {}
        assert policy.waiting == []
        assert all(replica.in_flight == 0 for replica in replicas.made)
    assert all(replica.events[-1] == "shutdown" for replica in replicas.made)


@examples(60)
@given(st.integers(0, 2**32), st.sampled_from(["continue", "restart"]))
def test_turns_survive_any_storm(seed, on_update):
    asyncio.run(storm(seed, on_update))
