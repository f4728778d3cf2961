"""Places trajectories by KV cache: late binding, admission by predicted use, places held while tools run.

Invariants (`check` asserts the first two, tests the others)
- A trajectory is in exactly one of: waiting (fresh, ready or parked), running on a replica, tool-waiting, gone.
- It is in the active set of at most one replica. What is reserved there when it enters is released when it leaves, so
  that the sum of reservations after a run is exactly zero.
- Ready trajectories (their KV is still on a replica) are placed first, then fresh ones in their order, then parked ones
  (their KV was given up), the smallest first. Fresh ones that come after one was parked wait for it. Once forecasts are
  current, no replica that is not draining has an empty active set while a trajectory waits.
- A trajectory is moved at most `moves` times for the sake of speed, and never while others wait for a place.

vLLM's free blocks count evictable prefixes as free, so they serve only as a hard check. What tool-waiting trajectories
hold is counted here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.balancing.balancer import Place
from engine.balancing.kv_ledger import H, KvLedger, TrackedReplica, TrackedTrajectory
from engine.balancing.length_forecast import Ints, LengthForecast, Reals
from engine.balancing.step_cost import LearntStepCost
from engine.replica.port import KvSample
from sandbox.require import at_least, none_or, require, within

MARGIN = 0.075  # share of the blocks that full caution keeps free
ROOMY = 0.85  # share of the blocks up to which no forecast is needed
SPREAD = 0.5  # standard deviations of the predicted use that full caution keeps free besides
SHED_ABOVE = 0.95  # share of the blocks whose predicted use makes trajectories give their places up
MARKED = 3.0  # running trajectories told to leave, in tokens, over the excess: not all end their turns in time
TOGETHER = 0.25  # a group stays together if its prompt is at least this share of the longest growth
DEAR_STEPS = 200.0  # caution is full if one preemption costs what one more trajectory brings in so many steps
UNKNOWN_HOLD_S = 25.0  # until the cost of a prefill is known: that of a full KV cache on an H200 with a 14B model
GAIN = 0.15  # share of the remaining time that a move must save
FORECASTS = 1024  # trajectories per decision whose growth is predicted anew, which takes a millisecond or two
LOOK_STEPS = 32  # steps of the fullest replica between two searches for moves


@dataclass(frozen=True, kw_only=True, slots=True)
class _Faster:
    """A replica where a trajectory is expected to end sooner, with the seconds to its end if it stays or goes."""

    replica: TrackedReplica
    stay_s: float
    go_s: float


class KvAware:
    """Late binding and admission by predicted KV use.

    A replica admits a trajectory when the predicted use of its active set, tool-waiting ones included, stays below its
    blocks at every horizon (`engine.balancing.length_forecast`), and vLLM's live free blocks hold what must be computed
    now. `caution`, in [0, 1], is how much of SPREAD and of MARGIN must fit too. None: it is learnt from what a
    preemption costs and what one more trajectory brings. Sizes and costs are learnt from scratch, and kept for the next
    steps.

    Forecasts err, most of all while the first trajectories are still going. So a replica that is expected to overflow
    within a turn sheds the smallest trajectories, which are the cheapest to compute again: tool-waiting ones at once,
    running ones when their turn ends. These queue as parked. So does one that waits for tools longer than `hold_s`
    (None: what recomputing a full cache takes, learnt), and the longest waiting if more is held than fits.

    When none waits for a place, trajectories move from slow replicas to fast ones, each at most `moves` times. moves
    must be 0 if a seed is to repeat a run, since a request that moves continues under another seed.
    """

    def __init__(
        self,
        max_tokens: int,
        caution: float | None = None,
        hold_s: float | None = None,
        history: int = 4096,
        moves: int = 3,
    ) -> None:
        require("max_tokens", max_tokens, at_least(1))
        require("caution", caution, none_or(within("[0, 1]")))
        require("moves", moves, at_least(0))
        self.max_tokens = max_tokens
        self.caution = caution
        self.hold_s = hold_s
        self.moves = moves
        self.lengths = LengthForecast(max_tokens, history=history)
        self.costs = LearntStepCost()
        self._ledger = KvLedger(self.lengths)
        self._stale: set[int] = set()  # replicas whose forecast is to be made again
        self._outdated: set[int] = set()  # those whose forecast is older than what was learnt last
        self._learnt_at = 0  # steps of all replicas when the growth was last learnt
        self._ended = 0  # trajectories that ended since then
        self._turns = 0
        self._turn_tokens = 0.0  # growth of a trajectory in a turn, averaged over some hundred turns
        self._most = 0  # most trajectories at once since there were none
        self._steps = 0
        self._hold_now_s = UNKNOWN_HOLD_S if hold_s is None else hold_s
        self._caution_now = 1.0 if caution is None else caution
        self._next_look_at = -math.inf

    def replica_up(self, replica: int, blocks: int, block_size: int) -> None:
        if replica in self._ledger.replicas:
            raise ValueError(f"replica {replica} is up already")
        self._ledger.add_replica(replica, blocks, block_size)

    def replica_down(self, replica: int) -> None:
        self._ledger.drop_replica(replica)
        self.costs.forget(replica)
        self._stale.discard(replica)
        self._outdated.discard(replica)

    def replica_drain(self, replica: int) -> None:
        state = self._ledger.replicas[replica]
        self._ledger.drain(state)
        for trajectory in list(state.active.values()):
            if trajectory.state == "ready":
                self._ledger.dequeue(trajectory)
                self._ledger.release(trajectory)
                self._ledger.enqueue(trajectory, "parked")
            elif trajectory.state == "tool":
                self._ledger.release(trajectory)

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        state = self._ledger.replicas.get(replica)
        if state is None:
            return
        self.costs.sample(replica, sample, now)
        self._ledger.sample(state, sample)
        self._steps += sample.steps
        if state.steps - state.forecast_at >= max(self.lengths.bin_tokens, state.block_size // 4):
            self._stale.add(replica)

    def request_turn(self, key: int, group: int, prompt_tokens: int, tokens: int, now: float) -> None:
        trajectory = self._ledger.trajectories.get(key)
        if trajectory is None:
            self._ledger.enqueue(self._ledger.add(key, group, prompt_tokens, tokens), "fresh")
            return
        if trajectory.state == "running" and trajectory.moves:  # its old replica died before it moved
            self._ledger.release(trajectory)
        elif trajectory.state != "tool":
            raise ValueError(f"trajectory {key} arrives while {trajectory.state}")
        trajectory.tokens = tokens
        if trajectory.home is not None and now - trajectory.since > self._hold_now_s:
            self._ledger.release(trajectory)
        self._ledger.enqueue(trajectory, "ready" if trajectory.home is not None else "parked")

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        trajectory = self._ledger.trajectories[key]
        if trajectory.state not in ("running", "tool"):  # "tool": its replica went down as the turn ended
            raise ValueError(f"trajectory {key} ends a turn while {trajectory.state}")
        self._turns += 1
        self._turn_tokens += (tokens - trajectory.tokens - self._turn_tokens) / min(self._turns, 256)
        trajectory.tokens = tokens
        trajectory.state = "tool"
        trajectory.since = now
        if trajectory.leaves or (trajectory.home is not None and self._ledger.replicas[trajectory.home].draining):
            self._ledger.release(trajectory)
        if trajectory.home is not None:
            self._ledger.tool_waiting[key] = trajectory

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        trajectory = self._ledger.trajectories.get(key)
        if trajectory is None:
            return
        if finished and trajectory.state not in self._ledger.queues:
            self.lengths.end(trajectory.group, max(0, tokens - trajectory.group.prompt_tokens))
            self._ended += 1
        self._ledger.remove(trajectory)

    def decide(self, now: float) -> list[Place]:
        ledger = self._ledger
        placed: list[Place] = []
        if not ledger.replicas:
            return []
        going = len(ledger.trajectories)
        self._most = max(going, self._most) if going else 0
        crowded = bool(ledger.queues["parked"] or ledger.queues["fresh"])
        while ledger.queues["ready"]:
            _, trajectory = ledger.queues["ready"].popitem(last=False)
            placed.append(self._resume_at_home(trajectory, crowded))
        placed += self._evacuate()
        all_fit = self._fits_worst_case()
        if not all_fit:
            self._refresh(now, crowded)
        if crowded:
            if all_fit or not self._outdated:  # otherwise replicas with a new forecast would get all
                placed += self._admit()
        elif now >= self._next_look_at:
            placed += self._rebalance(now)
        return placed

    def waiting(self) -> int:
        return self._ledger.waiting()

    def reserved_blocks(self) -> float:
        """Returns the sum over the replicas of what is reserved at the fullest horizon."""
        return sum(int(state.reserved_H[:H].max()) / state.block_size for state in self._ledger.replicas.values())

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        self._ledger.check()

    def _learnt_hold_s(self) -> float:
        if self.hold_s is not None:
            return self.hold_s
        tokens = max((state.blocks * state.block_size for state in self._ledger.replicas.values()), default=0)
        cost_s = self.costs.prefill_s(tokens)
        return UNKNOWN_HOLD_S if cost_s is None else cost_s

    def _learnt_caution(self, active: list[TrackedTrajectory], sizes_N: Ints) -> float:
        """Returns the tokens that a preemption loses, over those that one more trajectory brings in DEAR_STEPS steps.

        A preempted trajectory is computed again, and nothing else on its replica meanwhile. One more trajectory brings
        the more, the less of a step grows with the batch.
        """
        fixed_s = self.costs.step_s(0)
        if self.caution is not None or not active or not fixed_s:
            return self._caution_now
        running = sum(trajectory.state == "running" for trajectory in active) / len(self._ledger.replicas)
        tokens = float(sizes_N.mean()) + sum(trajectory.group.prompt_tokens for trajectory in active) / len(active)
        again_s = self.costs.prefill_s(tokens)
        assert again_s is not None
        return min(1.0, running * again_s / fixed_s / DEAR_STEPS)

    def _refresh(self, now: float, crowded: bool) -> None:
        """Learns lengths and makes forecasts anew. If trajectories wait for a place, those whose tools take too long
        give theirs up; if none waits, only replicas that are expected to be more than half full matter.
        """
        ledger = self._ledger
        in_tail = not crowded and 2 * len(ledger.trajectories) <= self._most
        if crowded:
            self._release_long_waiting(now)
        learn_steps = 2 * len(ledger.replicas) * self.lengths.bin_tokens
        if self._ended >= 8 + len(ledger.trajectories) // 64 or self._steps - self._learnt_at >= learn_steps:
            active = [trajectory for state in ledger.replicas.values() for trajectory in state.active.values()]
            sizes_N = ledger.sizes(active)
            self.lengths.refresh(sizes_N, [trajectory.group for trajectory in active], list(ledger.groups.values()))
            self._ended = 0
            self._learnt_at = self._steps
            self._hold_now_s = self._learnt_hold_s()
            self._caution_now = self._learnt_caution(active, sizes_N)
            self._stale.update(ledger.replicas)
            self._outdated.update(ledger.replicas)
        done = 0
        for index in sorted(self._stale):
            state = ledger.replicas[index]
            used = 1 - ledger.arrays.free_blocks_R[index] / state.blocks
            tight = 2 * max(used, state.reserved_H[:H].max() / (state.blocks * state.block_size)) > 1
            if done < FORECASTS and (crowded or tight):  # the rest follows soon, since active trajectories bring events
                done += len(state.active)
                ledger.forecast(state)
                self._evict_overcommit(state)
                if in_tail:  # a trajectory that left would only be the last to end
                    for trajectory in state.active.values():
                        trajectory.leaves = False
                else:
                    self._shed(state)
                self._stale.remove(index)
                self._outdated.discard(index)

    def _release_long_waiting(self, now: float) -> None:
        waiting = self._ledger.tool_waiting
        while waiting:
            longest = next(iter(waiting.values()))
            if now - longest.since <= self._hold_now_s:
                return
            self._ledger.release(longest)

    def _evict_overcommit(self, state: TrackedReplica) -> None:
        """Releases the longest waits for tools while more is held than fits: the engine has lost their prefixes."""
        capacity_tokens = state.blocks * state.block_size
        if state.reserved_H[0] > capacity_tokens:
            for trajectory in list(self._ledger.tool_waiting.values()):
                if trajectory.home == state.index and state.reserved_H[0] > capacity_tokens:
                    self._ledger.release(trajectory)

    def _shed(self, state: TrackedReplica) -> None:
        """Lets the smallest give their places up if more than SHED_ABOVE will be held before a turn has passed."""
        horizons = self.lengths.horizons_within(self._turn_tokens)
        fullest = int(state.reserved_H[:horizons].argmax())
        over_tokens = float(state.reserved_H[fullest]) - SHED_ABOVE * state.blocks * state.block_size
        active = list(state.active.values())
        for trajectory in active:
            trajectory.leaves = False
        if over_tokens <= 0:
            return
        for trajectory in sorted(active, key=lambda each: (each.state != "tool", self._ledger.length(each))):
            if over_tokens <= 0:
                return
            assert trajectory.reserved_H is not None
            held_tokens = float(trajectory.reserved_H[fullest])
            if trajectory.state == "tool":
                self._ledger.release(trajectory)
                over_tokens -= held_tokens
            elif trajectory.state == "running":
                trajectory.leaves = True
                over_tokens -= held_tokens / MARKED

    def _fits_worst_case(self) -> bool:
        """Returns whether all fit even if they grow to the bound; then no forecast is needed."""
        waiting = len(self._ledger.queues["parked"]) + len(self._ledger.queues["fresh"])
        states = self._ledger.replicas.values()
        most = max(len(state.active) for state in states) + waiting
        return most * self.max_tokens <= ROOMY * min(state.blocks * state.block_size for state in states)

    def _admit(self) -> list[Place]:
        placed: list[Place] = []
        while (trajectory := self._ledger.first_in_line()) is not None:
            beside = self._beside_its_group(trajectory)
            choice = self._choose(trajectory) if beside is None else (beside, "group")
            if choice is None:
                break  # the first in line waits, and none overtakes it
            replica, rule = choice
            self._ledger.dequeue(trajectory)
            placed.append(self._start(trajectory, replica, rule))
        return placed

    def _choose(self, trajectory: TrackedTrajectory) -> tuple[TrackedReplica, str] | None:
        """Returns the replica with most headroom if the trajectory fits there, or an empty one, and the rule."""
        headroom_R = self._headroom(trajectory)
        best = int(headroom_R.argmax())
        if headroom_R[best] >= 0:
            return self._ledger.replicas[best], "headroom"
        states = self._ledger.replicas.values()
        return next(((state, "empty") for state in states if not state.active and not state.draining), None)

    def _beside_its_group(self, trajectory: TrackedTrajectory) -> TrackedReplica | None:
        """Returns a replica that has its group, so that the prompt need not be computed again.

        Returns None unless the prompt is long beside what may follow, KV is plentiful, and the replica has less than
        its share of the trajectories.
        """
        prompt_tokens = trajectory.group.prompt_tokens
        if prompt_tokens < TOGETHER * (self.max_tokens - prompt_tokens):
            return None
        live = [state for state in self._ledger.replicas.values() if not state.draining]
        share = len(self._ledger.trajectories) / max(1, len(live))
        for state in live:
            fit = min(share, ROOMY * state.blocks * state.block_size / self.max_tokens)
            if state.index in trajectory.group.replicas and len(state.active) < share <= fit:
                return state if self._headroom(trajectory)[state.index] >= 0 else None
        return None

    def _headroom(self, trajectory: TrackedTrajectory) -> Reals:
        return self._ledger.headroom_tokens(trajectory, 1 - MARGIN * self._caution_now, SPREAD * self._caution_now)

    def _start(
        self, trajectory: TrackedTrajectory, state: TrackedReplica, rule: str, stay_s: float = 0.0, go_s: float = 0.0
    ) -> Place:
        self._ledger.reserve(trajectory, state)
        headroom = state.blocks - int(state.reserved_H[:H].max()) / state.block_size
        return Place(trajectory.key, state.index, rule, headroom, stay_s, go_s)

    def _resume_at_home(self, trajectory: TrackedTrajectory, crowded: bool) -> Place:
        """Places it at home, where its prefix is, or in the tail where it is faster by more than the prefix costs."""
        assert trajectory.home is not None
        home = self._ledger.replicas[trajectory.home]
        may_move = not crowded and trajectory.moves < self.moves
        faster = self._faster(trajectory, home, len(home.active)) if may_move else None
        if faster is not None:
            trajectory.moves += 1
            return self._start(trajectory, faster.replica, "tail", stay_s=faster.stay_s, go_s=faster.go_s)
        return self._start(trajectory, home, "home")

    def _evacuate(self) -> list[Place]:
        """Moves trajectories that run on a draining replica, as far as others have room."""
        placed = []
        for state in [state for state in self._ledger.replicas.values() if state.draining]:
            for trajectory in list(state.active.values()):
                choice = self._choose(trajectory)
                if choice is None:
                    break
                replica, _ = choice
                trajectory.moves += 1
                placed.append(self._start(trajectory, replica, "drain"))
        return placed

    def _rebalance(self, now: float) -> list[Place]:
        """Moves a few trajectories from the fullest replica to the emptiest, if that pays. None waits for a place."""
        live = [state for state in self._ledger.replicas.values() if not state.draining]
        step_s = self.costs.step_s(max((len(state.active) for state in live), default=0))
        if step_s is None or not live:
            return []
        self._next_look_at = now + LOOK_STEPS * step_s
        placed: list[Place] = []
        for _ in range(1 + len(live) // 4):
            fullest = max(live, key=lambda state: len(state.active))
            place = self._move_one(fullest)
            if place is None:
                break
            placed.append(place)
        return placed

    def _move_one(self, state: TrackedReplica) -> Place | None:
        """Moves one of the trajectories that run there: one with much to come and little to compute again."""
        running = [
            trajectory
            for trajectory in state.active.values()
            if trajectory.state == "running" and trajectory.moves < self.moves
        ]
        if not running:
            return None
        rests_N = self.lengths.expected_remaining(self._ledger.sizes(running))
        lengths_N = np.array([self._ledger.length(trajectory) for trajectory in running])
        for index in np.argsort(lengths_N - rests_N)[:4]:
            trajectory = running[index]
            faster = self._faster(trajectory, state, len(state.active))
            if faster is not None:
                trajectory.moves += 1
                return self._start(trajectory, faster.replica, "level", stay_s=faster.stay_s, go_s=faster.go_s)
        return None

    def _faster(self, trajectory: TrackedTrajectory, home: TrackedReplica, load: int) -> _Faster | None:
        """Returns a replica where it would end sooner by GAIN. The recomputed prefix counts twice: it stops others."""
        remaining = float(self.lengths.expected_remaining(self._ledger.sizes([trajectory]))[0])
        step_here_s = self.costs.step_s(load)
        recompute_s = self.costs.prefill_s(2 * self._ledger.length(trajectory))
        if step_here_s is None or recompute_s is None:
            return None
        others = [state for state in self._ledger.replicas.values() if state is not home and not state.draining]
        other = min(others, key=lambda state: len(state.active), default=None)
        if other is None or self._headroom(trajectory)[other.index] < 0:
            return None
        step_there_s = self.costs.step_s(len(other.active) + 1)
        assert step_there_s is not None
        stay_s = remaining * step_here_s
        go_s = recompute_s + remaining * step_there_s
        if go_s >= (1 - GAIN) * stay_s:
            return None
        return _Faster(replica=other, stay_s=stay_s, go_s=go_s)
