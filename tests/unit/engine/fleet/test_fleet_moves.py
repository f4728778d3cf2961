"""Moves: a turn goes on at another replica from the tokens that it has, whatever ends or dies meanwhile."""

import asyncio
from dataclasses import fields, replace

import pytest

from engine.balancing.balancer import Place
from engine.replica.port import ReplicaDied, Sampling
from engine.telemetry.timeline import Timeline
from tests.support.fakes import Gate, Replicas, ScriptedReplica, fleet_of, next_token, settle

STOP = (1,)


class Directed:
    """Places everything on replica `to`; `move` sends a running trajectory elsewhere."""

    def __init__(self):
        self.up, self.to, self.waiting, self.moves, self.said = [], 0, [], [], []

    def replica_up(self, replica, blocks, block_size):
        self.up.append(replica)

    def replica_down(self, replica):
        self.up.remove(replica)
        self.said.append(("down", replica))

    def replica_drain(self, replica):
        self.said.append(("drain", replica))

    def sample(self, replica, sample, now): ...

    def request_turn(self, key, group, prompt_tokens, tokens, now):
        self.waiting.append(key)
        self.said.append(("request_turn", key, tokens))

    def turn_finished(self, key, tokens, now): ...

    def trajectory_ended(self, key, tokens, finished):
        self.waiting = [other for other in self.waiting if other != key]

    def decide(self, now):
        moves, self.moves = self.moves, []
        to = self.to if self.to in self.up else min(self.up, default=None)
        waiting, self.waiting = (self.waiting, []) if self.up else ([], self.waiting)
        return [Place(key, replica, "move", 0.0) for key, replica in moves] + [
            Place(key, to, "directed", 0.0) for key in waiting
        ]


class Moving:
    """A turn of a long trajectory on two replicas, in steps: `until` so many tokens, `move`, `rest`."""

    def __init__(self, sampling=None, **options):
        self.sampling = sampling or SAMPLING
        self.policy, self.replicas, self.timeline = Directed(), Replicas(**options), Timeline()
        self.fleet = fleet_of(self.replicas, 2, balancer=self.policy, timeline=self.timeline, restarts=1)
        self.found, self.forced, self.spans, self.finish = [], [], [], None

    async def __aenter__(self):
        await self.fleet.__aenter__()
        self.turn = self.fleet.turn(1, 0, [2, 3], self.sampling)
        return self

    async def __aexit__(self, *error):
        await self.turn.aclose()
        self.fleet.trajectory_ended(1, 2 + len(self.found), finished=True)
        await self.fleet.__aexit__(*error)

    async def until(self, tokens):
        while len(self.found) < tokens and self.finish is None:
            self.take(await anext(self.turn))

    async def rest(self):
        async for delta in self.turn:
            self.take(delta)

    def take(self, delta):
        _, delta = delta
        self.found += [*delta.token_ids]
        self.forced += [*delta.forced]
        self.finish, self.spans = delta.finish, delta.spans

    def move(self, replica):
        self.policy.moves.append((1, replica))
        self.fleet._schedule()


SAMPLING = Sampling(max_tokens=60, temperature=1.0, seed=11, stop_token_ids=STOP)


def expected():
    ids, found = [2, 3], []
    while not found or found[-1] not in STOP:
        found.append(next_token(ids, SAMPLING.seed + len(found), STOP))
        ids.append(found[-1])
    return found


WHOLE = expected()


def test_the_turn_of_these_tests_is_long_enough():
    assert len(WHOLE) > 6


async def test_a_moved_turn_goes_on_from_its_tokens_with_what_is_left_of_its_budget():
    async with Moving() as run:
        await run.until(3)
        run.move(1)
        await settle()
        await run.rest()
        first, second = run.replicas.made
        [(ids, request, _)] = second.requests
        before = len(ids) - 2
        assert run.found == WHOLE
        assert run.finish == "stop"
        assert 3 <= before < len(WHOLE)
        assert ids == [2, 3, *WHOLE[:before]]
        assert request.max_tokens == 60 - before
        assert list(run.spans) == [(0, at, at + 1) for at in range(len(WHOLE))], "both requests tell their versions"
        assert (first.in_flight, second.in_flight) == (0, 0)
        assert run.fleet.moves == 1
        assert [said for said in run.policy.said if said[0] == "request_turn"] == [("request_turn", 1, 2)], (
            "the books moved at once"
        )


async def test_a_moved_turn_goes_on_in_the_middle_of_its_grammar():
    async with Moving(sampling=replace(SAMPLING, grammar="{}")) as run:
        run.replicas.made[0].forces = run.replicas.made[1].forces = frozenset(WHOLE[::2])
        await run.until(3)
        run.move(1)
        await settle()
        await run.rest()
        first, second = run.replicas.made
        [(ids, request, _)] = second.requests
        assert first.requests[0][1].grammar_tokens == 0
        assert (request.grammar, request.grammar_tokens) == ("{}", len(ids) - 2)
        assert run.forced == [token in first.forces for token in WHOLE]


async def test_the_timeline_says_why_each_turn_goes_where():
    async with Moving() as run:
        await run.until(3)
        run.move(1)
        await settle()
        await run.rest()
    instants = run.timeline.drain().instants
    decisions = {event.name: event.args for event in instants if event.name in ("directed", "move")}
    assert list(decisions) == ["directed", "move"]
    always, weighed = {"key", "replica", "headroom_blocks"}, {"stay_s", "go_s"}
    assert always | weighed | {"rule"} == {field.name for field in fields(Place)}, "nothing of a placement is left out"
    assert all(set(reasons) in (always, always | weighed) for reasons in decisions.values())
    assert decisions["move"]["replica"] == 1


async def test_a_turn_that_ends_by_itself_before_the_abort_arrives_has_ended():
    gate = Gate()
    async with Moving(prepare=lambda replica: setattr(replica, "abort_gate", gate)) as run:
        await run.until(3)
        run.move(1)
        await gate.started.wait()
        await run.rest()
        gate.release()
        await settle()
        assert run.found == WHOLE
        assert run.replicas.made[1].requests == []
        assert run.fleet._turns == {}


async def test_a_turn_whose_replica_dies_before_the_abort_arrives_goes_on_where_it_was_sent():
    gate = Gate()
    async with Moving(prepare=lambda replica: setattr(replica, "abort_gate", gate)) as run:
        await run.until(3)
        run.move(1)
        await gate.started.wait()
        run.replicas.made[0].die()
        gate.release()
        await run.rest()
        assert run.found == WHOLE
        assert [len(replica.requests) for replica in run.replicas.made[:2]] == [1, 1]
        assert [said for said in run.policy.said if said[0] == "request_turn"] == [("request_turn", 1, 2)]


async def test_a_turn_whose_new_replica_dies_while_it_moves_is_placed_again():
    gate = Gate()
    async with Moving(prepare=lambda replica: setattr(replica, "abort_gate", gate)) as run:
        await run.until(3)
        run.move(1)
        await gate.started.wait()
        run.replicas.made[1].die()
        gate.release()
        await settle(3)
        await run.rest()
        assert run.found == WHOLE
        assert ("down", 1) in run.policy.said
        assert [said[0] for said in run.policy.said if said[0] == "request_turn"] == ["request_turn"] * 2


async def test_a_turn_whose_old_and_new_replicas_die_is_placed_again():
    gate = Gate()
    async with Moving(prepare=lambda replica: setattr(replica, "abort_gate", gate)) as run:
        await run.until(3)
        run.move(1)
        await gate.started.wait()
        run.replicas.made[0].die()
        run.replicas.made[1].die()
        gate.release()
        await run.rest()
        assert run.found == WHOLE
        assert [len(replica.requests) for replica in run.replicas.made[:2]] == [1, 0]


async def test_a_replica_that_dies_of_an_abort_is_told_with_that_cause():
    async def abort(request_id):
        run.replicas.made[0].die()
        raise ReplicaDied("replica 0: abort failed: TimeoutError")

    async with Moving() as run:
        await run.until(3)
        run.replicas.made[0].abort = abort
        run.move(1)
        await run.rest()
        await settle()
        assert run.found == WHOLE
        told = [instant.name for instant in run.timeline.drain().instants]
        assert "replica 0 died: replica 0: abort failed: TimeoutError; restart 1 of 1 begins" in told


async def test_two_moves_of_one_turn_end_at_the_last():
    gate = Gate()
    async with Moving(prepare=lambda replica: setattr(replica, "abort_gate", gate)) as run:
        await run.until(2)
        run.move(1)
        await gate.started.wait()
        run.move(0)
        await settle()
        gate.release()
        await settle()
        await run.rest()
        assert run.found == WHOLE
        assert [len(replica.requests) for replica in run.replicas.made] == [2, 0]
        assert run.fleet.moves == 1, "one abort"


async def test_a_move_of_a_turn_that_is_placed_but_has_not_begun_costs_nothing():
    class Twice(Directed):
        def decide(self, now):
            places = super().decide(now)
            return places + [Place(place.key, 1, "at once", 0.0) for place in places]

    replicas = Replicas()
    async with fleet_of(replicas, 2, balancer=Twice()) as fleet:
        async for _ in fleet.turn(1, 0, [2, 3], SAMPLING):
            pass
        fleet.trajectory_ended(1, 9, finished=True)
        assert [len(replica.requests) for replica in replicas.made] == [0, 1]
        assert fleet.moves == 0


async def test_a_move_of_a_trajectory_between_turns_or_gone_is_taken_without_error():
    async with Moving() as run:
        await run.rest()
        run.move(1)
        await settle()
        assert run.replicas.made[1].requests == []


async def test_a_moved_turn_does_not_begin_in_the_middle_of_a_weight_update():
    from tests.unit.engine.fleet.test_fleet import weights

    gate, abort = Gate(), Gate()

    def prepare(replica):
        replica.update_gate, replica.abort_gate = gate, abort

    async with Moving(prepare=prepare) as run, asyncio.TaskGroup() as group:
        await run.until(3)
        run.move(1)
        await abort.started.wait()
        update = group.create_task(run.fleet.update_weights(weights(2)))
        await gate.started.wait()
        abort.release()
        rest = group.create_task(run.rest())
        await settle()
        assert run.replicas.made[1].requests == []
        assert run.replicas.made[0].in_flight == 0
        gate.release()
        await update
        await rest
        assert run.found == WHOLE
        moved = len(run.replicas.made[1].requests[0][0]) - 2
        assert [version for version, _, _ in run.spans] == [0] * moved + [2] * (len(WHOLE) - moved)


async def test_closing_a_turn_that_is_being_moved_leaves_nothing():
    gate = Gate()
    async with Moving(prepare=lambda replica: setattr(replica, "abort_gate", gate)) as run:
        await run.until(3)
        run.move(1)
        await gate.started.wait()
        await run.turn.aclose()
        gate.release()
        await settle()
        assert run.fleet._turns == {}
        assert [replica.in_flight for replica in run.replicas.made] == [0, 0]
        assert run.replicas.made[1].requests == []


async def test_an_abort_that_fails_takes_the_replica_down():
    class Deaf(ScriptedReplica):
        async def abort(self, request_id):
            raise ReplicaDied("it does not listen")

    made = []

    def make(index, core, on_step):
        made.append(Deaf(index, on_step))
        return made[-1]

    policy = Directed()
    async with fleet_of(make, 2, balancer=policy) as fleet:
        turn = fleet.turn(1, 0, [2, 3], SAMPLING)
        found = [*(await anext(turn))[1].token_ids]
        policy.moves.append((1, 1))
        fleet._schedule()
        await settle()
        async for _, delta in turn:
            found += delta.token_ids
        fleet.trajectory_ended(1, 9, finished=True)
        assert found == WHOLE
        assert ("down", 0) in policy.said


# Drains


async def test_a_drained_replica_ends_for_good_when_the_balancer_has_moved_its_turns():
    async with Moving() as run, asyncio.TaskGroup() as group:
        await run.until(3)
        run.move(1)
        drain = group.create_task(run.fleet.drain(0))
        await settle()
        assert not drain.done()
        await run.rest()
        await drain
        await settle()
        assert run.found == WHOLE
        assert run.policy.said[1:] == [("drain", 0), ("down", 0)]
        assert run.fleet.live == [1]
        assert [replica.events for replica in run.replicas.made] == [["start", "shutdown"], ["start"]], "no replacement"
        assert run.fleet.deaths == 0


async def test_a_turn_that_nobody_moves_off_a_drained_replica_goes_on_elsewhere():
    async with Moving() as run:
        run.fleet._supervisor.config = run.fleet.config = replace(run.fleet.config, drain_s=0.01)
        await run.until(3)
        await run.fleet.drain(0)
        await run.rest()
        assert run.found == WHOLE
        assert [len(replica.requests) for replica in run.replicas.made] == [1, 1]
        assert run.fleet.live == [1]


async def test_an_idle_replica_is_drained_at_once_and_new_work_goes_elsewhere():
    async with Moving() as run:
        await run.fleet.drain(0)
        await run.rest()
        assert run.found == WHOLE
        assert [len(replica.requests) for replica in run.replicas.made] == [0, 1]


async def test_a_replica_that_dies_while_it_drains_is_not_replaced():
    async with Moving() as run, asyncio.TaskGroup() as group:
        await run.until(3)
        drain = group.create_task(run.fleet.drain(0))
        await settle(3)
        run.replicas.made[0].die()
        await run.rest()
        await drain
        assert run.found == WHOLE
        assert len(run.replicas.made) == 2


@pytest.mark.parametrize("index", [1, 7])
async def test_what_cannot_be_drained_is_refused(index):
    async with Moving() as run:
        await run.fleet.drain(0)
        with pytest.raises(ValueError, match=f"replica {index} is"):
            await run.fleet.drain(index)
