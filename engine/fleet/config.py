"""How a fleet of replicas is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.fleet.canary import tolerance
from sandbox.require import at_least, none_or, one_of, positive, require, require_fields, within

PAUSED_SHARE = 0.25  # of the replicas, where others may sample under older weights meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """How many replicas there are, and how long the fleet waits for them.

    >>> FleetConfig(replicas=4, on_update="restart").restarts
    3
    """

    replicas: int = 2
    block_size: int = 32
    """Tokens of a KV block, as in `ReplicaConfig`."""
    canary_tolerance: float | None = tolerance("float32", layers=8)
    """How far a replica's log-probabilities may be from the learner's in the mean (`engine.fleet.canary.tolerance_of`).
    None: not judged."""
    watch_s: float = 5.0
    """Seconds between two looks at a replica's health."""
    restarts: int = 3
    """How many times each replica may die, its start included. Counted anew once it has served for STEADY_S."""
    stop_deadline_s: float = 10.0
    """Seconds for a replica to end before it is killed."""
    paused_share: float = 1.0
    """Replicas that pause at once for new weights, as a share of all; the others sample under the older ones until it
    is their turn. 1: all at once, and nothing begins on any of them meanwhile.
    """
    drain_s: float = 10.0
    """Seconds that a replica which is drained waits for its turns to end or to move, before they go on elsewhere."""
    on_update: Literal["continue", "restart", "finish"] = "continue"
    """What a trajectory does at a weight update. "continue": it goes on under the new weights, and its tokens tell
    their versions. "restart": its turn, or its next one, raises Superseded, and it begins again. "finish": it goes on
    under the version that it began with, which replicas that serve adapters still have, and nothing pauses.
    """

    def __post_init__(self) -> None:
        require("replicas", self.replicas, at_least(1))
        require("restarts", self.restarts, at_least(0))
        require_fields(
            self, none_or(positive), "block_size", "canary_tolerance", "watch_s", "stop_deadline_s", "drain_s"
        )
        require("paused_share", self.paused_share, within("(0, 1]"))
        if self.paused_share < 1 and self.on_update == "restart":
            raise ValueError('on_update="restart" needs paused_share=1: a trajectory has one version')
        require("on_update", self.on_update, one_of("continue", "restart", "finish"))
