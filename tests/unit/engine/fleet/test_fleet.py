"""The fleet: turns survive their replica, weights reach every replica, an end is an end and not a hang."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from bench.placement.policies import ThunderPolled
from engine.balancing.balancer import Place
from engine.balancing.kv_aware import KvAware
from engine.fleet.canary import CanaryFailed
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import DeadlyTurn
from engine.fleet.supervisor import STEADY_S
from engine.replica.port import KvSample, ReplicaDied, ReplicaMisconfigured, Sampling
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights
from tests.support.fakes import Clock, Gate, Replicas, ScriptedReplica, fleet_of, logprob_of, next_token, settle

STOP = (1,)
CANARY = [[5, 6, 7, 8]]


def sampling(max_tokens=40, seed=9):
    return Sampling(max_tokens=max_tokens, temperature=1.0, seed=seed, stop_token_ids=STOP)


def weights(version=1, canary=(0.0, 0.0, 0.0)):
    return PublishedWeights(f"/w/{version}", version, np.asarray(canary, np.float32))


async def play(fleet, key=1, ids=(2, 3), group=0, **options):
    """One turn: [(replica, token)], and the fleet is told that the trajectory is over."""
    found = []
    try:
        async for replica, delta in fleet.turn(key, group, list(ids), sampling(**options)):
            found += [(replica, token) for token in delta.token_ids]
    finally:
        fleet.trajectory_ended(key, len(ids) + len(found), finished=True)
    return found


def expected(ids=(2, 3), seed=9):
    """What an undisturbed turn samples."""
    ids, start, found = list(ids), seed, []
    while not found or found[-1] not in STOP:
        found.append(next_token(ids, start + len(found), STOP))
        ids.append(found[-1])
    return found


async def test_a_turn_runs_and_the_balancer_is_empty_afterwards():
    policy = KvAware(max_tokens=1000)
    replicas = Replicas()
    async with fleet_of(replicas, 2, balancer=policy) as fleet:
        assert fleet.live == [0, 1]
        turns = [await play(fleet, key) for key in range(4)]
        assert [[token for _, token in turn] for turn in turns] == [expected()] * 4
        assert policy.waiting() == policy.reserved_blocks() == 0
        assert fleet._turns == {}
    assert [replica.events for replica in replicas.made] == [["start", "shutdown"]] * 2


async def test_concurrent_turns_spread_over_the_replicas():
    async with fleet_of(Replicas(), 2) as fleet, asyncio.TaskGroup() as group:
        tasks = [group.create_task(play(fleet, key, group=key)) for key in range(8)]
        await settle(3)
        for task in tasks:
            await task
    assert {replica for task in tasks for replica, _ in task.result()} == {0, 1}


async def test_a_turn_goes_on_elsewhere_from_its_tokens_when_its_replica_dies():
    """Nothing is lost or delivered twice, spans count from the turn's beginning, and the request is the same again."""
    policy = KvAware(max_tokens=1000)
    replicas = Replicas()
    async with fleet_of(replicas, 2, restarts=0, balancer=policy) as fleet:
        found, spans = [], None
        async for replica, delta in fleet.turn(1, 0, [2, 3], sampling()):
            found += delta.token_ids
            assert delta.logprobs == [logprob_of(token) for token in delta.token_ids]
            if len(found) == 2:
                first = replicas.made[replica]
                first.die()
            spans = delta.spans
        fleet.trajectory_ended(1, 2 + len(found), finished=True)
        second = replicas.made[1 - first.index]
        assert found == expected()
        assert len(found) > 3, "the test needs a turn that is long enough"
        [(ids, request, _)] = second.requests
        assert (ids, request) == ([2, 3], replace(sampling(), version=0))
        assert list(spans) == [(0, at, at + 1) for at in range(2, len(found))]
        assert fleet.live == [second.index]
        policy.check()


async def disturbed(replicas, disturb, ids=(2, 3)):
    """One turn; after three tokens `disturb(fleet, replica)` happens. (tokens, spans)"""
    policy = KvAware(max_tokens=1000)
    async with fleet_of(replicas, 2, restarts=0, balancer=policy) as fleet:
        found = []
        async for replica, delta in fleet.turn(1, 0, list(ids), sampling()):
            found += delta.token_ids
            assert delta.logprobs == [logprob_of(token) for token in delta.token_ids]
            if len(found) == 3 and delta.token_ids:
                await disturb(fleet, replicas.made[replica])
        fleet.trajectory_ended(1, len(ids) + len(found), finished=True)
        policy.check()
    return found, list(delta.spans)


async def die(fleet, replica):
    replica.die()


async def test_a_turn_whose_replica_dies_samples_what_it_would_have_sampled():
    """As on a real engine, whose tokens follow from the seed and their place in the request."""
    undisturbed, _ = await disturbed(Replicas(draws_from_the_start=True), lambda *_: settle(1))
    found, spans = await disturbed(Replicas(draws_from_the_start=True), die)
    assert found == undisturbed
    assert len(found) > 4, "the test needs a turn that is long enough"
    assert spans == [(0, at, at + 1) for at in range(3, len(found))]


@pytest.mark.parametrize("after", [(1, 1), (2, 4)])
async def test_a_turn_under_which_two_replicas_died_is_not_given_to_a_third(after):
    replicas, found = Replicas(draws_from_the_start=True), []
    async with fleet_of(replicas, 3, restarts=0) as fleet, asyncio.TaskGroup() as group:

        async def sample():
            async for replica, delta in fleet.turn(1, 0, [2, 3], sampling()):
                found.extend(delta.token_ids)
                if len(found) >= after[len(fleet.live) == 2]:
                    replicas.made[replica].die()

        with pytest.raises(DeadlyTurn, match=r"replica \d and then replica \d died"):
            await sample()
        fleet.trajectory_ended(1, 2 + len(found), finished=False)
        assert sum(len(replica.requests) for replica in replicas.made) == 2
        other = group.create_task(play(fleet, 2))
    assert [token for _, token in other.result()], "the third one serves others"


async def test_a_replica_that_is_drained_is_no_death_under_its_turns():
    undisturbed, _ = await disturbed(Replicas(), lambda *_: settle(1))
    replicas, found = Replicas(), []
    async with fleet_of(replicas, 4, restarts=0, drain_s=0.001) as fleet:
        async for replica, delta in fleet.turn(1, 0, [2, 3], sampling()):
            found += delta.token_ids
            if len(found) in (1, 2):
                await fleet.drain(replica)
            elif len(found) == 3:
                replicas.made[replica].die()
        fleet.trajectory_ended(1, 2 + len(found), finished=True)
    assert found == undisturbed


async def test_a_turn_that_is_not_sampled_again_as_it_was_goes_on_from_its_tokens():
    """Its first three tokens stay, and the others are of a request that continues them."""
    replicas = Replicas(lambda replica: setattr(replica, "salt", replica.index))
    found, _ = await disturbed(replicas, die)
    [first, second] = sorted(replicas.made, key=lambda replica: len(replica.requests))
    assert [ids for ids, _, _ in first.requests] == [[2, 3]]
    assert [ids for ids, _, _ in second.requests] == [[2, 3], [2, 3, *found[:3]]]
    assert [request.max_tokens for _, request, _ in second.requests] == [40, 37]
    assert len(second.aborted) == 1, "the request that gave other tokens was ended"
    assert second.in_flight == 0


async def test_a_turn_whose_weights_are_older_goes_on_from_its_tokens():
    async def update(fleet, replica):
        await fleet.update_weights(weights(1))
        replica.die()

    replicas = Replicas(draws_from_the_start=True)
    found, spans = await disturbed(replicas, update)
    [_, second] = sorted(replicas.made, key=lambda replica: replica.requests[0][0])
    assert second.requests[0][0] == [2, 3, *found[:3]]
    assert spans == [(1, at, at + 1) for at in range(3, len(found))]


async def test_an_abort_that_nobody_asked_for_is_the_death_of_the_replica():
    """An engine that is asked to end (SIGINT, say) aborts what it has; the trajectory's books stay right."""

    async def end_by_itself(fleet, replica):
        await replica.abort(replica.requests[0][2])

    replicas = Replicas()
    found, _ = await disturbed(replicas, end_by_itself)
    assert found == expected()
    assert sorted(len(replica.requests) for replica in replicas.made) == [1, 1]
    assert sum(replica.died.is_set() and replica.events[-1] == "shutdown" for replica in replicas.made) == 2


async def test_a_replica_that_dies_in_the_tick_of_a_placement_is_not_used():
    """The placement of a turn that waited is decided; before it goes on, the replica is gone (and even replaced)."""
    replicas = Replicas()
    placements, waited = [], []

    class DiesUnderThePlacement(KvAware):
        def decide(self, now):
            if self.waiting() and not waited:
                waited.append(now)
                asyncio.get_running_loop().call_soon(fleet._schedule)
                return []
            places = super().decide(now)
            placements.extend(places)
            if len(placements) == 1 and places:
                asyncio.get_running_loop().call_soon(fleet._supervisor.mark_dead, replicas.made[0])
            return places

    async with fleet_of(replicas, balancer=DiesUnderThePlacement(max_tokens=1000)) as fleet:
        turn = await play(fleet)
    assert [token for _, token in turn] == expected()
    assert [len(replica.requests) for replica in replicas.made] == [0, 1]
    assert len(placements) == 2


async def test_a_late_word_of_a_dead_replica_does_not_take_its_successor_down():
    class Late(ScriptedReplica):
        async def generate(self, token_ids, sampling, request_id):
            await gate.passed()
            raise ReplicaDied("so I am told")
            yield

    def make(index, core, on_step):
        made.append(ScriptedReplica(index, on_step) if made else Late(index, on_step))
        return made[-1]

    gate, made = Gate(), []
    async with fleet_of(make) as fleet, asyncio.TaskGroup() as group:
        turn = group.create_task(play(fleet))
        await gate.started.wait()
        made[0].die()
        await settle()
        gate.release()
        assert [token for _, token in await turn] == expected()
        assert len(made) == 2


async def test_closing_a_turn_aborts_its_request():
    replicas = Replicas()
    async with fleet_of(replicas) as fleet:
        turn = fleet.turn(1, 0, [2, 3], sampling())
        await anext(turn)
        assert replicas.made[0].in_flight == 1
        await turn.aclose()
        assert replicas.made[0].in_flight == 0
        assert len(replicas.made[0].aborted) == 1
        fleet.trajectory_ended(1, 3, finished=True)


async def test_a_finished_turn_leaves_nothing_in_flight():
    replicas = Replicas()
    async with fleet_of(replicas) as fleet:
        await play(fleet)
        assert replicas.made[0].in_flight == 0
        assert replicas.made[0].aborted == []


async def test_cancelling_a_waiting_turn_leaves_the_queue():
    policy = KvAware(max_tokens=1000)
    replicas = Replicas()
    async with fleet_of(replicas, restarts=5, balancer=policy) as fleet, asyncio.TaskGroup() as group:
        fleet._supervisor.weights_current.clear()
        waiting = group.create_task(play(fleet))
        await settle()
        assert policy.waiting() == 1
        waiting.cancel()
        await settle()
        assert policy.waiting() == 0
        assert fleet._turns == {}


# Weights


async def test_nothing_is_placed_while_weights_are_updated():
    gate = Gate()
    replicas = Replicas(lambda replica: setattr(replica, "update_gate", gate))
    async with fleet_of(replicas, 2, canary=CANARY) as fleet, asyncio.TaskGroup() as group:
        update = group.create_task(fleet.update_weights(weights(3)))
        await gate.started.wait()
        turn = group.create_task(play(fleet))
        await settle()
        assert all(replica.requests == [] for replica in replicas.made)
        gate.release()
        await update
        assert [token for _, token in await turn] == expected()
        assert [replica.weights for replica in replicas.made] == [[("/w/3", 3)]] * 2
        assert fleet.version == 3


async def test_the_load_and_the_canary_of_each_replica_are_in_the_timeline():
    timeline = Timeline(Clock(tick=0.001))
    async with fleet_of(Replicas(), 2, timeline=timeline, canary=CANARY) as fleet:
        await fleet.update_weights(weights(7))
        spans = [(span.name, span.lane) for span in timeline.drain().spans if span.track == "replicas"]
    assert sorted(spans) == [(name, lane) for name in ("canary", "load version 7") for lane in (0, 1)]


async def test_a_replica_that_differs_from_the_learner_stops_the_run_with_the_numbers():
    def prepare(replica):
        replica.canary = np.asarray([-1.0, -2.0, -3.25 if replica.index == 1 else -3.0], np.float32)

    replicas = Replicas(prepare)
    async with fleet_of(replicas, 2, canary=CANARY) as fleet:
        with pytest.raises(CanaryFailed) as failure:
            await fleet.update_weights(weights(2, (-1.0, -2.0, -3.0)))
        for part in (
            "replica 1",
            "update 2",
            "token 2",
            "-3.250000",
            "-3.000000",
            "8.33e-02",
            "6.7e-05",
            "2.50e-01",
            "6.7e-04",
        ):
            assert part in str(failure.value)
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(play(fleet))
            await settle()
            assert not turn.done(), "those weights are not served"
            replicas.made[1].canary = replicas.made[0].canary
            await fleet.update_weights(weights(3, (-1.0, -2.0, -3.0)))
            await turn


async def test_a_canary_that_is_not_a_number_fails():
    replicas = Replicas(lambda replica: setattr(replica, "canary", np.asarray([np.nan, 0, 0], np.float32)))
    async with fleet_of(replicas, canary=CANARY) as fleet:
        with pytest.raises(CanaryFailed, match="nan"):
            await fleet.update_weights(weights())


async def test_the_largest_difference_is_kept():
    replicas = Replicas(lambda replica: setattr(replica, "canary", np.full(3, replica.index * 2e-5, np.float32)))
    async with fleet_of(replicas, 3, canary=CANARY) as fleet:
        assert fleet.canary_max_abs is None
        assert await fleet.update_weights(weights()) == pytest.approx((4e-5, 4e-5))
        assert fleet.canary_max_abs == pytest.approx(4e-5)


async def test_a_replica_that_fails_the_update_is_replaced_and_the_new_one_gets_the_weights():
    replicas = Replicas(lambda replica: setattr(replica, "fail_updates", int(len(replicas.made) == 2)))
    async with fleet_of(replicas, 2, canary=CANARY) as fleet:
        await fleet.update_weights(weights(4))
        await settle()
        assert len(replicas.made) == 3
        first, failed, new = replicas.made
        assert (first.weights, failed.weights, new.weights) == ([("/w/4", 4)], [], [("/w/4", 4)])
        assert new.index == failed.index
        assert fleet.live == [0, 1]
        assert fleet.deaths == 1
        assert "shutdown" in failed.events


async def test_a_new_replica_must_pass_the_canary_too():
    def prepare(replica):
        replica.canary = np.full(3, 0.5 if len(replicas.made) > 2 else 0.0, np.float32)

    replicas = Replicas(prepare)

    async def run():
        async with fleet_of(replicas, 2, canary=CANARY) as fleet:
            await fleet.update_weights(weights())
            replicas.made[0].die()
            await asyncio.Event().wait()

    with pytest.raises(CanaryFailed, match="replica 0 after weight update 1"):
        await run()


# Supervision


async def test_a_dead_replica_is_replaced():
    replicas = Replicas()
    async with fleet_of(replicas, 2) as fleet:
        replicas.made[1].die()
        await settle()
        assert fleet.live == [0, 1]
        assert [replica.index for replica in replicas.made] == [0, 1, 1]
        assert replicas.made[1].events == ["start", "shutdown"]


async def test_a_stalled_replica_is_killed_and_replaced_with_a_line_that_says_why():
    replicas, told = Replicas(), []
    async with fleet_of(replicas, watch_s=0.01, note=told.append) as fleet:
        replicas.made[0].stalls = True
        await replicas.made[0].died.wait()
        await settle()
        assert "kill" in replicas.made[0].events
        assert fleet.live == [0]
    assert told == ["replica 0 died: replica 0: it stalls; restart 1 of 3 begins", "replica 0 is up again"]


async def test_a_node_that_stood_still_does_not_blame_its_replicas():
    replicas = Replicas()
    async with fleet_of(replicas, watch_s=0.1) as fleet:
        replicas.made[0].stalls = True
        time.sleep(0.5)  # noqa: ASYNC251 - nothing was read meanwhile
        await settle()
        replicas.made[0].stalls = False
        await asyncio.sleep(0.3)
        assert fleet.live == [0]
        assert "kill" not in replicas.made[0].events


async def test_a_replica_that_does_not_end_is_killed_and_the_others_go_on():
    class Endless(ScriptedReplica):
        async def shutdown(self):
            await asyncio.Event().wait()

    def make(index, core, on_step):
        made.append(ScriptedReplica(index, on_step) if made else Endless(index, on_step))
        return made[-1]

    made = []
    async with fleet_of(make, stop_deadline_s=0.01) as fleet:
        made[0].die()
        assert [token for _, token in await play(fleet)] == expected()
    assert made[0].events == ["start", "kill"]
    assert made[1].events == ["start", "shutdown"]


async def test_turns_wait_while_no_replica_is_up_and_go_on_with_the_next():
    gate = Gate()

    def prepare(replica):
        if len(replicas.made) > 1:
            replica.start_gate = gate

    replicas = Replicas(prepare)
    async with fleet_of(replicas) as fleet, asyncio.TaskGroup() as group:
        replicas.made[0].die()
        await gate.started.wait()
        turn = group.create_task(play(fleet))
        await settle()
        assert fleet.live == []
        assert not turn.done()
        gate.release()
        assert [token for _, token in await turn] == expected()


async def test_when_no_replica_is_left_the_run_ends_with_one_clear_error():
    def prepare(replica):
        if len(replicas.made) > 2:
            replica.start_error = ReplicaDied("no memory")

    replicas = Replicas(prepare)

    async def run():
        async with fleet_of(replicas, 2, restarts=2) as fleet:
            for replica in replicas.made[:2]:
                replica.die()
            await play(fleet)

    with pytest.raises(ReplicaDied, match="no replica is left: each died 3 times; last cause: no memory"):
        await run()
    assert len(replicas.made) == 6
    assert all(replica.events[-1] == "shutdown" for replica in replicas.made)


async def test_a_replica_that_served_for_long_may_die_as_often_again_and_the_timeline_says_who_is_given_up():
    timeline = Timeline(clock := Clock())
    async with fleet_of(Replicas(), 2, restarts=1, timeline=timeline) as fleet:
        for served_s, live in [(0.0, [0, 1]), (STEADY_S + 1, [0, 1]), (0.0, [0])]:
            clock.now += served_s
            fleet._supervisor.live[1].die()
            await settle()
            assert fleet.live == live
    said = [instant.name for instant in timeline.drain().instants]
    assert [name.partition(";")[0] for name in said if "given up" in name] == ["replica 1 died 2 times and is given up"]


async def test_each_death_is_told_with_its_cause_and_each_return():
    told = []
    replicas = Replicas()
    async with fleet_of(replicas, restarts=2, note=told.append):
        replicas.made[0].cause = "MemoryError: out of it"
        replicas.made[0].die()
        await settle()
        replicas.made[1].die()
        await settle()
    assert told == [
        "replica 0 died: MemoryError: out of it; restart 1 of 2 begins",
        "replica 0 is up again",
        "replica 0 died: it did not say why; restart 2 of 2 begins",
        "replica 0 is up again",
    ]


async def test_the_cause_that_was_heard_first_stands_in_the_last_line():
    def prepare(replica):
        if len(replicas.made) > 1:
            replica.start_error = ReplicaDied("replica 0 did not start: no memory")

    told = []
    replicas = Replicas(prepare)

    async def run():
        async with fleet_of(replicas, restarts=1, note=told.append) as fleet:
            replicas.made[0].die()
            await play(fleet)

    with pytest.raises(ReplicaDied, match="no memory"):
        await run()
    assert sum("no memory" in line for line in told) == 1
    assert "given up" in told[-1]


async def died(fleet, message):
    with pytest.raises(ReplicaDied, match=message):
        await play(fleet)


async def test_turns_of_tasks_that_outlive_the_fleet_end_with_it():
    """They are not the body's own tasks, so that nobody cancels them: each is told, those that come later too."""
    policy = KvAware(max_tokens=1000)
    gate = Gate()

    def prepare(replica):
        if len(replicas.made) > 1:
            replica.start_gate, replica.start_error = gate, ReplicaDied("no memory")

    async def run(fleet):
        async with fleet:
            replicas.made[0].die()
            await gate.started.wait()
            waiting = outer.create_task(died(fleet, "no replica is left"))
            await settle()
            assert not waiting.done()
            gate.release()
            await asyncio.Event().wait()

    replicas = Replicas(prepare)
    async with asyncio.TaskGroup() as outer:
        fleet = fleet_of(replicas, restarts=1)
        with pytest.raises(ReplicaDied, match="no replica is left"):
            await run(fleet)
        await died(fleet, "no replica is left")
    gate, replicas = Gate(), Replicas(lambda replica: setattr(replica, "update_gate", gate))
    async with asyncio.TaskGroup() as outer:
        async with fleet_of(replicas, 2, restarts=0, balancer=policy) as fleet, asyncio.TaskGroup() as group:
            update = group.create_task(fleet.update_weights(weights()))
            await gate.started.wait()
            outer.create_task(died(fleet, "the fleet has ended"))
            await settle()
            update.cancel()
        assert policy.reserved_blocks() == 0


async def test_the_run_goes_on_while_another_replica_is_being_started():
    """Replica 0 is given up for good in the moment in which replica 1 is down: it comes back."""
    gate = Gate()

    def prepare(replica):
        if len(replicas.made) > 2:
            if replica.index == 0:
                replica.start_error = ReplicaDied("no memory")
            else:
                replica.start_gate = gate

    replicas = Replicas(prepare)
    async with fleet_of(replicas, 2, restarts=1) as fleet, asyncio.TaskGroup() as group:
        replicas.made[1].die()
        await gate.started.wait()
        replicas.made[0].die()
        turn = group.create_task(play(fleet))
        await settle()
        gate.release()
        assert [token for _, token in await turn] == expected()
        assert fleet.live == [1]


async def test_a_replica_that_dies_while_it_starts_is_started_again():
    replicas = Replicas(lambda replica: setattr(replica, "start_error", errors.pop(0) if errors else None))
    errors = [None, ReplicaDied("killed"), ReplicaDied("killed")]
    async with fleet_of(replicas, 2, restarts=2) as fleet:
        assert fleet.live == [0, 1]
        assert fleet.deaths == 2
        assert [token for _, token in await play(fleet)] == expected()


@pytest.mark.parametrize(
    ("error", "attempts"), [(ReplicaDied("no memory"), 3), (ReplicaMisconfigured("no config.json"), 1)]
)
async def test_a_start_that_fails_is_tried_again_only_where_that_may_help(error, attempts):
    replicas = Replicas(lambda replica: setattr(replica, "start_error", error))
    with pytest.raises(ReplicaDied, match=str(error)):
        async with fleet_of(replicas, restarts=2):
            pass
    assert len(replicas.made) == attempts
    assert all(replica.events[-1] == "shutdown" for replica in replicas.made)


@pytest.mark.parametrize("error", [ReplicaDied("replica 1 did not start: no memory"), ValueError("no such model")])
async def test_a_failure_to_start_comes_out_as_it_is_and_ends_the_others(error):
    replicas = Replicas(lambda replica: setattr(replica, "start_error", error if replica.index == 1 else None))
    with pytest.raises(type(error), match=str(error)):
        async with fleet_of(replicas, 2):
            pass
    assert all(replica.events[-1] == "shutdown" for replica in replicas.made)


async def test_an_error_of_the_body_comes_out_as_it_is_and_ends_the_replicas():
    replicas = Replicas()
    with pytest.raises(LookupError, match="a bug"):
        async with fleet_of(replicas):
            raise LookupError("a bug")
    assert replicas.made[0].events == ["start", "shutdown"]


async def test_cancelling_the_owner_ends_the_replicas():
    replicas, inside = Replicas(), asyncio.Event()

    async def owner():
        async with fleet_of(replicas, 2):
            inside.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(owner())
        await inside.wait()
        task.cancel()
    assert task.cancelled()
    assert [replica.events for replica in replicas.made] == [["start", "shutdown"]] * 2


# What the fleet tells others


async def test_samples_reach_the_balancer_and_the_peaks():
    class Listening(KvAware):
        def sample(self, replica, sample, now):
            heard.append((replica, sample.free_blocks))
            super().sample(replica, sample, now)

    heard = []
    replicas = Replicas(blocks=100)
    async with fleet_of(replicas, balancer=Listening(max_tokens=1000)) as fleet:
        for free_blocks in (90, 40, 80):
            replicas.made[0].step(free_blocks, running=2, preempted=1)
        assert fleet.last[0].free_blocks == 80
        assert fleet.kv_peak == {0: 0.6}
        assert fleet.preemptions == 3
        assert heard == [(0, 90), (0, 40), (0, 80)]


async def test_every_second_of_a_replica_has_a_cause():
    timeline = Timeline(clock := Clock())
    replicas = Replicas(lambda replica: setattr(replica, "update_gate", gate))
    gate = Gate()
    async with fleet_of(replicas, timeline=timeline) as fleet, asyncio.TaskGroup() as group:
        turn = fleet.turn(1, 0, [2, 3], sampling(1))
        await anext(turn)
        clock.now += 5
        await turn.aclose()
        fleet.turn_finished(1, 3)
        clock.now += 2
        update = group.create_task(fleet.update_weights(weights()))
        await gate.started.wait()
        clock.now += 3
        gate.release()
        await update
        fleet.trajectory_ended(1, 3, finished=True)
        clock.now += 1
        fleet.trajectory_ended(1, 3, finished=True)
    causes = {cause: seconds for cause, seconds in timeline.idle.seconds(clock.now)[0].items() if seconds}
    assert causes == {"busy": 5.0, "tool_wait": 2.0, "weight_sync": 3.0, "host": 1.0}


async def test_an_update_that_waits_for_a_new_replica_to_load_begins_when_it_begins():
    """No replica has seconds of a cause below zero."""
    timeline = Timeline(clock := Clock())
    replicas, gates = Replicas(), iter([Gate(), Gate()])
    async with fleet_of(replicas, 2, timeline=timeline) as fleet, asyncio.TaskGroup() as group:
        await fleet.update_weights(weights(1))
        fleet._supervisor._make_replica = Replicas(lambda replica: setattr(replica, "update_gate", first))
        first = next(gates)
        replicas.made[0].die()
        await first.started.wait()
        clock.now += 2
        update = group.create_task(fleet.update_weights(weights(2)))
        await settle()
        clock.now += 3
        first.release()
        await update
    seconds = timeline.idle.seconds(clock.now)
    assert {index: sum(causes.values()) for index, causes in seconds.items()} == {0: 5.0, 1: 5.0}
    assert min(value for causes in seconds.values() for value in causes.values()) >= 0
    assert seconds[1].get("weight_sync", 0.0) == 0.0


async def test_a_turn_is_blocked_only_from_the_decision_that_leaves_it_waiting():
    """What a policy thinks is the host's time."""
    timeline = Timeline(clock := Clock())

    class Thinks(KvAware):
        full = False

        def decide(self, now):
            clock.now += 1
            return [] if self.full else super().decide(now)

    balancer = Thinks(max_tokens=1000)
    async with fleet_of(Replicas(), timeline=timeline, balancer=balancer) as fleet, asyncio.TaskGroup() as group:
        await play(fleet)
        assert not timeline.idle.seconds(clock.now)[0].get("kv_blocked")
        balancer.full = True
        task = group.create_task(play(fleet))
        await settle()
        clock.now += 6
        balancer.full = False
        fleet._schedule()
        await task
        assert timeline.idle.seconds(clock.now)[0]["kv_blocked"] == 6 + 1, "and the decision that places it"


async def test_a_policy_of_ones_own_drives_the_fleet():
    class Last:
        """Everything to the replica that came last."""

        def __init__(self):
            self.up, self.keys = [], []

        def replica_up(self, replica, blocks, block_size):
            self.up.append(replica)

        def replica_down(self, replica):
            self.up.remove(replica)

        def sample(self, replica, sample, now): ...

        def request_turn(self, key, group, prompt_tokens, tokens, now):
            self.keys.append(key)

        def turn_finished(self, key, tokens, now): ...

        def trajectory_ended(self, key, tokens, finished): ...

        def decide(self, now):
            keys, self.keys = self.keys, []
            return [Place(key, self.up[-1], "last", 0.0) for key in keys]

    async with fleet_of(Replicas(), 3, balancer=Last()) as fleet:
        assert {replica for replica, _ in await play(fleet)} == {2}


async def test_a_policy_that_goes_by_the_time_is_asked_also_when_nothing_happens():
    policy, clock = ThunderPolled(interval_s=5.0), Clock()
    async with fleet_of(Replicas(), balancer=policy, timeline=Timeline(clock)) as fleet, asyncio.TaskGroup() as group:
        await settle()
        turn = group.create_task(play(fleet))
        await settle()
        assert policy.waiting() == 1, "it was asked at 0 s when the replica came"
        clock.now = 5.0
        async with asyncio.timeout(30):
            assert [token for _, token in await turn] == expected()


@pytest.mark.parametrize("method", ["decide", "sample"])
async def test_a_bug_of_the_policy_ends_the_run(method):
    class Buggy(KvAware):
        at = None

        def decide(self, now):
            self._bug("decide")
            return super().decide(now)

        def sample(self, replica, sample, now):
            self._bug("sample")
            super().sample(replica, sample, now)

        def _bug(self, method):
            if self.at == method:
                raise LookupError(f"in {method}")

    async def run():
        async with fleet_of(replicas, balancer=policy):
            policy.at = method
            replicas.made[0].step(90)
            replicas.made[0].die()
            await asyncio.Event().wait()

    policy = Buggy(max_tokens=1000)
    replicas = Replicas()
    with pytest.raises(LookupError, match=f"in {method}"):
        await run()


async def test_a_policy_that_places_on_a_replica_that_is_not_there_ends_the_run():
    class Astray(KvAware):
        def decide(self, now):
            return [replace(place, replica=7) for place in super().decide(now)]

    with pytest.raises(KeyError, match="7"):
        async with asyncio.timeout(30), fleet_of(Replicas(), balancer=Astray(max_tokens=1000)) as fleet:
            await play(fleet)


@pytest.mark.parametrize(("field", "value"), [("replicas", 0), ("canary_tolerance", 0.0), ("watch_s", None)])
def test_an_impossible_fleet_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        FleetConfig(**{field: value})


async def test_the_room_of_a_fleet_is_that_of_its_live_replicas():
    async with fleet_of(Replicas(blocks=100), 2, block_size=16) as fleet:
        assert fleet.kv_tokens == (3200, 3200)
        fleet.on_step(0, KvSample(40, 1, 0, 0))
        assert fleet.kv_tokens == (3200, 2240)
        fleet._supervisor.mark_dead(fleet._supervisor.live[0])
        assert fleet.kv_tokens == (1600, 1600)
