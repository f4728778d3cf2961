"""Knows which rollouts are under way, and what each is doing. Pure: changes and the time go in, a snapshot comes out.

Invariants
- A change costs the same however many rollouts are under way, and so does a snapshot: it has the NEWEST that began
  last, and counts of all.
- A rollout is in one state at a time. It leaves the list when it is graded, or fails, or is cancelled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Literal

import msgspec

from engine.types import Trajectory

NEWEST = 200  # rollouts that a snapshot has one by one
ENDED = 50  # those that ended last

State = Literal["starting", "queued", "sampling", "tool call", "agent", "grading"]
STATES: tuple[State, ...] = ("starting", "queued", "sampling", "tool call", "agent", "grading")
"""starting: opens its tools, or waits until its agent begins. queued: waits for a place on a replica. sampling: has a
place. tool call: waits for the calls of its turn. agent: its agent works, and samples nothing. grading: waits for its
reward."""


class RolloutUnderWay(msgspec.Struct, kw_only=True):
    """A rollout that has not ended. lease: its group's; -1 in an evaluation. turn: from 1, 0 before the first. tokens:
    those sampled so far. replica: where it sampled last, -1 for none. began, since: when it and its state began.
    """

    prompt: str
    sample: int
    lease: int
    state: State
    turn: int
    tokens: int
    replica: int
    began: float
    since: float


class RolloutEnded(msgspec.Struct, kw_only=True):
    """A rollout that has ended. stop: why, or "cancelled". reward: None if there is no grade."""

    prompt: str
    sample: int
    lease: int
    stop: str
    turns: int
    tokens: int
    reward: float | None
    began: float
    ended: float


class Snapshot(msgspec.Struct, kw_only=True):
    """The rollouts at a moment, the newest first. at: seconds since 1970. groups_per_step: the group of a lease is
    `lease % groups_per_step` of step `lease // groups_per_step + 1`. counts: all rollouts under way, by state.
    """

    at: float
    groups_per_step: int
    counts: dict[str, int]
    under_way: list[RolloutUnderWay]
    ended: list[RolloutEnded]


@dataclass(slots=True, eq=False)
class Watched:
    """Follows one rollout. What makes it calls these methods as it goes on."""

    prompt: str
    sample: int
    lease: int
    began: float
    _clock: Callable[[], float]
    _counts: Counter[str]
    state: State = "starting"
    since: float = 0.0
    turn: int = 0
    tokens: int = 0
    replica: int = -1

    def moves(self, state: State) -> None:
        """Notes that the rollout is in another state now."""
        self._counts[self.state] -= 1
        self._counts[state] += 1
        self.state, self.since = state, self._clock()

    def samples(self, tokens: int, replica: int) -> None:
        """Notes that so many tokens were sampled."""
        self.tokens += tokens
        self.replica = replica

    def begins_turn(self, number: int) -> None:
        """Notes that turn `number`, from 1, is about to be sampled."""
        self.turn = number

    def waits_for_place(self, waiting: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Returns a context: inside, the rollout waits for a place on a replica; then it samples. waiting: is entered
        too.
        """
        return _WaitsForPlace(self, waiting)


@dataclass(slots=True)
class _WaitsForPlace:  # a generator would take three times as long, each turn
    _watched: Watched
    _waiting: AbstractContextManager[None]

    def __enter__(self) -> None:
        self._watched.moves("queued")
        self._waiting.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._watched.moves("sampling")
        return self._waiting.__exit__(kind, error, trace)


def unwatched() -> Watched:
    """Returns one that nobody looks at, for a rollout that is on no list."""
    return Watched(prompt="", sample=0, lease=0, began=0.0, _clock=lambda: 0.0, _counts=Counter())


@dataclass(slots=True)
class InFlight:
    """All rollouts that are under way in this process.

    >>> rollouts = InFlight(lambda: 7.0)
    >>> with rollouts.rollout("p1", sample=0, lease=3) as watched:
    ...     watched.moves("sampling")
    ...     rollouts.snapshot(groups_per_step=2).counts["sampling"]
    1
    >>> [ended.stop for ended in rollouts.snapshot(groups_per_step=2).ended]
    ['cancelled']
    """

    clock: Callable[[], float]
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Tool calls that ended, by tool and outcome. Calls that were refused have the tool ""."""
    stops: Counter[str] = field(default_factory=Counter)
    """Rollouts that ended, by why."""
    counts: Counter[str] = field(default_factory=Counter)
    """Rollouts under way, by state."""
    _watched: dict[Watched, None] = field(default_factory=dict)  # in the order in which they began
    _ended: deque[RolloutEnded] = field(default_factory=lambda: deque(maxlen=ENDED))

    @contextmanager
    def rollout(self, prompt: str, *, sample: int, lease: int) -> Iterator[Watched]:
        """Lists a rollout for as long as the block lasts; `ends` says before its end what came of it."""
        now = self.clock()
        watched = Watched(
            prompt=prompt, sample=sample, lease=lease, began=now, since=now, _clock=self.clock, _counts=self.counts
        )
        self._watched[watched] = None
        self.counts[watched.state] += 1
        try:
            yield watched
        finally:
            if watched in self._watched:
                self._remove(watched, stop="cancelled", reward=None)

    def ends(self, watched: Watched, trajectory: Trajectory) -> None:
        """Notes that a rollout has ended and, unless a whole group is graded together, has its reward."""
        watched.turn = len(trajectory.all_turns)
        self._remove(watched, stop=str(trajectory.stop), reward=trajectory.reward)

    def _remove(self, watched: Watched, *, stop: str, reward: float | None) -> None:
        del self._watched[watched]
        self.counts[watched.state] -= 1
        self.stops[stop] += 1
        self._ended.append(
            RolloutEnded(
                prompt=watched.prompt,
                sample=watched.sample,
                lease=watched.lease,
                stop=stop,
                turns=watched.turn,
                tokens=watched.tokens,
                reward=reward,
                began=watched.began,
                ended=self.clock(),
            )
        )

    def snapshot(self, *, groups_per_step: int) -> Snapshot:
        """Returns the newest rollouts and the counts of all."""
        return Snapshot(
            at=self.clock(),
            groups_per_step=groups_per_step,
            counts={state: self.counts[state] for state in STATES},
            under_way=[_row(watched) for watched in islice(reversed(self._watched), NEWEST)],
            ended=list(reversed(self._ended)),
        )


def _row(watched: Watched) -> RolloutUnderWay:
    return RolloutUnderWay(
        prompt=watched.prompt,
        sample=watched.sample,
        lease=watched.lease,
        state=watched.state,
        turn=watched.turn,
        tokens=watched.tokens,
        replica=watched.replica,
        began=watched.began,
        since=watched.since,
    )
