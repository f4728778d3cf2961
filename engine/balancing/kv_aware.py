"""Placement by KV cache: late binding, admission by predicted use, places of tool-waiting trajectories held.

Invariants (`check` states the first two, its tests the others)
- A trajectory is in exactly one of: waiting (fresh, ready or parked), running on a replica, tool-waiting, gone.
- It is in the active set of at most one replica; what is reserved there when it enters is released when it leaves,
  so that the sum of reservations after a run is exactly zero.
- Order: ready (its KV is still on a replica) before parked (its KV was given up) before fresh; each first come first
  served. Once forecasts are current, no replica that is not draining has an empty active set while one waits.
- A trajectory is moved at most `moves` times for the sake of speed, and never while others wait for a place.

vLLM's free blocks count evictable prefixes as free: they are a hard check only. What tool-waiting trajectories hold is
counted here.
"""

from __future__ import annotations

import math

import numpy as np

from engine.balancing.balancer import Place
from engine.balancing.kv_ledger import Books, H, Item, Replica
from engine.balancing.length_forecast import Growth, Ints, Reals
from engine.balancing.step_cost import StepTime
from engine.ports import KvSample

MARGIN = 0.15  # share of the blocks that full caution keeps free
DEAR_STEPS = 200.0  # full caution where a preemption costs what one trajectory more brings in so many steps
UNKNOWN_HOLD_S = 25.0  # until the cost of a prefill is known: that of a full KV cache on an H200 with a 14B model
GAIN = 0.15  # share of the remaining time that a move must save
FORECASTS = 1024  # trajectories per decision whose growth is predicted anew: a millisecond or two
LOOK_STEPS = 32  # steps of the slowest replica between two looks for moves


class KvAware:
    """Late binding and admission by predicted KV use.

    A replica admits a trajectory when the predicted use of its active set, tool-waiting ones included, stays below its
    blocks at every horizon (`engine.balancing.length_forecast`), and vLLM's live free blocks hold what must be computed
    now. `caution`, in [0, 1], is how many standard deviations of that use and how much of MARGIN must fit too; None:
    learnt from what a preemption costs and what one trajectory more brings. Sizes and costs are learnt from scratch;
    what was learnt stays for the next steps.
    A trajectory that waits for tools longer than `hold_s` (None: what recomputing a full cache costs, learnt) gives its
    place up and queues as parked, and so do those who wait longest where more is held than there is. When nobody waits
    for a place, trajectories move from slow replicas to fast ones, each at most `moves` times: 0 where a seed must
    repeat a run, since a request that moves goes on under another seed.
    """

    def __init__(
        self,
        max_tokens: int,
        caution: float | None = None,
        hold_s: float | None = None,
        history: int = 4096,
        moves: int = 3,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if caution is not None and not 0 <= caution <= 1:
            raise ValueError(f"caution must be in [0, 1], got {caution}")
        if moves < 0:
            raise ValueError(f"moves must be at least 0, got {moves}")
        self.max_tokens = max_tokens
        self.caution = caution
        self.hold_s = hold_s
        self.moves = moves
        self.growth = Growth(max_tokens, history=history)
        self.costs = StepTime()
        self._books = Books(self.growth)
        self._stale: set[int] = set()  # replicas whose forecast is to be made again
        self._outdated: set[int] = set()  # those whose forecast is from before what was learnt last
        self._learnt_at = 0  # steps of all replicas when the growth was last learnt
        self._ended = 0  # since then
        self._steps = 0
        self._hold_now_s = UNKNOWN_HOLD_S if hold_s is None else hold_s
        self._caution_now = 1.0 if caution is None else caution
        self._look_at = -math.inf

    def replica_up(self, replica: int, blocks: int, block_size: int) -> None:
        if replica in self._books.replicas:
            raise ValueError(f"replica {replica} is up already")
        self._books.add_replica(replica, blocks, block_size)

    def replica_down(self, replica: int) -> None:
        self._books.drop_replica(replica)
        self.costs.forget(replica)
        self._stale.discard(replica)
        self._outdated.discard(replica)

    def replica_drain(self, replica: int) -> None:
        state = self._books.replicas[replica]
        self._books.drain(state)
        for item in list(state.active.values()):
            if item.state == "ready":
                self._books.dequeue(item)
                self._books.release(item)
                self._books.enqueue(item, "parked")
            elif item.state == "tool":
                self._books.release(item)

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        state = self._books.replicas.get(replica)
        if state is None:
            return
        self.costs.sample(replica, sample, now)
        self._books.sample(state, sample)
        self._steps += sample.steps
        if state.steps - state.forecast_at >= max(self.growth.bin_tokens, state.block_size // 4):
            self._stale.add(replica)

    def arrive(self, key: int, group: int, prompt_tokens: int, tokens: int, now: float) -> None:
        item = self._books.items.get(key)
        if item is None:
            self._books.enqueue(self._books.add(key, group, prompt_tokens, tokens), "fresh")
            return
        if item.state == "running" and item.moves:  # its old replica died before it had moved
            self._books.release(item)
        elif item.state != "tool":
            raise ValueError(f"trajectory {key} arrives while {item.state}")
        item.tokens = tokens
        if item.home is not None and now - item.since > self._hold_now_s:
            self._books.release(item)
        self._books.enqueue(item, "ready" if item.home is not None else "parked")

    def turn_done(self, key: int, tokens: int, now: float) -> None:
        item = self._books.items[key]
        if item.state not in ("running", "tool"):  # "tool": its replica went down as the turn ended
            raise ValueError(f"trajectory {key} ends a turn while {item.state}")
        item.tokens, item.state, item.since = tokens, "tool", now
        if item.home is not None and self._books.replicas[item.home].draining:
            self._books.release(item)
        if item.home is not None:
            self._books.idle[key] = item

    def leave(self, key: int, tokens: int, finished: bool) -> None:
        item = self._books.items.get(key)
        if item is None:
            return
        if finished and item.state not in self._books.queues:
            self.growth.end(item.kin, max(0, tokens - item.kin.prompt_tokens))
            self._ended += 1
        self._books.remove(item)

    def decide(self, now: float) -> list[Place]:
        books, placed = self._books, []
        if not books.replicas:
            return []
        crowded = bool(books.queues["parked"] or books.queues["fresh"])
        while books.queues["ready"]:
            _, item = books.queues["ready"].popitem(last=False)
            placed.append(self._return(item, crowded))
        placed += self._flee()
        if not (plenty := self._plenty()):
            self._refresh(now, crowded)
        if crowded:
            if plenty or not self._outdated:  # else those with a new forecast would get all
                placed += self._admit()
        elif now >= self._look_at:
            placed += self._level(now)
        return placed

    def waiting(self) -> int:
        return self._books.waiting()

    def reserved_blocks(self) -> float:
        """Sum over the replicas of what is reserved at the fullest horizon."""
        return sum(int(state.reserved_H[:H].max()) / state.block_size for state in self._books.replicas.values())

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        self._books.check()

    def _hold(self) -> float:
        if self.hold_s is not None:
            return self.hold_s
        tokens = max((state.blocks * state.block_size for state in self._books.replicas.values()), default=0)
        cost_s = self.costs.prefill_s(tokens)
        return UNKNOWN_HOLD_S if cost_s is None else cost_s

    def _caution(self, active: list[Item], sizes_N: Ints) -> float:
        """A preempted trajectory is computed again, and nothing else on its replica meanwhile; one that was admitted
        too many brings the more, the less of a step grows with the batch: tokens lost over tokens won per step.
        """
        fixed_s = self.costs.step_s(0)
        if self.caution is not None or not active or not fixed_s:
            return self._caution_now
        running = sum(item.state == "running" for item in active) / len(self._books.replicas)
        tokens = float(sizes_N.mean()) + sum(item.kin.prompt_tokens for item in active) / len(active)
        again_s = self.costs.prefill_s(tokens)
        assert again_s is not None
        return min(1.0, running * again_s / fixed_s / DEAR_STEPS)

    def _refresh(self, now: float, crowded: bool) -> None:
        """Growth is learnt and forecasts are made anew. Where trajectories wait for a place, those whose tools take too
        long give up theirs; where none waits, only replicas matter that are expected to be more than half full.
        """
        books = self._books
        while crowded and books.idle and now - next(iter(books.idle.values())).since > self._hold_now_s:
            books.release(next(iter(books.idle.values())))
        learn_steps = 2 * len(books.replicas) * self.growth.bin_tokens
        if self._ended >= 8 + len(books.items) // 64 or self._steps - self._learnt_at >= learn_steps:
            active = [item for state in books.replicas.values() for item in state.active.values()]
            sizes_N = books.sizes(active)
            self.growth.refresh(sizes_N, [item.kin for item in active], list(books.kins.values()))
            self._ended, self._learnt_at = 0, self._steps
            self._hold_now_s = self._hold()
            self._caution_now = self._caution(active, sizes_N)
            self._stale.update(books.replicas)
            self._outdated.update(books.replicas)
        done = 0
        for index in sorted(self._stale):
            state = books.replicas[index]
            tight = 2 * state.reserved_H[:H].max() > state.blocks * state.block_size
            if done < FORECASTS and (crowded or tight):  # the rest has its turn soon: who is active brings an event
                done += len(state.active)
                books.forecast(state)
                self._relieve(state)
                self._stale.remove(index)
                self._outdated.discard(index)

    def _relieve(self, state: Replica) -> None:
        """More is held than there is: the engine has lost the prefixes of those who wait longest for tools."""
        capacity_tokens = state.blocks * state.block_size
        if state.reserved_H[0] > capacity_tokens:
            for item in [item for item in self._books.idle.values() if item.home == state.index]:
                if state.reserved_H[0] > capacity_tokens:
                    self._books.release(item)

    def _plenty(self) -> bool:
        """Even if all grow to the bound there is room: no forecast is needed."""
        waiting = len(self._books.queues["parked"]) + len(self._books.queues["fresh"])
        states = self._books.replicas.values()
        most = max(len(state.active) for state in states) + waiting
        return most * self.max_tokens <= (1 - MARGIN) * min(state.blocks * state.block_size for state in states)

    def _admit(self) -> list[Place]:
        placed: list[Place] = []
        for name in ("parked", "fresh"):
            queue = self._books.queues[name]
            while queue:
                item = next(iter(queue.values()))
                if (found := self._choose(item)) is None:
                    return placed  # the first in line waits, and nobody overtakes it
                del queue[item.key]
                placed.append(self._go(item, *found))
        return placed

    def _choose(self, item: Item) -> tuple[Replica, str] | None:
        """The replica with most headroom where it fits; an empty one takes whatever comes."""
        headroom_R = self._headroom(item)
        best = int(headroom_R.argmax())
        if headroom_R[best] >= 0:
            return self._books.replicas[best], "headroom"
        states = self._books.replicas.values()
        return next(((state, "empty") for state in states if not state.active and not state.draining), None)

    def _headroom(self, item: Item) -> Reals:
        return self._books.headroom_tokens(item, 1 - MARGIN * self._caution_now, self._caution_now)

    def _go(self, item: Item, state: Replica, rule: str, stay_s: float = 0.0, go_s: float = 0.0) -> Place:
        self._books.enter(item, state)
        headroom = state.blocks - int(state.reserved_H[:H].max()) / state.block_size
        return Place(item.key, state.index, rule, headroom, stay_s, go_s)

    def _return(self, item: Item, crowded: bool) -> Place:
        """Home, where its prefix is; or in the tail to a replica that is faster by more than the prefix costs."""
        assert item.home is not None
        home = self._books.replicas[item.home]
        if not crowded and item.moves < self.moves and (found := self._faster(item, home, len(home.active))):
            item.moves += 1
            return self._go(item, found[0], "tail", found[1], found[2])
        return self._go(item, home, "home")

    def _flee(self) -> list[Place]:
        """Those that run on a draining replica move as others have room for them."""
        placed = []
        for state in [state for state in self._books.replicas.values() if state.draining]:
            for item in list(state.active.values()):
                if (found := self._choose(item)) is None:
                    break
                item.moves += 1
                placed.append(self._go(item, found[0], "drain"))
        return placed

    def _level(self, now: float) -> list[Place]:
        """Nobody waits: trajectories move from the fullest replica to the emptiest, if that pays; a few at a time."""
        live = [state for state in self._books.replicas.values() if not state.draining]
        step_s = self.costs.step_s(max((len(state.active) for state in live), default=0))
        if step_s is None or not live:
            return []
        self._look_at = now + LOOK_STEPS * step_s
        placed: list[Place] = []
        for _ in range(1 + len(live) // 4):
            fullest = max(live, key=lambda state: len(state.active))
            place = self._move_one(fullest)
            if place is None:
                break
            placed.append(place)
        return placed

    def _move_one(self, state: Replica) -> Place | None:
        """Of those that run there and may move, one with much to come and little to compute again."""
        running = [item for item in state.active.values() if item.state == "running" and item.moves < self.moves]
        if not running:
            return None
        rests_N = self.growth.rest_tokens(self._books.sizes(running))
        lengths_N = np.array([self._books.length(item) for item in running])
        for place in np.argsort(lengths_N - rests_N)[:4]:
            item = running[place]
            found = self._faster(item, state, len(state.active))
            if found is not None:
                item.moves += 1
                return self._go(item, found[0], "level", found[1], found[2])
        return None

    def _faster(self, item: Item, home: Replica, load: int) -> tuple[Replica, float, float] | None:
        """Where it would end sooner by GAIN, its recomputed prefix counted twice as it stops others too; with both
        estimates in seconds.
        """
        rest = float(self.growth.rest_tokens(self._books.sizes([item]))[0])
        here, again = self.costs.step_s(load), self.costs.prefill_s(2 * self._books.length(item))
        if here is None or again is None:
            return None
        others = [s for s in self._books.replicas.values() if s is not home and not s.draining]
        other = min(others, key=lambda state: len(state.active), default=None)
        if other is None or self._headroom(item)[other.index] < 0:
            return None
        there = self.costs.step_s(len(other.active) + 1)
        assert there is not None
        stay_s, go_s = rest * here, again + rest * there
        return (other, stay_s, go_s) if go_s < (1 - GAIN) * stay_s else None
