"""Where each trajectory is and what is reserved for it: the state of `engine.balancing.kv_aware.KvAware`, and its
invariants (`check`).

Legend: N trajectories, R replicas, H horizons of the forecast (see engine.balancing.length_forecast). A reservation is
the expected number of tokens at each horizon, and then their variances. All are integers, so that exactly what was
taken is released.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from engine.balancing.length_forecast import HORIZONS, GroupStats, Ints, LengthForecast, Reals
from engine.replica.port import KvSample

H = len(HORIZONS)
WAITING = ("ready", "parked", "fresh")
SHOWN_AFTER = 2  # samples until an engine's numbers include a request that was sent to it
KNOWN = 4096  # bound of remembered reservations: a new forecast clears them, but where all fit there is none


@dataclass(slots=True)
class TrackedTrajectory:
    """A trajectory. home: the replica in whose active set it is. leaves: it gives its place up when its turn ends."""

    key: int
    group: GroupStats
    tokens: int  # length when it was last reported
    state: str  # "fresh" | "ready" | "parked" | "running" | "tool"
    home: int | None = None
    since: float = 0.0  # when its tools were called
    steps: int = 0  # its replica's when its turn began
    moves: int = 0
    leaves: bool = False
    queued: int = 0  # number of its last entry into a queue, counted over all trajectories
    reserved_H: Ints | None = None


@dataclass(slots=True)
class TrackedReplica:
    """A replica. reserved_H: its row of `ReplicaArrays.reserved_RH`, the sum over its active set, each prompt once."""

    index: int
    blocks: int
    block_size: int
    reserved_H: Ints
    active: dict[int, TrackedTrajectory] = field(default_factory=dict)
    steps: int = 0
    forecast_at: int = 0  # steps when the reservations were last predicted
    draining: bool = False


@dataclass(kw_only=True, slots=True)
class ReplicaArrays:
    """What a decision reads of all replicas at once. Row i is replica i, whether it is up or not."""

    reserved_RH: Ints
    open_tokens_R: Reals  # capacity of replicas that take trajectories, 0 for others
    block_size_R: Reals
    free_blocks_R: Reals  # in the last sample, less a block for each running request
    sent_blocks_R2: Reals  # blocks of requests that no sample includes yet, newest last

    @classmethod
    def of(cls, count: int) -> ReplicaArrays:
        return cls(
            reserved_RH=np.zeros((count, 2 * H), np.int64),
            open_tokens_R=np.zeros(count),
            block_size_R=np.ones(count),
            free_blocks_R=np.zeros(count),
            sent_blocks_R2=np.zeros((count, SHOWN_AFTER)),
        )

    def extended(self, count: int) -> ReplicaArrays:
        """Returns these rows and `count` new ones."""
        more = ReplicaArrays.of(count)
        joined = {
            each.name: np.concatenate((getattr(self, each.name), getattr(more, each.name))) for each in fields(self)
        }
        return ReplicaArrays(**joined)


class KvLedger:
    """Trajectories, groups, queues and replicas. Every change keeps the invariants."""

    def __init__(self, lengths: LengthForecast) -> None:
        self.lengths = lengths
        self.trajectories: dict[int, TrackedTrajectory] = {}
        self.groups: dict[int, GroupStats] = {}
        self.group_ids: dict[int, int] = {}  # trajectory -> group
        self.replicas: dict[int, TrackedReplica] = {}
        self.arrays = ReplicaArrays.of(0)
        self.queues: dict[str, OrderedDict[int, TrackedTrajectory]] = {name: OrderedDict() for name in WAITING}
        # Those that wait for tools and have a home, the longest waiting first.
        self.tool_waiting: OrderedDict[int, TrackedTrajectory] = OrderedDict()
        self._parked: list[tuple[int, int, int]] = []  # heap of (tokens, key, queued); stale entries go when met
        self._queued = 0
        self._remembered: dict[tuple[int, ...], Ints] = {}  # (group, size, members that ended, block size) -> forecast
        self._version = -1

    def add_replica(self, index: int, blocks: int, block_size: int) -> None:
        if index >= len(self.arrays.reserved_RH):
            self._extend(index + 1 - len(self.arrays.reserved_RH))
        self.arrays.reserved_RH[index] = 0
        self.arrays.open_tokens_R[index] = blocks * block_size
        self.arrays.block_size_R[index] = block_size
        self.arrays.free_blocks_R[index] = blocks
        self.arrays.sent_blocks_R2[index] = 0
        self.replicas[index] = TrackedReplica(index, blocks, block_size, self.arrays.reserved_RH[index])

    def drain(self, replica: TrackedReplica) -> None:
        replica.draining = True
        self.arrays.open_tokens_R[replica.index] = 0

    def sample(self, replica: TrackedReplica, sample: KvSample) -> None:
        replica.steps += sample.steps
        self.arrays.free_blocks_R[replica.index] = sample.free_blocks - sample.running
        self.arrays.sent_blocks_R2[replica.index, :-1] = self.arrays.sent_blocks_R2[replica.index, 1:]
        self.arrays.sent_blocks_R2[replica.index, -1] = 0

    def add(self, key: int, group_id: int, prompt_tokens: int, tokens: int) -> TrackedTrajectory:
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = GroupStats(prompt_tokens)
        group.members += 1
        self.group_ids[key] = group_id
        trajectory = self.trajectories[key] = TrackedTrajectory(key, group, tokens, "fresh")
        return trajectory

    def remove(self, trajectory: TrackedTrajectory) -> None:
        self.dequeue(trajectory)
        self.release(trajectory)
        del self.trajectories[trajectory.key]
        trajectory.group.members -= 1
        group_id = self.group_ids.pop(trajectory.key)
        if not trajectory.group.members:
            del self.groups[group_id]

    def enqueue(self, trajectory: TrackedTrajectory, state: str) -> None:
        self.tool_waiting.pop(trajectory.key, None)
        trajectory.state = state
        self._queued += 1
        trajectory.queued = self._queued
        self.queues[state][trajectory.key] = trajectory
        if state == "parked":
            heapq.heappush(self._parked, (trajectory.tokens, trajectory.key, trajectory.queued))

    def first_in_line(self) -> TrackedTrajectory | None:
        """Returns the trajectory that gets the next place, or None.

        Fresh ones that came before the first parked one was parked go first, then the smallest parked one. Fresh ones
        that come later wait for all parked ones, so that none waits for ever.
        """
        fresh = next(iter(self.queues["fresh"].values()), None)
        parked = next(iter(self.queues["parked"].values()), None)
        if parked is None:
            self._parked.clear()
            return fresh
        if fresh is not None and fresh.queued < parked.queued:
            return fresh
        while True:
            _, key, queued = self._parked[0]
            smallest = self.queues["parked"].get(key)
            if smallest is not None and smallest.queued == queued:
                return smallest
            heapq.heappop(self._parked)

    def dequeue(self, trajectory: TrackedTrajectory) -> None:
        if trajectory.state in self.queues:
            self.queues[trajectory.state].pop(trajectory.key, None)

    def reserve(self, trajectory: TrackedTrajectory, replica: TrackedReplica) -> None:
        """Lets a trajectory run on a replica, with a reservation for what it will grow to. At home it keeps its own."""
        trajectory.tokens = self.length(trajectory)
        if trajectory.home != replica.index:
            cached_tokens = trajectory.group.prompt_tokens if replica.index in trajectory.group.replicas else 0
            sent_blocks = (trajectory.tokens - cached_tokens) / replica.block_size + 1
            self.arrays.sent_blocks_R2[replica.index, -1] += sent_blocks
            self.release(trajectory)
            trajectory.home = replica.index
            replica.active[trajectory.key] = trajectory
            trajectory.group.replicas[replica.index] = trajectory.group.replicas.get(replica.index, 0) + 1
            if trajectory.group.replicas[replica.index] == 1:
                replica.reserved_H[:H] += trajectory.group.prompt_tokens
            trajectory.reserved_H = self.reservation(trajectory, replica.block_size)
            replica.reserved_H += trajectory.reserved_H
        trajectory.state, trajectory.steps = "running", replica.steps

    def release(self, trajectory: TrackedTrajectory) -> None:
        """Takes a trajectory out of the active set, and its reservation with it."""
        if trajectory.home is None:
            return
        replica = self.replicas[trajectory.home]
        del replica.active[trajectory.key]
        assert trajectory.reserved_H is not None
        replica.reserved_H -= trajectory.reserved_H
        trajectory.group.replicas[trajectory.home] -= 1
        if not trajectory.group.replicas[trajectory.home]:
            del trajectory.group.replicas[trajectory.home]
            replica.reserved_H[:H] -= trajectory.group.prompt_tokens
        trajectory.home, trajectory.reserved_H, trajectory.leaves = None, None, False
        self.tool_waiting.pop(trajectory.key, None)

    def drop_replica(self, index: int) -> TrackedReplica:
        """Removes a replica. Its running trajectories become tool-waiting, and those that are ready are parked."""
        replica = self.replicas[index]
        for trajectory in list(replica.active.values()):
            self.release(trajectory)
            if trajectory.state == "running":
                trajectory.state = "tool"
            elif trajectory.state == "ready":
                self.dequeue(trajectory)
                self.enqueue(trajectory, "parked")
        self.arrays.open_tokens_R[index] = 0
        return self.replicas.pop(index)

    def length(self, trajectory: TrackedTrajectory) -> int:
        """Returns a trajectory's tokens now: a running one has grown by one in each step of its replica."""
        if trajectory.state != "running" or trajectory.home is None:
            return trajectory.tokens
        return trajectory.tokens + self.replicas[trajectory.home].steps - trajectory.steps

    def reservation(self, trajectory: TrackedTrajectory, block_size: int) -> Ints:
        """Returns the reservation of a trajectory: tokens beyond its group's prompt, with the half block that it wastes
        at its end.
        """
        if self._version != self.lengths.version or len(self._remembered) == KNOWN:
            self._remembered.clear()
            self._version = self.lengths.version
        size = max(0, self.length(trajectory) - trajectory.group.prompt_tokens)
        case = self.group_ids[trajectory.key], size, len(trajectory.group.ended), block_size
        reserved_H = self._remembered.get(case)
        if reserved_H is None:
            reserved_H = self.lengths.predict(np.array([size]), [trajectory.group])[0]
            reserved_H[:H] += block_size // 2
            self._remembered[case] = reserved_H
        return reserved_H

    def headroom_tokens(self, trajectory: TrackedTrajectory, fill: float, spread: float) -> Reals:
        """Returns the tokens (R) that remain free of the share `fill` of each replica at its fullest horizon, with the
        trajectory there and `spread` standard deviations of the predicted use.

        It is -inf where the trajectory does not fit: where it would be negative, or where the live free blocks do not
        hold a block for each running request and what must be computed at once (the context, less the group's prompt
        where that is cached).
        """
        arrays = self.arrays
        group = trajectory.group
        length = self.length(trajectory)
        row_H = self.reservation(trajectory, int(arrays.block_size_R[0]))
        total_RH = arrays.reserved_RH + row_H
        peak_R = np.maximum.reduce(total_RH[:, :H] + spread * np.sqrt(total_RH[:, H:]), axis=1)
        headroom_R = fill * arrays.open_tokens_R - peak_R - group.prompt_tokens
        sent_blocks_R = np.add.reduce(arrays.sent_blocks_R2, axis=1)
        live_R = arrays.free_blocks_R - sent_blocks_R - length / arrays.block_size_R - 1
        for index in group.replicas:
            headroom_R[index] += group.prompt_tokens
            live_R[index] += group.prompt_tokens / arrays.block_size_R[index]
        headroom_R[(np.minimum(headroom_R, live_R) < 0) | (arrays.open_tokens_R == 0)] = -np.inf
        return headroom_R

    def forecast(self, replica: TrackedReplica) -> None:
        """Predicts all reservations of a replica anew."""
        trajectories = list(replica.active.values())
        replica.forecast_at = replica.steps
        if not trajectories:
            assert not replica.reserved_H.any()
            return
        rows_NH = self.lengths.predict(self.sizes(trajectories), [trajectory.group for trajectory in trajectories])
        rows_NH[:, :H] += replica.block_size // 2
        replica.reserved_H[:] = rows_NH.sum(axis=0)
        for trajectory, row_H in zip(trajectories, rows_NH, strict=True):
            trajectory.reserved_H = row_H
        replica.reserved_H[:H] += sum(group.prompt_tokens for group in unique_groups(trajectories))

    def sizes(self, trajectories: Sequence[TrackedTrajectory]) -> Ints:
        """Returns the tokens (N) beyond the group's prompt, now."""
        steps: dict[int | None, int] = {index: replica.steps for index, replica in self.replicas.items()}
        sizes = []
        for trajectory in trajectories:  # `length` inlined, since there may be thousands
            size = trajectory.tokens - trajectory.group.prompt_tokens
            if trajectory.state == "running":
                size += steps[trajectory.home] - trajectory.steps
            sizes.append(size)
        return np.maximum(np.array(sizes, np.int64), 0)

    def waiting(self) -> int:
        return sum(map(len, self.queues.values()))

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        for name, queue in self.queues.items():
            for key, trajectory in queue.items():
                assert trajectory.state == name, trajectory
                assert self.trajectories[key] is trajectory, trajectory
        for replica in self.replicas.values():
            self._check_replica(replica)
        for trajectory in self.trajectories.values():
            self._check_trajectory(trajectory)
        for group in self.groups.values():
            members = [trajectory for trajectory in self.trajectories.values() if trajectory.group is group]
            assert len(members) == group.members > 0, group
            homes = [member.home for member in members if member.home is not None]
            assert group.replicas == {home: homes.count(home) for home in homes}, group

    def _check_replica(self, replica: TrackedReplica) -> None:
        total_H: Reals | Ints = np.zeros(2 * H, np.int64)
        for trajectory in replica.active.values():
            assert trajectory.home == replica.index, trajectory
            assert trajectory.state in ("running", "tool", "ready"), trajectory
            assert trajectory.state == "running" or not replica.draining, trajectory
            assert trajectory.reserved_H is not None
            total_H = total_H + trajectory.reserved_H
        total_H[:H] += sum(group.prompt_tokens for group in unique_groups(replica.active.values()))
        assert replica.reserved_H.base is self.arrays.reserved_RH
        assert np.array_equal(total_H, replica.reserved_H), (replica.index, total_H, replica.reserved_H)

    def _check_trajectory(self, trajectory: TrackedTrajectory) -> None:
        state, home = trajectory.state, trajectory.home
        assert state in (*self.queues, "running", "tool"), trajectory
        assert state not in self.queues or self.queues[state].get(trajectory.key) is trajectory, trajectory
        assert home is None or self.replicas[home].active.get(trajectory.key) is trajectory, trajectory
        assert (home is None) == (trajectory.reserved_H is None), trajectory
        if state in ("running", "ready"):
            assert home is not None, trajectory
        if state in ("parked", "fresh"):
            assert home is None, trajectory
        assert (trajectory.key in self.tool_waiting) == (state == "tool" and home is not None), trajectory

    def _extend(self, count: int) -> None:
        self.arrays = self.arrays.extended(count)
        for replica in self.replicas.values():
            replica.reserved_H = self.arrays.reserved_RH[replica.index]


def unique_groups(trajectories: Iterable[TrackedTrajectory]) -> list[GroupStats]:
    """Returns the groups of these trajectories, each once."""
    return list({id(trajectory.group): trajectory.group for trajectory in trajectories}.values())
