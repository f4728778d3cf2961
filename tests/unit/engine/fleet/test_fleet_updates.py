"""Weight updates with turns in flight: they go on under the new weights, or begin again, as configured."""

import asyncio

import numpy as np
import pytest

from engine.balancing.kv_aware import KvAware
from engine.fleet.canary import CanaryFailed
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Superseded
from tests.support.fakes import Gate, Replicas, fleet_of, settle
from tests.unit.engine.fleet.test_fleet import CANARY, expected, play, sampling, weights


async def part(fleet, key=1, tokens=2):
    """A turn with its first tokens: (turn, tokens)."""
    turn, found = fleet.turn(key, 0, [2, 3], sampling()), []
    while len(found) < tokens:
        found += (await anext(turn))[1].token_ids
    return turn, found


async def superseded(fleet, key):
    with pytest.raises(Superseded, match=f"trajectory {key} "):
        await anext(fleet.turn(key, 0, [2] * 9, sampling()))


async def test_turns_in_flight_go_on_under_the_new_weights():
    replicas = Replicas()
    async with fleet_of(replicas) as fleet:
        turn, found = await part(fleet)
        await fleet.update_weights(weights(4))
        async for _, delta in turn:
            found += delta.token_ids
            spans = delta.spans
        fleet.trajectory_ended(1, 9, finished=True)
        assert found == expected()
        assert [version for version, _, _ in spans] == [0, 0, *[4] * (len(found) - 2)]
        assert replicas.made[0].aborted == []


async def test_restart_ends_what_is_in_flight_and_it_begins_again_under_the_new_weights():
    policy = KvAware(max_tokens=1000)
    gate = Gate()
    replicas = Replicas(lambda replica: setattr(replica, "update_gate", gate))
    async with fleet_of(replicas, on_update="restart", balancer=policy) as fleet, asyncio.TaskGroup() as group:
        turn, _ = await part(fleet)
        update = group.create_task(fleet.update_weights(weights(4)))
        await gate.started.wait()
        with pytest.raises(Superseded, match="trajectory 1 began under version 0, now it is 4"):
            async for _ in turn:
                pass
        fleet.trajectory_ended(1, 4, finished=False)
        assert replicas.made[0].in_flight == 0
        gate.release()
        await update
        assert [token for _, token in await play(fleet)] == expected(), "the key may be used again"
        assert fleet._turns == fleet._first_version == {}
        policy.check()


async def test_restart_reaches_a_trajectory_at_its_tool_and_one_that_waits_for_its_next_turn():
    policy = KvAware(max_tokens=1000)
    replicas = Replicas()
    async with fleet_of(replicas, on_update="restart", balancer=policy) as fleet, asyncio.TaskGroup() as group:
        for key in (1, 2):
            async for _ in fleet.turn(key, 0, [2, 3], sampling()):
                pass
            fleet.turn_finished(key, 9)
        policy.decide = lambda now: []
        waiting = group.create_task(superseded(fleet, 2))
        fresh = group.create_task(anext(fleet.turn(3, 0, [2] * 9, sampling())))
        await settle()
        await fleet.update_weights(weights(1))
        await waiting
        await superseded(fleet, 1)
        await settle()
        assert not fresh.done(), "it has no token yet: it goes on waiting"
        fresh.cancel()
        for key in (1, 2, 3):
            fleet.trajectory_ended(key, 9, finished=False)
        assert policy.waiting() == policy.reserved_blocks() == 0


async def test_restart_lets_a_turn_end_that_ends_before_its_abort_arrives():
    gate = Gate()
    replicas = Replicas(lambda replica: setattr(replica, "abort_gate", gate))
    async with fleet_of(replicas, on_update="restart") as fleet:
        turn, found = await part(fleet)
        await fleet.update_weights(weights(4))
        await gate.started.wait()
        async for _, delta in turn:
            found += delta.token_ids
        gate.release()
        fleet.trajectory_ended(1, 9, finished=True)
        assert found == expected()
        assert delta.finish == "stop"


@pytest.mark.parametrize("on_update", ["", "abort"])
def test_another_way_to_update_is_refused(on_update):
    with pytest.raises(ValueError, match=f"on_update must be .*{on_update!r}"):
        FleetConfig(on_update=on_update)


async def test_where_staleness_allows_it_a_quarter_of_the_replicas_pauses_and_the_others_go_on():
    gates = {}

    def prepare(replica):
        gates[replica.index] = replica.update_gate = Gate()

    replicas = Replicas(prepare)
    async with fleet_of(replicas, 4, paused_share=0.25) as fleet, asyncio.TaskGroup() as group:
        update = group.create_task(fleet.update_weights(weights(4)))
        for index in range(4):
            await gates[index].started.wait()
            await settle()
            assert [number for number, gate in gates.items() if gate.started.is_set()] == list(range(index + 1))
            if index == 0:
                assert [token for _, token in await play(fleet)] == expected(), "nobody waits for the update"
            gates[index].release()
        await update
    assert [replica.weights for replica in replicas.made] == [[("/w/4", 4)]] * 4


async def test_after_an_update_in_turns_that_failed_nothing_begins_until_one_succeeds():
    def prepare(replica):
        replica.canary = np.asarray([-1.0, -2.0, -3.25 if replica.index == 1 else -3.0], np.float32)

    replicas = Replicas(prepare)
    async with fleet_of(replicas, 2, canary=CANARY, paused_share=0.5) as fleet:
        with pytest.raises(CanaryFailed, match="replica 1"):
            await fleet.update_weights(weights(2, (-1.0, -2.0, -3.0)))
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(play(fleet))
            await settle()
            assert not turn.done()
            replicas.made[1].canary = replicas.made[0].canary
            await fleet.update_weights(weights(3, (-1.0, -2.0, -3.0)))
            await turn


def test_a_trajectory_of_one_version_and_an_update_in_turns_exclude_each_other():
    with pytest.raises(ValueError, match="paused_share"):
        FleetConfig(on_update="restart", paused_share=0.25)


async def test_while_a_fleet_is_held_turns_end_but_none_begins():
    replicas = Replicas()
    async with fleet_of(replicas) as fleet, asyncio.TaskGroup() as group:
        turn, found = await part(fleet)
        fleet.hold(True)
        waiting = group.create_task(play(fleet, key=2))
        async for _, delta in turn:
            found += delta.token_ids
        fleet.trajectory_ended(1, 9, finished=True)
        assert found == expected()
        await settle()
        assert not waiting.done()
        fleet.hold(False)
        assert [token for _, token in await waiting] == expected()


async def test_finish_keeps_a_trajectory_under_its_version_and_nothing_waits_for_an_update():
    gate = Gate()
    replicas = Replicas(lambda replica: setattr(replica, "update_gate", gate))
    async with fleet_of(replicas, on_update="finish") as fleet, asyncio.TaskGroup() as group:
        gate.release()
        await fleet.update_weights(weights(4))
        turn, _ = await part(fleet)
        again = Gate()
        for replica in replicas.made:
            replica.update_gate = again
        update = group.create_task(fleet.update_weights(weights(5)))
        await again.started.wait()
        assert fleet.version == 4, "it is that of new trajectories when every replica has it"
        async for _ in turn:
            pass
        fleet.turn_finished(1, 9)
        await play(fleet, key=2)
        again.release()
        await update
        await play(fleet, key=3)
        async for _ in fleet.turn(1, 0, [2] * 9, sampling()):
            pass
        wanted = [asked.version for replica in replicas.made for _, asked, _ in replica.requests]
        assert sorted(wanted) == [4, 4, 4, 5], "two turns of the first, one each of the others"
        for key in (1, 2, 3):
            fleet.trajectory_ended(key, 9, finished=True)
        assert fleet._first_version == {}
