"""What each node does for the run, as lanes of the timeline and as metrics by the node's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine import metric_names as metric
from engine.nodes.ledger import Key, Member
from engine.telemetry.timeline import Timeline

NODES = 64  # so many nodes get metrics of their own, the first ones by name


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grant:
    node: str
    since: float
    lane: int


class NodeBook:
    """Knows which node has which group, as the lead tells it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._granted: dict[Key, _Grant] = {}
        self._groups: Counter[str] = Counter()

    def granted(self, key: Key, node: str) -> None:
        """Notes that a node has a group, which another node may have had until now."""
        self._end(key, "granted to another")
        lane = self._timeline.lanes["nodes"].take()
        self._granted[key] = _Grant(node=node, since=self._timeline.now(), lane=lane)

    def made(self, key: Key) -> None:
        if key in self._granted:  # otherwise the lead's own replicas made it
            self._groups[self._granted[key].node] += 1
            self._end(key, "made")

    def given_up(self, key: Key) -> None:
        """Notes that a group is not wanted any more. Idempotent."""
        self._end(key, "given up")

    def metrics(self, nodes: Sequence[Member], *, version: int) -> dict[str, float]:
        """Returns the groups that each node has made since the last call, and the state of its weights and KV cache.

        Nodes of one name count as one, with the state of the last of them.
        """
        metrics: dict[str, float] = {metric.NODES_LIVE: len(nodes)}
        members = {member.name: member for member in nodes}
        for name in sorted({*members, *self._groups})[:NODES]:
            metrics[metric.member(metric.NODES_GROUPS, name)] = self._groups[name]
            if name in members:
                member = members[name]
                metrics[metric.member(metric.NODES_LAG, name)] = version - member.version
                metrics[metric.member(metric.NODES_KV_FREE, name)] = member.free_tokens / max(1, member.capacity_tokens)
        self._groups.clear()
        return metrics

    def _end(self, key: Key, how: str) -> None:
        grant = self._granted.pop(key, None)
        if grant is not None:
            now = self._timeline.now()
            label = {"lease": key.lease, "attempt": key.attempt, "end": how}
            self._timeline.span("nodes", grant.node, grant.since, now, grant.lane, **label)
            self._timeline.lanes["nodes"].give(grant.lane)
