"""An example of a `Balancer`, the smallest useful one: each new trajectory goes to the next replica and stays there."""

from __future__ import annotations

from engine.balancing.balancer import Place
from engine.replica.port import KvSample


class RoundRobin:
    """A trajectory keeps its replica, whose prefix cache holds it, until that drains or is lost."""

    def __init__(self) -> None:
        self.replicas: list[int] = []
        self._home: dict[int, int] = {}  # replica of each trajectory
        self._waiting: list[int] = []
        self._turn = 0

    def replica_up(self, replica: int, blocks: int, block_size: int) -> None:
        self.replicas = sorted([*self.replicas, replica])

    def replica_down(self, replica: int) -> None:
        self.replicas = [other for other in self.replicas if other != replica]

    def replica_drain(self, replica: int) -> None:
        self.replica_down(replica)

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        pass  # it does not look at memory

    def request_turn(self, key: int, group: int, prompt_tokens: int, tokens: int, now: float) -> None:
        self._waiting.append(key)

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        pass  # it comes back with `request_turn`

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        self._home.pop(key, None)
        self._waiting = [other for other in self._waiting if other != key]

    def decide(self, now: float) -> list[Place]:
        if not self.replicas:
            return []
        waiting, self._waiting = self._waiting, []
        return [self._place(key) for key in waiting]

    def waiting(self) -> int:
        """Returns how many trajectories wait for a replica."""
        return len(self._waiting)

    def _place(self, key: int) -> Place:
        home = self._home.get(key)
        if home in self.replicas:
            return Place(key, home, "home", 0.0)
        self._turn += 1
        self._home[key] = self.replicas[self._turn % len(self.replicas)]
        return Place(key, self._home[key], "round robin", 0.0)
