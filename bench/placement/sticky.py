"""The books of a policy that keeps each trajectory on the replica where it began.

Invariants
- A trajectory is waiting, running or tool-waiting. One that has a home counts there until it ends or loses its home,
  which happens when that replica dies or drains.
- Those with a home are placed first, then the others first come first served; nobody is moved while running.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field

from engine.balancing.balancer import Place
from engine.replica.port import KvSample


@dataclass(slots=True)
class Tracked:
    """A trajectory as the books have it. steps: those of its replica when `tokens` was true."""

    key: int
    tokens: int
    state: str = "waiting"  # "waiting" | "running" | "tool"
    home: int | None = None
    steps: int = 0


@dataclass(slots=True)
class Engine:
    """A replica as the books have it."""

    index: int
    blocks: int
    block_size: int
    at_home: dict[int, Tracked] = field(default_factory=dict)
    steps: int = 0
    sample: KvSample | None = None
    context_tokens: int = 0  # sum over those at home; running ones count less the steps at which their turns began
    running: int = 0

    @property
    def tokens(self) -> int:
        """Lengths of those at home; running ones grow by a token a step."""
        return self.context_tokens + self.running * self.steps

    def count(self, item: Tracked, sign: int) -> None:
        running = item.state == "running"
        self.running += sign * running
        self.context_tokens += sign * (item.tokens - running * item.steps)


class Sticky(ABC):
    """Keeps the books. A policy says in `_choose` where a trajectory without a home goes, or that it waits."""

    rule = ""

    def __init__(self) -> None:
        self._all: dict[int, Tracked] = {}
        self._returning: dict[int, Tracked] = {}
        self._homeless: OrderedDict[int, Tracked] = OrderedDict()  # the first is at hand at once
        self._engines: dict[int, Engine] = {}

    def replica_up(self, replica: int, blocks: int, block_size: int) -> None:
        if replica in self._engines:
            raise ValueError(f"replica {replica} is up already")
        self._engines[replica] = Engine(replica, blocks, block_size)

    def replica_down(self, replica: int) -> None:
        self._engines.pop(replica, None)  # it has gone already when it drained
        for item in self._all.values():
            if item.home == replica:
                item.state = "tool" if item.state == "running" else item.state
                self._lose_home(item)

    def replica_drain(self, replica: int) -> None:
        """Takes the home of those who wait now, and of the others at the end of their turn."""
        for item in self._engines.pop(replica).at_home.values():
            if item.state != "running":
                self._lose_home(item)

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        engine = self._engines.get(replica)
        if engine is not None:
            engine.sample = sample
            engine.steps += sample.steps

    def request_turn(self, key: int, group: int, prompt_tokens: int, tokens: int, now: float) -> None:
        item = self._all.setdefault(key, Tracked(key, tokens, "tool"))
        if item.state != "tool":
            raise ValueError(f"trajectory {key} arrives while {item.state}")
        self._becomes(item, "waiting", tokens)
        (self._homeless if item.home is None else self._returning)[key] = item

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        item = self._all[key]
        if item.state == "waiting":
            raise ValueError(f"trajectory {key} ends a turn while it waits")
        self._becomes(item, "tool", tokens)
        if item.home not in self._engines:  # its replica drains
            item.home = None

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        item = self._all.pop(key, None)
        if item is not None:
            self._lose_home(item)
            self._homeless.pop(key, None)

    def decide(self, now: float) -> list[Place]:
        placed = [self._run(item, "home") for item in self._returning.values()]
        self._returning.clear()
        while self._engines and self._homeless:
            item = self._first()
            choice = self._choose(item)
            if choice is None:
                break
            del self._homeless[item.key]
            item.home = choice.index
            choice.at_home[item.key] = item
            choice.count(item, 1)
            placed.append(self._run(item, self.rule))
        return placed

    def waiting(self) -> int:
        return len(self._returning) + len(self._homeless)

    def _first(self) -> Tracked:
        return next(iter(self._homeless.values()))

    @abstractmethod
    def _choose(self, item: Tracked) -> Engine | None:
        """Returns where a trajectory without a home begins; None: it waits."""

    def _run(self, item: Tracked, rule: str) -> Place:
        assert item.home is not None
        self._becomes(item, "running", item.tokens)
        sample, blocks = self._engines[item.home].sample, self._engines[item.home].blocks
        return Place(item.key, item.home, rule, blocks if sample is None else sample.free_blocks)

    def _becomes(self, item: Tracked, state: str, tokens: int) -> None:
        engine = None if item.home is None else self._engines.get(item.home)
        if engine is None:
            item.tokens, item.state = tokens, state
            return
        engine.count(item, -1)
        item.tokens, item.state, item.steps = tokens, state, engine.steps
        engine.count(item, 1)

    def _lose_home(self, item: Tracked) -> None:
        engine = None if item.home is None else self._engines.get(item.home)
        if engine is not None:
            engine.count(item, -1)
            del engine.at_home[item.key]
        item.home = None
        if self._returning.pop(item.key, None):
            self._homeless[item.key] = item
