"""A trace on a simulated fleet: the Balancer gets the events that `engine.fleet.fleet.Fleet` gives it.

- All trajectories arrive at once. A decision follows all events of a moment, samples included, at least `tick_s` after
  the one before. A sample stands for KvSample.steps engine steps, 1 to 32, in which nothing begins or ends.
- Trajectories that wait are decided about again after AGAIN_S without an event, as on the node.
- A placed trajectory reaches its engine at the next step boundary. A move takes effect there too, unless the turn ends.
- Tools start when their turn has ended.
- A replica that dies finishes its step. Its cache is lost, its trajectories arrive again with their tokens so far, and
  an empty replica comes up in its place.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.placement.workload import Traced
from bench.simulator.engine import Engine, Request
from bench.simulator.machine import Machine
from engine.balancing.balancer import Balancer

AGAIN_S = 1.0  # simulated seconds, as the next one
GIVE_UP_S = 60.0  # after so long without an event: longer than any policy's interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One run. busy: share of the engines' time; decide_s: CPU time of all decisions."""

    makespan_s: float
    busy: float
    preemptions: int
    recomputed_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    moves: int
    decisions: int
    decide_s: float


@dataclass(slots=True)
class _Trajectory:
    traced: Traced
    turn: int = 0
    tokens: int = 0  # so far
    to_generate: int = 0  # tokens, in this turn
    held: int = 0  # tokens in whole blocks when it last stopped running
    replica: int = -1
    goal: int = -1  # the replica that it moves to
    state: str = "waiting"  # "waiting" | "running" | "tool" | "done"


@dataclass(frozen=True, slots=True)
class Death:
    """A replica dies at `at_s` and is replaced `back_after_s` later; one that is down already stays so."""

    replica: int
    at_s: float
    back_after_s: float


class Simulation:
    """Runs a trace under a policy to its end, deterministically.

    tick_s: None for the shortest step of an engine. longest_segment: as in `bench.simulator.engine.Engine`.
    """

    def __init__(
        self,
        policy: Balancer,
        trace: Sequence[Traced],
        machine: Machine,
        replicas: int,
        *,
        longest_segment: int = 32,
        tick_s: float | None = None,
        deaths: Sequence[Death] = (),
    ) -> None:
        self._new = lambda: Engine(machine, longest_segment)
        self.engines = [self._new() for _ in range(replicas)]
        self.dead: list[Engine] = []
        self.now = self.ended_at_s = 0.0
        self.moves = self.decisions = 0
        self.decide_s = 0.0
        self._policy = policy
        self._machine = machine
        self._tick_s = machine.shortest_step_s if tick_s is None else tick_s
        self._states = [_Trajectory(row) for row in trace]
        self._open = len(trace)  # not done
        self._heard_at = 0.0
        self.turn_ended: Callable[[Traced, int], None] = lambda traced, turn: None  # told of each turn, from 0
        self._waiting = 0  # to be placed
        self._events: list[tuple[float, int, str, int]] = []
        self._serial = 0
        self._ends_at = [-1.0] * replicas  # when each engine's segment ends
        self._wanted = False
        self._decided_at = self._due = -math.inf
        self._deaths = deaths
        self._dying: dict[int, float] = {}  # replica: seconds until it is back
        self._down: set[int] = set()

    def run(self) -> Result:
        """Raises RuntimeError when trajectories wait and nothing will happen any more."""
        self.begin()
        while self._events or self._open:
            self.advance()
        return self._result()

    def begin(self) -> None:
        """Brings the replicas up and lets the trace arrive."""
        for index, engine in enumerate(self.engines):
            self._policy.replica_up(index, engine.machine.blocks, engine.machine.block_size)
        for key in range(len(self._states)):
            self._request_turn(key)
        for number, death in enumerate(self._deaths):
            self._push(death.at_s, "death", number)
        self._decide()

    def arrive(self, trace: Sequence[Traced], now: float) -> None:
        """Adds trajectories that arrive at `now`, which is not before anything that has happened."""
        self.now = self._heard_at = now
        for row in trace:
            self._states.append(_Trajectory(row))
            self._open += 1
            self._request_turn(len(self._states) - 1)
        self._schedule()

    @property
    def next_at(self) -> float:
        """Returns when something happens next, which is infinite when nothing is under way."""
        event_at = self._events[0][0] if self._events else math.inf
        return min(event_at, self._decided_at + AGAIN_S) if self._waiting else event_at

    def advance(self) -> None:
        """Makes the next event happen. Raises RuntimeError where trajectories wait and there will be none."""
        again_at = self._decided_at + AGAIN_S
        if not self._events and (not self._waiting or again_at > self._heard_at + GIVE_UP_S):
            raise RuntimeError(f"{self._open} trajectories are left at {self.now:.1f} s and nothing will happen")
        if self._waiting and not (self._events and self._events[0][0] <= again_at):
            self.now = again_at
            self._decide()
            return
        self.now, _, kind, number = heapq.heappop(self._events)
        self._heard_at = self.now
        handle = {"engine": self._segment_ended, "tool": self._request_turn, "death": self._kill, "up": self._up}
        if kind in handle:
            handle[kind](number)
        if self._wanted and not (self._events and self._events[0][0] <= self.now):
            self._schedule()

    def _result(self) -> Result:
        engines = self.engines + self.dead
        return Result(
            makespan_s=self.ended_at_s,
            busy=sum(engine.busy_s for engine in engines) / (len(self.engines) * self.ended_at_s),
            preemptions=sum(engine.preemptions for engine in engines),
            recomputed_tokens=sum(engine.recomputed_tokens for engine in engines),
            prefilled_tokens=sum(engine.prefilled_tokens for engine in engines),
            generated_tokens=sum(state.traced.gen_tokens for state in self._states),
            moves=self.moves,
            decisions=self.decisions,
            decide_s=self.decide_s,
        )

    def _push(self, at: float, kind: str, number: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, kind, number))

    def _request_turn(self, key: int) -> None:
        """Asks the policy for a place for the next turn, or after a death for the rest of one."""
        state = self._states[key]
        if not state.to_generate:
            turn = state.traced.turns[state.turn]
            state.tokens += turn.prompt_new_tokens
            state.to_generate = turn.gen_tokens
        state.state = "waiting"
        self._waiting += 1
        prompt_tokens = state.traced.turns[0].prompt_new_tokens
        self._policy.request_turn(key, state.traced.group, prompt_tokens, state.tokens, self.now)
        self._wanted = True

    def _schedule(self) -> None:
        """Decides now or as soon as the tick allows."""
        due = self._decided_at + self._tick_s
        if due <= self.now:
            self._decide()
        elif due > self._due:
            self._due = due
            self._push(due, "decide", 0)

    def _decide(self) -> None:
        self._wanted = False
        self._decided_at = self.now
        began = time.thread_time()
        places = self._policy.decide(self.now)
        self.decide_s += time.thread_time() - began
        self.decisions += 1
        for place in places:
            state = self._states[place.key]
            if state.state == "running":
                self._move(place.key, place.replica)
            else:
                assert state.state == "waiting", f"trajectory {place.key} is placed while {state.state}"
                self._waiting -= 1
                self._submit(place.key, place.replica)

    def _submit(self, key: int, replica: int) -> None:
        assert replica not in self._down, f"trajectory {key} is placed on replica {replica}, which is down"
        state = self._states[key]
        state.state, state.replica, state.goal = "running", replica, -1
        prompt_tokens = state.traced.turns[0].prompt_new_tokens
        engine = self.engines[replica]
        engine.submit(Request(key, state.traced.group, prompt_tokens, state.tokens, state.to_generate, state.held))
        self._cut(replica)

    def _cut(self, replica: int) -> None:
        engine = self.engines[replica]
        self._schedule_end(replica, engine.begin(self.now) if engine.idle else engine.cut(self.now))

    def _schedule_end(self, replica: int, until: float | None) -> None:
        if until is not None and until != self._ends_at[replica]:
            self._ends_at[replica] = until
            self._push(until, "engine", replica)

    def _move(self, key: int, replica: int) -> None:
        """Moves a trajectory at the next step boundary, unless its turn ends there."""
        state = self._states[key]
        self.moves += 1
        if state.goal < 0:
            assert replica != state.replica, f"trajectory {key} is moved to where it runs"
            self.engines[state.replica].abort(key)
            self._cut(state.replica)
        state.goal = replica

    def _segment_ended(self, replica: int) -> None:
        if self._ends_at[replica] != self.now:
            return  # it was cut
        self._ends_at[replica] = -1.0
        engine = self.engines[replica]
        outcome = engine.end()
        self._policy.sample(replica, outcome.sample, self.now)
        self._wanted = True
        for request in outcome.finished:
            self._turn_ended(request.key)
        for request in outcome.aborted:
            self._stopped(request)
            goal = self._states[request.key].goal
            if goal in self._down:
                self._request_turn(request.key)
            else:
                self._submit(request.key, goal)
        if replica in self._dying:
            self._died(replica)
        elif engine.idle:
            self._schedule_end(replica, engine.begin(self.now))

    def _stopped(self, request: Request) -> None:
        state = self._states[request.key]
        state.tokens, state.to_generate, state.held = request.tokens, request.generate, request.held

    def _kill(self, number: int) -> None:
        death = self._deaths[number]
        if death.replica in self._down or death.replica in self._dying:
            return
        self._dying[death.replica] = death.back_after_s
        if self.engines[death.replica].idle:
            self._died(death.replica)
        else:
            self._cut(death.replica)

    def _died(self, replica: int) -> None:
        self._push(self.now + self._dying.pop(replica), "up", replica)
        self._down.add(replica)
        engine = self.engines[replica]
        self.engines[replica] = self._new()
        self.dead.append(engine)
        self._policy.replica_down(replica)
        for request in engine.drop():
            self._stopped(request)
            self._request_turn(request.key)
        self._wanted = True

    def _up(self, replica: int) -> None:
        self._down.remove(replica)
        self._policy.replica_up(replica, self._machine.blocks, self._machine.block_size)
        self._wanted = True

    def _turn_ended(self, key: int) -> None:
        state = self._states[key]
        turn = state.traced.turns[state.turn]
        state.tokens += state.to_generate
        state.to_generate = 0
        size = self._machine.block_size
        state.held = (state.tokens - 1) // size * size
        state.turn += 1
        self._wanted = True
        self.turn_ended(state.traced, state.turn - 1)
        if state.turn < len(state.traced.turns):
            state.state = "tool"
            self._policy.turn_finished(key, state.tokens, self.now)
            self._push(self.now + turn.tool_latency_s, "tool", key)
            return
        state.state = "done"
        self.ended_at_s = self.now
        self._open -= 1
        self._policy.trajectory_ended(key, state.tokens, True)
