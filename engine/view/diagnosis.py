"""What limits a run, in one sentence, with alarms before advice. Pure: rows of metrics.jsonl go in.

Every figure is a share of the seconds of the newest steps that was lost to one cause; the largest is the limit, unless
the replicas sampled for longer than that: then they are, and the run is healthy. Alarms are said whatever the limit is;
advice names the option that changes what it speaks of.

Invariants
- A run that has lost a replica, or whose event loop stands still, is limited by that: what follows from it is not
  taken for a cause.
- Advice and alarms hold the figures that they are founded on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

WINDOW = 8  # newest steps that are looked at
BLOCKED = 0.3  # share of the steps in which the event loop stood still, from which all other figures are bent by it
DOWN = 0.1  # share of the replicas' time that counts as a replica missing
NOTABLE = 0.1  # share of the steps that is worth advice
ROOM = 0.8  # of a machine's cores in use; where more are, learner and replicas gain nothing from running at once

Row = Mapping[str, Any]


class Limit(StrEnum):
    """What a run waits for."""

    DEAD_REPLICA = "dead replica"
    HOST = "host"
    TOOL = "tool"
    KV = "kv"
    TAIL = "tail"
    REWARD = "reward"
    LEARNER = "learner"
    SYNC = "sync"
    STALENESS = "staleness"
    NONE = "none"
    """The replicas themselves: they sample for most of the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An alarm or a piece of advice. figures: what it is founded on, by the names of the metrics where they have one.
    option: as on the command line, or the field of TrainingConfig's parts; empty where none changes it.
    """

    text: str
    figures: Mapping[str, float]
    option: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """sentence: healthy, or what limits it, with figures. lost: share of the steps by cause, overlapping where several
    held at once. steps: the first and the last that were looked at, None where there is none yet.
    """

    sentence: str
    limit: Limit
    healthy: bool
    alarms: tuple[Finding, ...] = ()
    advice: tuple[Finding, ...] = ()
    lost: Mapping[Limit, float] = field(default_factory=dict)
    steps: tuple[int, int] | None = None


def diagnose(
    rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any] | None = None, *, window: int = WINDOW
) -> Diagnosis:
    """rows: of metrics.jsonl, in their order; the newest `window` steps that have a pace are looked at. config: that of
    config.json. summary: of a run that has ended.

    >>> row = {"step": 1, "time/step_s": 2.0, "time/rollout_s": 0.3, "time/learn_s": 1.7, "idle/staleness_gate_s": 3.2}
    >>> found = diagnose([row | {"replicas/busy_s": 0.8}], {"max_staleness": 0})
    >>> str(found.limit), round(found.lost[Limit.LEARNER], 2)
    ('learner', 0.8)
    """
    steps = [row for row in rows if "time/step_s" in row][-window:]
    if not steps:
        return Diagnosis(sentence="No step is trained yet.", limit=Limit.NONE, healthy=True)
    seen = _Window(steps, config)
    lost = seen.lost()
    limit = _limit(seen, lost)
    alarms = tuple(_alarms(seen))
    return Diagnosis(
        sentence=_SENTENCES[limit](seen, lost),
        limit=limit,
        healthy=limit is Limit.NONE and not alarms,
        alarms=alarms,
        advice=tuple(_advice(seen, lost)),
        lost=lost,
        steps=(int(steps[0]["step"]), int(steps[-1]["step"])),
    )


class _Window:
    """Sums over the steps that are looked at."""

    def __init__(self, rows: Sequence[Row], config: Mapping[str, Any]) -> None:
        self.rows, self.config = rows, config
        self.seconds = max(1e-9, self.total("time/step_s"))
        idle = sum(self.total(name) for name in {name for row in rows for name in row} if name.startswith("idle/"))
        self.observed_s = max(1e-9, self.total("replicas/busy_s") + idle)

    def total(self, name: str) -> float:
        return sum(row.get(name, 0.0) for row in self.rows)

    def share(self, name: str) -> float:
        """Of the seconds of the steps."""
        return self.total(name) / self.seconds

    def mean(self, name: str, default: float = 0.0) -> float:
        """Over the steps, each by its length; default where no row has it."""
        rows = [row for row in self.rows if name in row]
        seconds = sum(row["time/step_s"] for row in rows)
        return sum(row[name] * row["time/step_s"] for row in rows) / seconds if seconds else default

    def idle(self, cause: str) -> float:
        """Share of the replicas' time."""
        return self.total(f"idle/{cause}_s") / self.observed_s

    @property
    def busy(self) -> float:
        return self.total("replicas/busy_s") / self.observed_s

    @property
    def max_staleness(self) -> int:
        return int(self.config.get("max_staleness", 0))

    def option(self, name: str) -> str:
        """As the command line knows it: alone, or within a part of the configuration."""
        return next((key for key in self.config if key == name or key.endswith(f".{name}")), name)

    def given(self, name: str) -> str:
        """The option with its value, where config.json has it."""
        option = self.option(name)
        return f"{option}={self.config[option]}" if option in self.config else option

    def lost(self) -> dict[Limit, float]:
        """Share of the steps by cause. Those of replicas are the mean of all."""
        gate = self.idle("staleness_gate")
        publish = min(1.0, self.total("learner/publish_s") / max(1e-9, self.total("time/learn_s")))
        return {
            Limit.DEAD_REPLICA: self.idle("down"),
            Limit.HOST: max(self.share("host/loop_blocked_s"), self._host_idle()),
            Limit.TOOL: max(self.share("tools/starved_s"), self.idle("tool_wait")),
            Limit.KV: self.share("kv/blocked_s"),
            Limit.TAIL: self.share("rollout/tail_s"),
            Limit.REWARD: self.idle("reward"),
            Limit.LEARNER: gate * (1 - publish),
            Limit.SYNC: max(self.idle("weight_sync"), self.share("time/sync_s")) + gate * publish,
            Limit.STALENESS: self._waits_for_each_other(),
            Limit.NONE: self.sampling,
        }

    @property
    def sampling(self) -> float:
        """Share of the steps in which the replicas sampled at full width."""
        starved = max(0.0, self.share("tools/starved_s") - self.idle("tool_wait"))
        return max(0.0, self.busy - self.share("kv/blocked_s") - self.share("rollout/tail_s") - starved)

    def _host_idle(self) -> float:
        """Without what the bound on staleness explains: replicas without work while nothing more may begin."""
        gated = self.share("time/lease_wait_s") if self.max_staleness else 0.0
        return max(0.0, self.idle("host") - gated)

    def _waits_for_each_other(self) -> float:
        """Share of the steps that more staleness would save.

        On-policy, replicas and learner take turns: the shorter of the two. Else the time in which the learner waits
        for rollouts, no new ones may begin, and the replicas are (nearly) empty all the same.
        """
        learner_waits = self.share("time/rollout_s")
        if self.max_staleness:
            return min(learner_waits, self.share("time/lease_wait_s"), 1 - self.sampling - self.share("kv/blocked_s"))
        return min(learner_waits, self.idle("staleness_gate")) if self._may_overlap else 0.0

    @property
    def _may_overlap(self) -> bool:
        """Learner and replicas could work at once: on GPUs of their own, or on cores that are not all in use."""
        if devices := self.config.get("devices"):
            return len(devices) > self.config.get("learner_ranks", 1)
        return self.mean("host/machine_cpu_share", 1.0) < ROOM


def _limit(seen: _Window, lost: Mapping[Limit, float]) -> Limit:
    if lost[Limit.DEAD_REPLICA] >= DOWN:
        return Limit.DEAD_REPLICA
    if lost[Limit.HOST] >= BLOCKED:
        return Limit.HOST
    if _staleness_limits(seen, lost):
        return Limit.STALENESS
    causes = (Limit.TOOL, Limit.KV, Limit.TAIL, Limit.REWARD, Limit.LEARNER, Limit.SYNC, Limit.NONE)
    return max(causes, key=lambda cause: lost[cause])


def _staleness_limits(seen: _Window, lost: Mapping[Limit, float]) -> bool:
    """More staleness saves more than anything else would: all of what it overlaps, where another part that is made
    twice as fast saves half of what it takes. A tail that it would overlap too is no other cause.
    """
    saved = lost[Limit.STALENESS]
    within_rollouts = [Limit.TOOL, Limit.KV, Limit.REWARD] + ([] if seen.max_staleness else [Limit.TAIL])
    return saved > max(lost[cause] for cause in within_rollouts) and saved >= max(
        lost[cause] / 2 for cause in (Limit.LEARNER, Limit.SYNC, Limit.NONE)
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _dead(seen: _Window, lost: Mapping[Limit, float]) -> str:
    live = int(seen.rows[-1].get("replicas/live", 0))
    return (
        f"A dead replica limits this run: {_percent(lost[Limit.DEAD_REPLICA])} of the replicas' time was lost to it, "
        f"{live} serve now."
    )


def _host(seen: _Window, lost: Mapping[Limit, float]) -> str:
    blocked = seen.share("host/loop_blocked_s")
    if blocked < lost[Limit.HOST]:
        return (
            f"The host limits this run: {_percent(lost[Limit.HOST])} of the replicas' time waits for the node's own "
            "work."
        )
    longest = max(row.get("host/loop_lag_max_ms", 0.0) for row in seen.rows)
    stage = _own_stage(seen.rows)
    suspect = f"; stage `{stage}` is the busiest of yours" if stage else ""
    return (
        f"The host limits this run: the event loop stood still for {_percent(blocked)} of the time, up to "
        f"{longest:,.0f} ms at once{suspect}."
    )


OURS = ("admit", "groups", "batch", "write_rollouts", "learn")  # stages of engine.training


def _own_stage(rows: Sequence[Row]) -> str:
    """The stage of the user's that was busy longest; empty where there is none."""
    busy = {
        name.split("/")[1]: rows[-1][name]
        for name in rows[-1]
        if name.startswith("stage/") and name.endswith("/busy_s") and name.split("/")[1] not in OURS
    }
    return max(busy, key=lambda name: busy[name], default="")


def _tool(seen: _Window, lost: Mapping[Limit, float]) -> str:
    waits = _tool_waits(seen)
    name = max(waits, key=lambda tool: waits[tool], default="")
    whose = f" of `{name}`" if name else ""
    return f"Tools limit this run: for {_percent(lost[Limit.TOOL])} of a step the replicas wait for tool calls{whose}."


def _tool_waits(seen: _Window) -> dict[str, float]:
    """Seconds in which trajectories waited, by tool."""
    names = {name for row in seen.rows for name in row if name.startswith("tools/wait/")}
    return {name.removeprefix("tools/wait/").removesuffix("_s"): seen.total(name) for name in sorted(names)}


def _kv(seen: _Window, lost: Mapping[Limit, float]) -> str:
    return (
        f"The KV cache limits this run: for {_percent(lost[Limit.KV])} of a step trajectories wait for KV blocks "
        f"(peak use {_percent(_kv_peak(seen.rows))}, {seen.total('kv/preemptions'):.0f} preemptions)."
    )


def _kv_peak(rows: Sequence[Row]) -> float:
    return max((value for row in rows for name, value in row.items() if name.startswith("kv_peak/")), default=0.0)


def _tail(seen: _Window, lost: Mapping[Limit, float]) -> str:
    return (
        f"A few long rollouts limit this run: for {_percent(lost[Limit.TAIL])} of a step at most an eighth of the "
        "trajectories are still under way."
    )


def _reward(seen: _Window, lost: Mapping[Limit, float]) -> str:
    return f"Rewards limit this run: {_percent(lost[Limit.REWARD])} of the replicas' time waits for grading."


def _learner(seen: _Window, lost: Mapping[Limit, float]) -> str:
    return (
        f"The learner limits this run: the replicas wait for it {_percent(lost[Limit.LEARNER])} of their time "
        f"({seen.total('time/learn_s') / len(seen.rows):.2f} of {seen.seconds / len(seen.rows):.2f} s per step)."
    )


def _sync(seen: _Window, lost: Mapping[Limit, float]) -> str:
    seconds = seen.total("time/sync_s") + seen.total("learner/publish_s")
    return (
        f"Weight transfer limits this run: it takes {_percent(lost[Limit.SYNC])} of a step "
        f"({seconds / len(seen.rows):.2f} s of publishing and loading)."
    )


def _staleness(seen: _Window, lost: Mapping[Limit, float]) -> str:
    return (
        f"Staleness limits this run: replicas and learner wait for each other under {seen.given('max_staleness')}; "
        f"overlapping them would save up to {_percent(lost[Limit.STALENESS])} of a step."
    )


def _none(seen: _Window, lost: Mapping[Limit, float]) -> str:
    rate = seen.total("tokens/generated") / seen.seconds
    second = max((cause for cause in lost if cause is not Limit.NONE), key=lambda cause: lost[cause])
    return (
        f"The replicas are busy {_percent(seen.busy)} of the time at {rate:,.0f} tokens/s; {second} is next with "
        f"{_percent(lost[second])} of a step."
    )


_SENTENCES: dict[Limit, Callable[[_Window, Mapping[Limit, float]], str]] = {
    Limit.DEAD_REPLICA: _dead,
    Limit.HOST: _host,
    Limit.TOOL: _tool,
    Limit.KV: _kv,
    Limit.TAIL: _tail,
    Limit.REWARD: _reward,
    Limit.LEARNER: _learner,
    Limit.SYNC: _sync,
    Limit.STALENESS: _staleness,
    Limit.NONE: _none,
}


def _alarms(seen: _Window) -> list[Finding]:
    return []


def _advice(seen: _Window, lost: Mapping[Limit, float]) -> list[Finding]:
    return []
