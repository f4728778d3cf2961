"""Simulates a run over nodes: one lead, which grants groups by its real ledger, and a simulated fleet on each node.

- The lead is one loop: each message that it takes or sends waits for those before it, and costs what `bench nodes` has
  measured. A message arrives after the latency of the link; bytes take the lead's link in turn.
- The learner trains a step when all its groups are there, for `learn_s`. Then nodes pull the weights over the lead's
  link, all at once, and a node's version is live when its bytes have come and are loaded.
- Every token is of the version that was live on its node when its turn began: vLLM's tokens may be of a newer one.
- Leases are those of the engine: a group of step k is wanted when step k - 1 - max_staleness is trained and live, and
  granted to a node on which version k - max_staleness is live.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.placement.workload import Traced
from bench.simulator.fleet import Simulation
from bench.simulator.machine import Machine
from engine.balancing.balancer import Balancer
from engine.nodes.ledger import Key, Ledger
from engine.pipeline.leases import Leases

BEAT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class LeadCosts:
    """CPU seconds of the lead per message, and per token of a turn's record. token_bytes: bytes of a record's token."""

    message_s: float = 40e-6
    token_s: float = 0.032e-6
    token_bytes: float = 17.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run on nodes of so many replicas.

    rate: bytes per second of the lead's link. latency_s: one way. weight_bytes: each node pulls so many. load_s: time
    that a node's replicas take to load new weights; they go on sampling here. learn_s: time of a training step.
    """

    nodes: int
    replicas: int
    groups_per_step: int
    steps: int
    max_staleness: int
    machine: Machine
    lead: LeadCosts = field(default_factory=LeadCosts)
    rate: float = 12.5e9
    latency_s: float = 0.5e-3
    weight_bytes: float = 29.5e9
    load_s: float = 2.0
    learn_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run went.

    groups_per_s: trained groups, over the whole run. lead_cpu: share of a core. staleness: versions by which the oldest
    token of a group is behind. sync_s: from trained to live on the last node, mean.
    """

    seconds: float
    groups_per_s: float
    tokens_per_s: float
    lead_cpu: float
    messages_per_s: float
    record_bytes_per_s: float
    staleness_mean: float
    staleness_max: int
    sync_s: float
    grants: tuple[int, ...]


class Cluster:
    """Runs once. groups: the trajectories of each lease, in order. make_policy: makes the balancer of a node."""

    def __init__(
        self, setting: Setting, groups: Sequence[Sequence[Traced]], make_policy: Callable[[], Balancer]
    ) -> None:
        if len(groups) != setting.groups_per_step * setting.steps:
            raise ValueError(f"groups must be {setting.groups_per_step} x {setting.steps}, got {len(groups)}")
        self._setting, self._groups = setting, groups
        self._nodes = [
            Simulation(make_policy(), [], setting.machine, setting.replicas, longest_segment=64)
            for _ in range(setting.nodes)
        ]
        self._versions = [0] * setting.nodes
        self._ledger = Ledger(group_tokens=sum(row.total_tokens for row in groups[0]))
        self._leases = Leases(setting.groups_per_step, setting.max_staleness)
        self._serial = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._now = 0.0
        self._lead_free = self._link_free = self._lead_busy = 0.0
        self._messages = self._record_bytes = self._tokens = 0.0
        self._unfinished = [len(rows) for rows in groups]  # trajectories of a lease
        self._oldest = [1 << 30] * len(groups)
        self._at: dict[int, int] = {}  # the node of a lease
        self._made: dict[int, int] = defaultdict(int)  # groups of a step
        self._version = 0  # trained
        self._learning = False
        self._syncs: list[float] = []
        self._grants = [0] * setting.nodes
        self._staleness: list[int] = []

    def run(self) -> Outcome:
        setting = self._setting
        capacity = setting.replicas * setting.machine.kv_tokens
        for number, node in enumerate(self._nodes):
            session = self._session(number)
            self._ledger.join(session, session.decode(), capacity_tokens=capacity, replicas=setting.replicas)
            self._ledger.beat(session, version=0, pulled=0, free_tokens=capacity)
            node.turn_ended = partial(self._turn_ended, number)
            node.begin()
            self._push(BEAT_S * (number + 1) / setting.nodes, self._beat, number)
        self._admit()
        while self._version < setting.steps:
            following = min(range(len(self._nodes)), key=lambda number: self._nodes[number].next_at)
            node_at = self._nodes[following].next_at
            if self._events and self._events[0][0] <= node_at:
                self._now, _, act, arguments = heapq.heappop(self._events)
                act(*arguments)
            elif math.isinf(node_at):
                raise RuntimeError(f"nothing will happen any more at {self._now:.1f} s")
            else:
                self._now = node_at
                self._nodes[following].advance()
        return Outcome(
            seconds=self._now,
            groups_per_s=len(self._groups) / self._now,
            tokens_per_s=self._tokens / self._now,
            lead_cpu=self._lead_busy / self._now,
            messages_per_s=self._messages / self._now,
            record_bytes_per_s=self._record_bytes / self._now,
            staleness_mean=sum(self._staleness) / len(self._staleness),
            staleness_max=max(self._staleness),
            sync_s=sum(self._syncs) / len(self._syncs),
            grants=tuple(self._grants),
        )

    def _push(self, at: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (at, next(self._serial), act, arguments))

    def _lead(self, cpu_s: float, act: Callable[..., None], *arguments: object) -> None:
        """Does something in the lead's loop when that has done what came before."""
        self._lead_free = max(self._now, self._lead_free) + cpu_s
        self._lead_busy += cpu_s
        self._messages += 1
        self._push(self._lead_free, act, *arguments)

    def _to_lead(self, tokens: int, act: Callable[..., None], *arguments: object) -> None:
        costs, setting = self._setting.lead, self._setting
        size = tokens * costs.token_bytes
        self._record_bytes += size
        cpu_s = costs.message_s + tokens * costs.token_s
        self._push(self._now + setting.latency_s + size / setting.rate, self._lead, cpu_s, act, *arguments)

    @staticmethod
    def _session(number: int) -> bytes:
        return b"node%d" % number

    def _admit(self) -> None:
        while self._leases._next < len(self._groups) and (lease := self._leases.take()) is not None:
            oldest = max(0, self._leases.step_of(lease) - self._setting.max_staleness)
            self._ledger.want(Key(lease, 0), min_version=oldest)
        self._decide()

    def _decide(self) -> None:
        for granted in self._ledger.decide():
            number, lease = int(granted.session.removeprefix(b"node")), granted.key.lease
            self._at[lease] = number
            self._grants[number] += 1
            self._lead(self._setting.lead.message_s, self._granted, number, lease)

    def _granted(self, number: int, lease: int) -> None:
        self._push(self._now + self._setting.latency_s, self._start, number, lease)

    def _start(self, number: int, lease: int) -> None:
        rows = [Traced(traj=index, group=lease, turns=row.turns) for index, row in enumerate(self._groups[lease])]
        self._nodes[number].arrive(rows, self._now)

    def _turn_ended(self, number: int, traced: Traced, turn: int) -> None:
        lease, tokens = traced.group, traced.turns[turn].gen_tokens
        self._oldest[lease] = min(self._oldest[lease], self._versions[number])
        self._tokens += tokens
        last = turn == len(traced.turns) - 1
        self._to_lead(tokens, self._record, lease, last)

    def _record(self, lease: int, last: bool) -> None:
        self._unfinished[lease] -= last
        if last and not self._unfinished[lease]:
            self._lead(self._setting.lead.message_s, self._decided, lease)

    def _decided(self, lease: int) -> None:
        self._ledger.finish(Key(lease, 0), sum(row.total_tokens for row in self._groups[lease]))
        self._made[self._leases.step_of(lease)] += 1
        self._decide()
        self._learn()

    def _learn(self) -> None:
        if not self._learning and self._made[self._version] == self._setting.groups_per_step:
            self._learning = True
            self._push(self._now + self._setting.learn_s, self._trained)

    def _trained(self) -> None:
        size = self._setting.groups_per_step
        step = self._version
        self._staleness += [step - self._oldest[lease] for lease in range(step * size, (step + 1) * size)]
        self._version += 1
        self._waiting_for = set(range(self._setting.nodes))
        self._trained_at = self._now
        self._link_free = max(self._link_free, self._now)
        # The lead's link is shared, so that the last bytes of all nodes come together.
        self._link_free += self._setting.nodes * self._setting.weight_bytes / self._setting.rate
        for number in range(self._setting.nodes):
            self._push(self._link_free + self._setting.latency_s + self._setting.load_s, self._live, number, step + 1)

    def _live(self, number: int, version: int) -> None:
        self._versions[number] = version
        member = self._ledger.members[self._session(number)]
        self._ledger.beat(member.session, version=version, pulled=version, free_tokens=member.free_tokens)
        self._waiting_for.discard(number)
        self._decide()
        if not self._waiting_for:
            self._syncs.append(self._now - self._trained_at)
            size = self._setting.groups_per_step
            for lease in range((version - 1) * size, version * size):
                self._leases.release(lease)
            self._learning = False
            self._admit()
            self._learn()

    def _beat(self, number: int) -> None:
        engines = self._nodes[number].engines
        free = sum(engine.cache.free for engine in engines) * self._setting.machine.block_size
        self._to_lead(0, self._beaten, number, free)
        self._push(self._now + BEAT_S, self._beat, number)

    def _beaten(self, number: int, free: int) -> None:
        self._ledger.beat(self._session(number), version=self._versions[number], pulled=self._version, free_tokens=free)
        self._lead(self._setting.lead.message_s, self._decide)  # its answer
