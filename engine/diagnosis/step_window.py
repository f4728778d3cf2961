"""Computes what share of a run's newest steps was lost to each cause. Pure: rows of metrics.jsonl go in.

Shares overlap if several causes held at once. Each one is between 0 and 1, up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Any

from engine import metric_names as metric

ROOM = 0.8  # above this share of busy cores, learner and replicas gain nothing from running at once
SLOW = 1.5  # a replica that needs so many times as long for a token as the others is slow
STEADY = 1.2  # in three of four steps it needs so many times as long at least
SATURATED = 0.9  # above this CPU share of the event loop's thread, or of all cores, everything waits for it

_PAST = {
    "are": "were",
    "computes": "computed",
    "has": "had",
    "have": "had",
    "hold": "held",
    "is": "was",
    "limit": "limited",
    "limits": "limited",
    "needs": "needed",
    "runs": "ran",
    "serve": "served",
    "serve now": "served at the end",
    "take": "took",
    "takes": "took",
    "use": "used",
    "wait": "waited",
    "waits": "waited",
    "works": "worked",
}

Row = Mapping[str, Any]


class Limit(StrEnum):
    """What a run waits for."""

    DEAD_REPLICA = "dead replica"
    SLOW_REPLICA = "slow replica"
    MACHINE = "machine"
    """Other processes that use its cores."""
    STAGE = "stage"
    """A stage of the user's."""
    HOST = "host"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    TOOL = "tool"
    KV = "kv"
    TAIL = "tail"
    REWARD = "reward"
    LEARNER = "learner"
    SYNC = "sync"
    STALENESS = "staleness"
    NONE = "none"
    """Nothing but the replicas themselves, which sample for most of the time."""


class StepWindow:
    """The newest steps of a run. rows: those of metrics.jsonl that have `time/step_s`. config: that of config.json.

    summary: that of summary.json, once the run has ended; its totals of idle seconds are used if the rows have none.
    ended: whether the run goes on no more.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        config: Mapping[str, Any],
        summary: Mapping[str, Any] | None = None,
        *,
        ended: bool = False,
    ) -> None:
        self.rows, self.config, self._ended = rows, config, ended
        self.seconds = max(1e-9, self.total(metric.TIME_STEP_S))
        # If rollout nodes make all groups, the replicas that are measured here only evaluate.
        self._replica_seconds = {} if config.get("nodes_only") else _replica_seconds(rows, summary or {})

    @property
    def is_measured(self) -> bool:
        """Whether the rows say what the replicas that make the rollouts waited for."""
        return bool(self._replica_seconds)

    def verb(self, present: str) -> str:
        """Returns a verb in the tense of the run: present while it goes on, past once it has ended."""
        return _PAST[present] if self._ended else present

    def total(self, name: str) -> float:
        """Returns the sum of a metric over the steps."""
        return sum(row.get(name, 0.0) for row in self.rows)

    def knows(self, name: str) -> bool:
        """Returns whether a row has this metric."""
        return any(name in row for row in self.rows)

    def looked(self, name: str) -> str:
        """Returns in which of the steps a metric was measured, as text in brackets; empty if in all."""
        known = sum(name in row for row in self.rows)
        return "" if known == len(self.rows) else f" (measured in {known} of {len(self.rows)} steps)"

    def sum_of(self, name: str) -> float | None:
        """Returns the sum of a metric over the steps; None if no row has it."""
        return self.total(name) if self.knows(name) else None

    def peak(self, name: str) -> float | None:
        """Returns the largest value of a metric, or of all metrics of a family; None if no row has one."""
        known = any(key == name or metric.part_of(name, key) for row in self.rows for key in row)
        return self.most(name) if known else None

    def mean_per(self, name: str, count: str) -> float | None:
        """Returns the mean of a metric that each step gives as a mean over so many; a step that does not say how many
        counts as one. None if no row has the metric.
        """
        pairs = [(row[name], row.get(count, 1.0)) for row in self.rows if name in row]
        whole = sum(weight for _, weight in pairs)
        return sum(value * weight for value, weight in pairs) / whole if whole else None

    def share(self, name: str) -> float:
        """Returns a phase's share of the steps' seconds."""
        return self.total(name) / self.seconds

    def mean(self, name: str, default: float = 0.0) -> float:
        """Returns the mean of a metric over the steps, weighted by their seconds; default if no row has it."""
        rows = [row for row in self.rows if name in row]
        seconds = sum(row[metric.TIME_STEP_S] for row in rows)
        return sum(row[name] * row[metric.TIME_STEP_S] for row in rows) / seconds if seconds else default

    def most(self, name: str) -> float:
        """Returns the largest value of a metric, or of all metrics of a family; 0 if no row has one."""
        values = (value for row in self.rows for key, value in row.items() if key == name or metric.part_of(name, key))
        return max(values, default=0.0)

    def idle(self, cause: str) -> float:
        """Returns the share of the replicas' time that went to a cause; "busy" is one of the causes."""
        return self._replica_seconds.get(cause, 0.0) / max(1e-9, sum(self._replica_seconds.values()))

    def means_of(self, family: str) -> dict[str, float]:
        """Returns the mean of each metric of a family, by its part."""
        parts = {metric.part_of(family, name) for row in self.rows for name in row}
        return {part: self.mean(metric.member(family, part)) for part in parts if part is not None}

    @property
    def slow_replicas(self) -> list[tuple[str, float, float]]:
        """The replicas that need SLOW times as long for a token as the others, the slowest first: each with its
        milliseconds and the median of the others.
        """
        needs = self.means_of(metric.REPLICAS_TOKEN_MS)
        slow = []
        for replica, token_ms in needs.items():
            others = [theirs for other, theirs in needs.items() if other != replica]
            if others and token_ms >= SLOW * median(others) and self._is_slow_each_step(replica):
                slow.append((replica, token_ms, median(others)))
        return sorted(slow, key=lambda entry: -entry[1])

    def _is_slow_each_step(self, replica: str) -> bool:
        """Returns whether a replica is slower than the others in most steps: what others use hits one, then another."""
        own, slower, seen = metric.member(metric.REPLICAS_TOKEN_MS, replica), 0, 0
        for row in self.rows:
            others = [row[name] for name in row if metric.part_of(metric.REPLICAS_TOKEN_MS, name) and name != own]
            if own in row and others:
                seen += 1
                slower += row[own] >= STEADY * median(others)
        return slower >= 0.75 * seen

    @property
    def flat_groups(self) -> tuple[float, float]:
        """Share of the groups that have no signal, and of those that have none because they are solved."""
        groups = max(1.0, self.total(metric.GROUPS_ALL))
        return self.total(metric.GROUPS_FLAT) / groups, self.total(metric.GROUPS_SOLVED) / groups

    @property
    def max_staleness(self) -> int:
        return int(self.value("max_staleness", 0))

    def has(self, name: str) -> bool:
        """Returns whether the recipe has this option. A run whose configuration is not known may have any."""
        return not self.config or self.option(name) in self.config

    def option(self, name: str) -> str:
        """Returns an option's name on the command line, which may have the part of the configuration before it."""
        return next((key for key in self.config if key == name or key.endswith(f".{name}")), name)

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the value of an option; default if config.json has none of that name."""
        return self.config.get(self.option(name), default)

    @property
    def tool_waits(self) -> dict[str, float]:
        """Seconds in which trajectories waited for each tool."""
        names = {name for row in self.rows for name in row}
        tools = {name: metric.part_of(metric.TOOLS_WAIT, name) for name in sorted(names)}
        return {tool: self.total(name) for name, tool in tools.items() if tool is not None}

    @property
    def blocked_at(self) -> str:
        """The line that blocked the event loop longest, "mine.py:12 clean"; empty if none was noted."""
        seconds = Counter[str]()
        for row in self.rows:
            for name, value in row.items():
                if (line := metric.part_of(metric.HOST_BLOCKED_AT, name)) is not None:
                    seconds[line] += value
        return max(seconds, key=lambda line: seconds[line], default="")

    def lost(self) -> dict[Limit, float]:
        """Returns the share of the steps that each cause took, averaged over replicas. NONE: the share not lost."""
        gate, stage = self.idle("staleness_gate"), self.idle("stage")
        checkpoint = min(self.share(metric.TIME_CHECKPOINT_S), self.idle("host"))
        publish = min(1.0, self.total(metric.LEARNER_PUBLISH_S) / max(1e-9, self.total(metric.TIME_LEARN_S)))
        return {
            Limit.DEAD_REPLICA: self.idle("down"),
            Limit.SLOW_REPLICA: self._lost_to_a_slow_replica(),
            Limit.MACHINE: self.others if self.mean(metric.HOST_MACHINE_CPU_SHARE) >= SATURATED else 0.0,
            Limit.STAGE: stage,
            Limit.HOST: max(
                self.share(metric.HOST_LOOP_BLOCKED_S),
                max(0.0, self._host_idle() - checkpoint),
                self._saturated(),
            ),
            Limit.CHECKPOINT: checkpoint,
            Limit.EVALUATION: self._evaluating(),
            Limit.TOOL: max(self.share(metric.TOOLS_STARVED_S), self.idle("tool_wait")),
            Limit.KV: self.share(metric.KV_BLOCKED_S),
            Limit.TAIL: self.share(metric.ROLLOUT_TAIL_S),
            Limit.REWARD: self.idle("reward"),
            Limit.LEARNER: gate * (1 - publish),
            Limit.SYNC: max(self.idle("weight_sync"), self.share(metric.TIME_SYNC_S)) + gate * publish,
            Limit.STALENESS: max(0.0, self._waits_for_each_other() - stage),
            Limit.NONE: self.sampling,
        }

    @property
    def sampling(self) -> float:
        """Share of the steps in which the replicas sampled at full width."""
        starved = max(0.0, self.share(metric.TOOLS_STARVED_S) - self.idle("tool_wait"))
        return max(
            0.0, self.idle("busy") - self.share(metric.KV_BLOCKED_S) - self.share(metric.ROLLOUT_TAIL_S) - starved
        )

    @property
    def others(self) -> float:
        """Share of the machine's cores that processes of others use; 0 if none was seen."""
        return self.mean(metric.HOST_OTHERS_CPU_SHARE)

    @property
    def busiest_stage(self) -> tuple[str, float]:
        """The stage of the user's that worked for the largest share of its time, with that share; ("", 0) for none."""
        families = (metric.STAGE_BUSY_S, metric.STAGE_BLOCKED_IN_S, metric.STAGE_BLOCKED_OUT_S)
        names = {metric.part_of(metric.STAGE_BUSY_S, name) for row in self.rows for name in row}
        busiest = "", 0.0
        for name in sorted(name for name in names if name is not None and name not in metric.OWN_STAGES):
            busy_s, *waits = (self.total(metric.member(family, name)) for family in families)
            share = busy_s / max(1e-9, busy_s + sum(waits))
            busiest = max(busiest, (name, share), key=lambda stage: stage[1])
        return busiest

    def _lost_to_a_slow_replica(self) -> float:
        """Returns the share of the replicas' time that the slowest one loses, compared with the others."""
        count = max(1, len(self.means_of(metric.REPLICAS_TOKEN_MS)))
        return max(((1 - usual_ms / token_ms) / count for _, token_ms, usual_ms in self.slow_replicas), default=0.0)

    def _evaluating(self) -> float:
        """Returns the share of the time, evaluations between the steps included, that these took."""
        evaluated = self.total(metric.TIME_EVAL_S)
        return evaluated / (self.seconds + evaluated)

    def _host_idle(self) -> float:
        """Returns the share of idle time that counts for the host.

        Time in which `max_staleness` lets no group begin does not count.
        """
        gated = self.share(metric.TIME_LEASE_WAIT_S) if self.max_staleness else 0.0
        return max(0.0, self.idle("host") - gated)

    def _saturated(self) -> float:
        """CPU share of the event loop's thread if it has no time left, else 0: a busy loop alone costs nothing."""
        used = self.mean(metric.HOST_LOOP_CPU_SHARE)
        return used if used >= SATURATED else 0.0

    def _waits_for_each_other(self) -> float:
        """Share of the steps that more staleness would save.

        On-policy, replicas and learner take turns, and the shorter of the two turns can be saved. Otherwise it is the
        time in which the learner waits for rollouts, no new ones may begin, and the replicas are nearly empty.
        """
        learner_waits = self.share(metric.TIME_ROLLOUT_S)
        if self.max_staleness:
            empty = max(0.0, 1 - self.sampling - self.share(metric.KV_BLOCKED_S))
            return min(learner_waits, self.share(metric.TIME_LEASE_WAIT_S), empty)
        return min(learner_waits, self.idle("staleness_gate")) if self.may_overlap else 0.0

    @property
    def may_overlap(self) -> bool:
        """Whether learner and replicas could work at once: on GPUs of their own, or on cores that are not all busy."""
        if devices := self.config.get("devices"):
            return len(devices) > self.value("learner_ranks", 1)
        return self.has_free_cores

    @property
    def has_free_cores(self) -> bool:
        """Whether cores of the machine are free."""
        return self.mean(metric.HOST_MACHINE_CPU_SHARE, 1.0) < ROOM


def _replica_seconds(rows: Sequence[Row], summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of all replicas together, by "busy" or cause, from the rows, else from the summary."""
    totals: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            cause = "busy" if name == metric.REPLICAS_BUSY_S else metric.part_of(metric.IDLE, name)
            if cause is not None:
                totals[cause] += value
    if not totals:
        for causes in summary.get("idle_attribution_s", {}).values():
            totals.update(causes)
    return dict(totals)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
