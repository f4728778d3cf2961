"""What others do, as policies for the same Protocol: baselines for the benches, and simple choices for a user."""

from __future__ import annotations

import math

from bench.placement.sticky import Engine, Sticky, Tracked
from engine.balancing.balancer import Place
from engine.replica.port import KvSample


class StaticSplit(Sticky):
    """Those that wait together are cut into contiguous parts of one size, a part per replica.

    barrier: no turn starts before every other trajectory has its tool results: turns go in lockstep over all replicas
    (a tool call itself still starts when its own turn ends, which flatters this policy).
    """

    rule = "split"

    def __init__(self, barrier: bool = False) -> None:
        super().__init__()
        self.barrier = barrier
        self._next = 0  # replica that takes the next part
        self._plan: dict[int, Engine] = {}

    def decide(self, now: float) -> list[Place]:
        if self.barrier and self.waiting() < len(self._all):
            return []
        engines = [self._engines[index] for index in sorted(self._engines)]
        if engines:
            count = len(self._homeless)
            parts = min(count, len(engines))
            places = [(self._next + n * parts // count) % len(engines) for n in range(count)]
            self._plan = {key: engines[place] for key, place in zip(self._homeless, places, strict=True)}
            self._next = (self._next + parts) % len(engines)
        return super().decide(now)

    def _choose(self, item: Tracked) -> Engine:
        return self._plan[item.key]


class LeastInFlight(Sticky):
    """Each new trajectory goes to the replica with fewest of them, tool-waiting ones included.

    cap: at most so many per replica, the others wait (PipelineRL: 64); None: no bound.
    """

    rule = "least in flight"

    def __init__(self, cap: int | None = None) -> None:
        super().__init__()
        self.cap = None if cap is None else _at_least_one("cap", cap)

    def _choose(self, item: Tracked) -> Engine | None:
        found = self._emptiest()
        return found if self.cap is None or len(found.at_home) < self.cap else None


class TokenBudget(Sticky):
    """As many trajectories per replica as surely fit at their largest (rStar2-Agent, arXiv 2508.20722, section 3)."""

    rule = "budget"

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = _at_least_one("max_tokens", max_tokens)

    def _choose(self, item: Tracked) -> Engine | None:
        found = max(self._engines.values(), key=self._slots)
        return found if self._slots(found) > 0 else None

    def _slots(self, engine: Engine) -> int:
        surely = engine.blocks // math.ceil(self.max_tokens / engine.block_size)
        return max(1, surely) - len(engine.at_home)


class Aimd(Sticky):
    """One bound on all trajectories in flight, driven by KV use and preemptions every `interval_s` (prime-rl).

    It starts at what surely fits and grows by a quarter while KV use is under 0.6 and the bound is reached; over 0.8 it
    is trimmed towards 0.7; a preemption takes a fifth, a queue in an engine a tenth. It follows the number of replicas.
    Nothing that runs is cancelled.
    """

    rule = "aimd"

    def __init__(self, max_tokens: int, interval_s: float = 5.0) -> None:
        super().__init__()
        self.max_tokens = _at_least_one("max_tokens", max_tokens)
        self.interval_s = _positive("interval_s", interval_s)
        self._each = 0.0  # the bound, per replica
        self._next = -math.inf
        self._preempted = 0

    def replica_up(self, replica: int, blocks: int, block_size: int) -> None:
        super().replica_up(replica, blocks, block_size)
        self._each = self._each or max(1.0, blocks * block_size // self.max_tokens)

    @property
    def bound(self) -> float:
        return self._each * len(self._engines)

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        super().sample(replica, sample, now)
        self._preempted += sample.preempted

    def decide(self, now: float) -> list[Place]:
        if now >= self._next and self._engines:
            self._next = now + self.interval_s
            self._adapt()
        return super().decide(now)

    def _adapt(self) -> None:
        seen = [(engine, engine.sample) for engine in self._engines.values() if engine.sample is not None]
        used = max((1 - sample.free_blocks / engine.blocks for engine, sample in seen), default=1.0)
        if self._preempted:
            self._each *= 0.8
        elif any(sample.waiting for _, sample in seen):
            self._each *= 0.9
        elif seen and used > 0.8:
            self._each *= 0.7 / used
        elif used < 0.6 and self._in_flight() >= int(self.bound):
            self._each *= 1.25
        self._each, self._preempted = max(self._each, 1.0), 0

    def _choose(self, item: Tracked) -> Engine | None:
        return self._emptiest() if self._in_flight() < int(self.bound) else None

    def _in_flight(self) -> int:
        return sum(len(engine.at_home) for engine in self._engines.values())


class ThunderLike(Sticky):
    """Programs are paused at tool boundaries when their contexts overfill a replica (after ThunderAgent, 2602.13692).

    Every `interval_s`: over 0.95 of a replica, tool-waiting trajectories lose their place, the smallest first, down to
    0.8. Those without a place get one when their context and `buffer_tokens` fit below 0.85, paused ones before new
    ones and the smallest first, on the emptiest replica. The margins, and that a place is given at once, are not in
    the original: `ThunderPolled`.
    """

    rule = "resume"
    over, down_to, below = 0.95, 0.8, 0.85  # shares of a replica's tokens

    def __init__(self, interval_s: float = 1.0, buffer_tokens: int = 512) -> None:
        super().__init__()
        self.interval_s = _positive("interval_s", interval_s)
        self.buffer_tokens = buffer_tokens
        self._next = -math.inf
        self._paused: dict[int, Tracked] = {}  # whatever their state

    def decide(self, now: float) -> list[Place]:
        if now >= self._next:
            self._next = now + self.interval_s
            for engine in self._engines.values():
                self._pause(engine)
        return super().decide(now)

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        super().trajectory_ended(key, tokens, finished)
        self._paused.pop(key, None)

    def _first(self) -> Tracked:
        paused = (item for item in self._paused.values() if item.state == "waiting")
        return min(paused, key=lambda item: (item.tokens, item.key), default=None) or super()._first()

    def _choose(self, item: Tracked) -> Engine | None:
        fitting = [engine for engine in self._engines.values() if self._fits(item, engine)]
        found = min(fitting, key=self._used_tokens, default=None)
        if found is not None:
            self._paused.pop(item.key, None)
        return found

    def _fits(self, item: Tracked, engine: Engine) -> bool:
        need = item.tokens + self.buffer_tokens
        return not engine.at_home or self._used_tokens(engine) + need <= self.below * engine.blocks * engine.block_size

    def _used_tokens(self, engine: Engine) -> int:
        return engine.tokens + self.buffer_tokens * len(engine.at_home)

    def _pause(self, engine: Engine) -> None:
        capacity_tokens = engine.blocks * engine.block_size
        if self._used_tokens(engine) <= self.over * capacity_tokens:
            return
        idle = [item for item in engine.at_home.values() if item.state == "tool"]
        for item in sorted(idle, key=lambda item: item.tokens):
            if self._used_tokens(engine) <= self.down_to * capacity_tokens:
                return
            self._paused[item.key] = item
            self._lose_home(item)


class ThunderPolled(ThunderLike):
    """As in ThunderAgent's sources: a replica is filled to the last token, places are given only every `interval_s`
    (5 s there) and before others lose theirs, and where no tool-waiting trajectory is left to lose its place, running
    ones lose it at the end of their turn.
    """

    over = down_to = below = 1.0

    def __init__(self, interval_s: float = 1.0, buffer_tokens: int = 512) -> None:
        super().__init__(interval_s, buffer_tokens)
        self._due = False
        self._marked: set[int] = set()

    def decide(self, now: float) -> list[Place]:
        self._due = now >= self._next
        placed = Sticky.decide(self, now)
        if self._due:
            self._next = now + self.interval_s
            for engine in self._engines.values():
                self._pause(engine)
        return placed

    def _choose(self, item: Tracked) -> Engine | None:
        return super()._choose(item) if self._due else None

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        super().turn_finished(key, tokens, now)
        if key in self._marked:
            self._marked.remove(key)
            self._paused[key] = self._all[key]
            self._lose_home(self._all[key])

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        super().trajectory_ended(key, tokens, finished)
        self._marked.discard(key)

    def _pause(self, engine: Engine) -> None:
        super()._pause(engine)
        over_tokens = self._used_tokens(engine) - engine.blocks * engine.block_size
        running = [item for item in engine.at_home.values() if item.state == "running"]
        for item in sorted(running, key=lambda item: (item.key not in self._marked, item.tokens)):
            if over_tokens <= 0:
                return
            self._marked.add(item.key)
            over_tokens -= item.tokens + self.buffer_tokens


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def _positive(name: str, value: float) -> float:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value
