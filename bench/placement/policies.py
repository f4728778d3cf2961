"""Placement policies of others, for the same Protocol as ours: rivals in the benches, and simple choices for a user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from bench.placement.sticky import Engine, Sticky, Tracked
from bench.placement.workload import Traced
from engine.balancing.balancer import Balancer, Place
from engine.balancing.kv_aware import KvAware
from engine.balancing.round_robin import RoundRobin
from sandbox.require import at_least, positive, require


class StaticSplit(Sticky):
    """Cuts those that wait together into contiguous parts of one size, a part per replica."""

    rule = "split"

    def __init__(self) -> None:
        super().__init__()
        self._next = 0  # replica that takes the next part
        self._plan: dict[int, Engine] = {}

    def decide(self, now: float) -> list[Place]:
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


class Capped(Sticky):
    """Sends each new trajectory to the replica with fewest of them, tool-waiting ones included.

    cap: at most so many per replica, and the others wait (as in PipelineRL).
    """

    rule = "least in flight"

    def __init__(self, cap: int) -> None:
        super().__init__()
        self.cap = _at_least_one("cap", cap)

    def _choose(self, item: Tracked) -> Engine | None:
        emptiest = min(self._engines.values(), key=lambda engine: len(engine.at_home))
        return emptiest if len(emptiest.at_home) < self.cap else None


class TokenBudget(Sticky):
    """Admits as many trajectories per replica as surely fit at their largest (rStar2-Agent, 2508.20722, section 3)."""

    rule = "budget"

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = _at_least_one("max_tokens", max_tokens)

    def _choose(self, item: Tracked) -> Engine | None:
        roomiest = max(self._engines.values(), key=self._slots)
        return roomiest if self._slots(roomiest) > 0 else None

    def _slots(self, engine: Engine) -> int:
        surely = engine.blocks // math.ceil(self.max_tokens / engine.block_size)
        return max(1, surely) - len(engine.at_home)


class ThunderPolled(Sticky):
    """Pauses trajectories at tool boundaries when their contexts overfill a replica (after ThunderAgent, 2602.13692).

    Every `interval_s` (5 s there), those without a place get one where their context and `buffer_tokens` fit, paused
    ones before new ones and the smallest first, on the emptiest replica. Then tool-waiting trajectories of an overfull
    replica lose their place, the smallest first. Where that is not enough, running ones do at the end of their turn.
    """

    rule = "resume"

    def __init__(self, interval_s: float = 1.0, buffer_tokens: int = 512) -> None:
        require("interval_s", interval_s, positive)
        super().__init__()
        self.interval_s = interval_s
        self.buffer_tokens = buffer_tokens
        self._next = -math.inf
        self._due = False
        self._paused: dict[int, Tracked] = {}  # whatever their state
        self._marked: set[int] = set()  # running ones that lose their place at the end of their turn

    def decide(self, now: float) -> list[Place]:
        self._due = now >= self._next
        placed = super().decide(now)
        if self._due:
            self._next = now + self.interval_s
            for engine in self._engines.values():
                self._pause(engine)
        return placed

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        super().turn_finished(key, tokens, now)
        if key in self._marked:
            self._marked.remove(key)
            self._suspend(self._all[key])

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        super().trajectory_ended(key, tokens, finished)
        self._paused.pop(key, None)
        self._marked.discard(key)

    def _first(self) -> Tracked:
        paused = (item for item in self._paused.values() if item.state == "waiting")
        return min(paused, key=lambda item: (item.tokens, item.key), default=None) or super()._first()

    def _choose(self, item: Tracked) -> Engine | None:
        if not self._due:
            return None
        fitting = [engine for engine in self._engines.values() if self._fits(item, engine)]
        emptiest = min(fitting, key=self._used_tokens, default=None)
        if emptiest is not None:
            self._paused.pop(item.key, None)
        return emptiest

    def _fits(self, item: Tracked, engine: Engine) -> bool:
        need = item.tokens + self.buffer_tokens
        return not engine.at_home or self._used_tokens(engine) + need <= engine.blocks * engine.block_size

    def _used_tokens(self, engine: Engine) -> int:
        return engine.tokens + self.buffer_tokens * len(engine.at_home)

    def _suspend(self, item: Tracked) -> None:
        self._paused[item.key] = item
        self._lose_home(item)

    def _pause(self, engine: Engine) -> None:
        capacity_tokens = engine.blocks * engine.block_size
        idle = [item for item in engine.at_home.values() if item.state == "tool"]
        for item in sorted(idle, key=lambda item: item.tokens):
            if self._used_tokens(engine) <= capacity_tokens:
                return
            self._suspend(item)
        over_tokens = self._used_tokens(engine) - capacity_tokens
        running = [item for item in engine.at_home.values() if item.state == "running"]
        for item in sorted(running, key=lambda item: (item.key not in self._marked, item.tokens)):
            if over_tokens <= 0:
                return
            self._marked.add(item.key)
            over_tokens -= item.tokens + self.buffer_tokens


def _at_least_one(name: str, value: int) -> int:
    require(name, value, at_least(1))
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a policy may know of the work and of a replica.

    poll_s, buffer_tokens: those of ThunderAgent, in the scale of the trajectories.
    """

    longest_tokens: int
    mean_tokens: float
    kv_tokens: int
    poll_s: float
    buffer_tokens: int

    @classmethod
    def of(cls, trace: Sequence[Traced], kv_tokens: int, *, poll_s: float = 1.0, buffer_tokens: int = 512) -> Setting:
        lengths = [row.total_tokens for row in trace]
        return cls(
            longest_tokens=max(lengths),
            mean_tokens=sum(lengths) / len(lengths),
            kv_tokens=kv_tokens,
            poll_s=poll_s,
            buffer_tokens=buffer_tokens,
        )


OURS = "kv_aware"
Policy = Literal["kv_aware", "round_robin", "static", "cap", "budget", "thunder_polled"]
NAMES: tuple[Policy, ...] = get_args(Policy)
POLICIES: Mapping[str, Callable[[Setting], Balancer]] = {
    OURS: lambda setting: KvAware(setting.longest_tokens),
    "round_robin": lambda setting: RoundRobin(),
    "static": lambda setting: StaticSplit(),
    # A fixed cap that knows the workload: as many trajectories as fit at their mean length.
    "cap": lambda setting: Capped(max(1, int(setting.kv_tokens / setting.mean_tokens))),
    "budget": lambda setting: TokenBudget(setting.longest_tokens),
    "thunder_polled": lambda setting: ThunderPolled(setting.poll_s, setting.buffer_tokens),
}
