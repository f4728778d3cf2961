"""How a fleet of replicas is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.fleet.canary import ONE_TOKEN, tolerance
from sandbox.require import at_least, none_or, one_of, positive, require, require_fields, within

PAUSED_SHARE = 0.25  # runs use it if replicas may sample under older weights while others pause


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """How many replicas there are, and how the fleet handles their failures and updates.

    >>> FleetConfig(replicas=4, on_update="restart").restarts
    3
    """

    replicas: int = 2
    block_size: int = 32
    """Tokens of a KV block, as in `ReplicaConfig`."""
    canary_tolerance: float | None = tolerance("float32", layers=8)
    """How far a replica's log-probabilities may be from the learner's on average (`engine.fleet.canary.tolerance_of`).
    None: not judged."""
    canary_one_token: float = ONE_TOKEN
    """How many times as far a single token may be (`engine.fleet.canary.one_token_of`)."""
    watch_s: float = 5.0
    """Seconds between two checks of a replica's health."""
    restarts: int = 3
    """How many times each replica is restarted after it died or failed to start. Counted anew once it has served for
    STEADY_S.
    """
    stop_deadline_s: float = 10.0
    """Seconds for a replica to end before it is killed."""
    paused_share: float = 1.0
    """Share of the replicas that pause for new weights at the same time; the others sample under the older weights
    until it is their turn. 1: all pause together, and nothing begins on any of them meanwhile.
    """
    drain_s: float = 10.0
    """Seconds that a draining replica waits for its turns to end or move; then they continue elsewhere."""
    on_update: Literal["continue", "restart", "finish"] = "continue"
    """What a trajectory does at a weight update. "continue": it continues under the new weights, and each token has its
    version. "restart": its current or next turn raises Superseded, and it begins again. "finish": it continues under
    the version that it began with, which replicas that serve adapters still have, and nothing pauses.
    """

    def __post_init__(self) -> None:
        require("replicas", self.replicas, at_least(1))
        require("restarts", self.restarts, at_least(0))
        require_fields(self, positive, "block_size", "watch_s", "stop_deadline_s", "drain_s", "canary_one_token")
        require("canary_tolerance", self.canary_tolerance, none_or(positive))
        require("paused_share", self.paused_share, within("(0, 1]"))
        if self.paused_share < 1 and self.on_update == "restart":
            raise ValueError(
                'paused_share must be 1 with on_update="restart", where a trajectory has one version, '
                f"got {self.paused_share}"
            )
        require("on_update", self.on_update, one_of("continue", "restart", "finish"))
