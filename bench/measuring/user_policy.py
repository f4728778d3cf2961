"""A placement policy of the user's in the simulator: what it does wrong is one line with file and line."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from bench.measuring.user_file import told
from engine.balancing.balancer import Balancer, Place
from engine.replica.port import KvSample
from engine.user_parts import place_of

DEADLINE_S = 60.0  # of a call
METHODS = tuple(name for name, value in vars(Balancer).items() if inspect.isfunction(value) and name[0] != "_")


class UserPolicy:
    """Passes the calls of `Balancer` on to the user's policy. Each raises ValueError, in one line, for an exception of
    the policy, an answer that is none, or a call that takes longer than DEADLINE_S.
    """

    def __init__(self, name: str, make: Callable[[], Any], file: Path) -> None:
        """make: makes the policy. Raises ValueError as the calls do, and for a policy that cannot be one."""
        self._name, self._file = name, file
        self._up: set[int] = set()
        self._keys: set[int] = set()
        with self._calling("when it is made"):
            self._policy = make()
        for method in METHODS:
            own = getattr(self._policy, method, None)
            if not callable(own):
                raise ValueError(f"the policy {name} has no {method}. Fix: {_FIX}")
            if inspect.iscoroutinefunction(own) or inspect.isgeneratorfunction(own) or inspect.isasyncgenfunction(own):
                raise ValueError(f"the policy's {place_of(own)} is async or yields. Fix: a plain def that returns")

    def replica_up(self, replica: int, blocks: int, block_size: int) -> None:
        self._up.add(replica)
        self._ask("replica_up", replica, blocks, block_size)

    def replica_down(self, replica: int) -> None:
        self._up.discard(replica)
        self._ask("replica_down", replica)

    def replica_drain(self, replica: int) -> None:
        self._ask("replica_drain", replica)

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        self._ask("sample", replica, sample, now)

    def request_turn(self, key: int, group: int, prompt_tokens: int, tokens: int, now: float) -> None:
        self._keys.add(key)
        self._ask("request_turn", key, group, prompt_tokens, tokens, now)

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        self._ask("turn_finished", key, tokens, now)

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        self._ask("trajectory_ended", key, tokens, finished)

    def decide(self, now: float) -> list[Place]:
        places = self._ask("decide", now)
        who = f"the policy's {place_of(self._policy.decide)}"
        if not isinstance(places, list | tuple) or not all(isinstance(place, Place) for place in places):
            raise ValueError(f"{who} returned {places!r:.100}. Fix: return a list of Place")
        for place in places:
            if place.replica not in self._up:
                raise ValueError(
                    f"{who} placed trajectory {place.key} on replica {place.replica}. "
                    f"Fix: one of those that are up, {', '.join(map(str, sorted(self._up)))}"
                )
            if place.key not in self._keys:
                raise ValueError(f"{who} placed a trajectory {place.key}. Fix: a key that `request_turn` has named")
        return list(places)

    def waiting(self) -> int:
        count: int = self._ask("waiting")
        return count

    def _ask(self, method: str, *arguments: Any) -> Any:
        with self._calling(f"in {method}"):
            return getattr(self._policy, method)(*arguments)

    @contextmanager
    def _calling(self, where: str) -> Iterator[None]:
        try:
            with _deadline(DEADLINE_S):
                yield
        except Exception as error:
            cause = told(error, self._file)
            raise ValueError(f"the policy {self._name} failed: {cause} {where}. Fix: correct it there") from error


_FIX = (
    "the methods of engine.balancing.balancer.Balancer, of which engine.balancing.round_robin.RoundRobin is an example"
)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer, also if it never returns; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"did not return within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
