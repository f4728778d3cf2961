"""Placement of trajectories on replicas. Pure: events and the time go in, placements come out.

`engine.balancing.kv_aware` holds the node's own policy, `bench.placement.policies` those of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.replica.port import KvSample


@dataclass(frozen=True, slots=True)
class Place:
    """A decision: trajectory `key` generates its next turn on `replica`. All of it goes into the timeline.

    stay_s, go_s: of a move that saves time, the estimated seconds to the trajectory's end without and with it.
    """

    key: int
    replica: int
    rule: str
    headroom_blocks: float
    stay_s: float = 0.0
    go_s: float = 0.0

    def reasons(self) -> dict[str, float]:
        """Returns what the timeline shows beside the rule, with the costs of staying and going if they were weighed."""
        shown = {"key": self.key, "replica": self.replica, "headroom_blocks": self.headroom_blocks}
        if self.stay_s or self.go_s:
            shown |= {"stay_s": self.stay_s, "go_s": self.go_s}
        return shown


class Balancer(Protocol):
    """A placement policy; the node and the simulator drive the same object.

    `engine.balancing.round_robin.RoundRobin` is a small one to start from.
    """

    def replica_up(self, replica: int, blocks: int, block_size: int) -> None: ...

    def replica_down(self, replica: int) -> None:
        """The replica is gone. Trajectories that ran there will `request_turn` again with their tokens so far."""
        ...

    def replica_drain(self, replica: int) -> None:
        """Nothing new may go there, and what is there should move away; `replica_down` follows."""
        ...

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        """An engine made a step: each request that runs there grew by about `sample.steps` tokens."""
        ...

    def request_turn(self, key: int, group: int, prompt_tokens: int, tokens: int, now: float) -> None:
        """The trajectory wants its next turn generated; `tokens` is its length so far, the group's prompt included."""
        ...

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        """The turn ended and the trajectory waits for tools."""
        ...

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        """The trajectory ended, whatever its state. finished: by itself, so that its size is informative."""
        ...

    def decide(self, now: float) -> list[Place]:
        """Returns placements of waiting trajectories. A placement of a running one moves it with its tokens so far."""
        ...
