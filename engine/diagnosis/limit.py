"""What limits a run, in one sentence, with alarms before advice. Pure: rows of metrics.jsonl go in.

Every figure is a share of the seconds of the newest steps that was lost to one cause. The largest is the limit, unless
the replicas sampled for longer than that: then nothing but they limit the run. Alarms are said whatever the limit is;
advice names the option that changes what it speaks of.

Invariants
- A run that has lost a replica, or whose event loop stands still, is limited by that: what follows from it is not
  taken for a cause.
- Alarms and advice hold the figures that they are founded on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.diagnosis.advice import Finding, advice, alarms
from engine.diagnosis.step_window import Limit, Row, StepWindow, percent

WINDOW = 8  # newest steps that are looked at
BLOCKED = 0.3  # share of the steps in which the event loop stood still, from which all other figures are bent by it
DOWN = 0.1  # share of the replicas' time that counts as a replica missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """sentence: healthy, or what limits it, with figures. lost: share of the steps by cause, overlapping where several
    held at once. steps: the first and the last that were looked at, None where there is none yet.
    """

    sentence: str
    limit: Limit
    alarms: tuple[Finding, ...] = ()
    advice: tuple[Finding, ...] = ()
    lost: Mapping[Limit, float] = field(default_factory=dict)
    steps: tuple[int, int] | None = None

    @property
    def healthy(self) -> bool:
        """Nothing but the replicas themselves limits it, and nothing is wrong."""
        return self.limit is Limit.NONE and not self.alarms


def diagnose(
    rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any] | None = None, *, window: int = WINDOW
) -> Diagnosis:
    """rows: of metrics.jsonl, in their order; the newest `window` steps that have a pace are looked at. config: that of
    config.json. summary: of a run that has ended (`StepWindow`).

    >>> row = {"step": 1, "time/step_s": 2.0, "time/rollout_s": 0.3, "time/learn_s": 1.7, "replicas/busy_s": 0.8}
    >>> found = diagnose([row | {"idle/staleness_gate_s": 3.2}], {"max_staleness": 0})
    >>> str(found.limit), round(found.lost[Limit.LEARNER], 2)
    ('learner', 0.8)
    """
    steps = [row for row in rows if "time/step_s" in row][-window:]
    if not steps:
        return Diagnosis(sentence="No step is trained yet.", limit=Limit.NONE)
    seen = StepWindow(steps, config, summary)
    between = int(steps[0]["step"]), int(steps[-1]["step"])
    if not seen.is_measured:
        waits = percent(seen.share("time/rollout_s"))
        sentence = f"What the replicas waited for is not known; the learner waits for rollouts {waits} of the time."
        return Diagnosis(sentence=sentence, limit=Limit.NONE, alarms=tuple(alarms(seen)), steps=between)
    lost, wrong = seen.lost(), tuple(alarms(seen))
    limit = _limit(seen, lost)
    sentence = _SENTENCES[limit](seen, lost)
    return Diagnosis(
        sentence=f"Healthy. {sentence}" if limit is Limit.NONE and not wrong else sentence,
        limit=limit,
        alarms=wrong,
        advice=tuple(advice(seen, lost, limit)),
        lost=lost,
        steps=between,
    )


def _limit(seen: StepWindow, lost: Mapping[Limit, float]) -> Limit:
    if lost[Limit.DEAD_REPLICA] >= DOWN:
        return Limit.DEAD_REPLICA
    if lost[Limit.HOST] >= BLOCKED:
        return Limit.HOST
    if _staleness_limits(seen, lost):
        return Limit.STALENESS
    causes = (Limit.TOOL, Limit.KV, Limit.TAIL, Limit.REWARD, Limit.LEARNER, Limit.SYNC, Limit.NONE)
    return max(causes, key=lambda cause: lost[cause])


def _staleness_limits(seen: StepWindow, lost: Mapping[Limit, float]) -> bool:
    """More staleness saves more than anything else would: all of what it overlaps, where another part that is made
    twice as fast saves half of what it takes. On-policy it cannot overlap a tail.
    """
    saved = lost[Limit.STALENESS]
    whole = [Limit.TOOL, Limit.KV, Limit.REWARD] + ([] if seen.max_staleness else [Limit.TAIL])
    half = (Limit.TAIL, Limit.LEARNER, Limit.SYNC, Limit.NONE)
    return saved > max(lost[cause] for cause in whole) and saved >= max(lost[cause] / 2 for cause in half)


def _dead(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    live, most = seen.rows[-1].get("replicas/live", 0), max(seen.value("replicas", 0), seen.most("replicas/live"))
    return (
        f"A dead replica limits this run: {percent(lost[Limit.DEAD_REPLICA])} of the replicas' time is lost to it, and "
        f"{live:.0f} of {most:.0f} serve now."
    )


def _host(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    blocked, share = seen.share("host/loop_blocked_s"), percent(lost[Limit.HOST])
    if blocked < lost[Limit.HOST] / 2:
        if lost[Limit.HOST] > seen.idle("host"):
            return f"The host limits this run: the event loop computes for {share} of the time and has none left."
        return f"The host limits this run: {share} of the replicas' time waits for the node's own work."
    where = f", most of it at {seen.blocked_at}" if seen.blocked_at else ""
    return (
        f"The host limits this run: the event loop stands still for {percent(blocked)} of the time, up to "
        f"{seen.most('host/loop_lag_max_ms'):,.0f} ms at once{where}."
    )


def _tool(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    waits = seen.tool_waits
    slowest = max(waits, key=lambda tool: waits[tool], default="")
    whose = f" of `{slowest}`" if slowest else ""
    return f"Tools limit this run: for {percent(lost[Limit.TOOL])} of a step the replicas wait for calls{whose}."


def _kv(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"The KV cache limits this run: for {percent(lost[Limit.KV])} of a step trajectories wait for KV blocks "
        f"(peak use {percent(seen.most('kv_peak/'))}, {seen.total('kv/preemptions'):.0f} preemptions)."
    )


def _tail(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"A few long rollouts limit this run: for {percent(lost[Limit.TAIL])} of a step all but an eighth of the "
        "trajectories have ended."
    )


def _reward(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    return f"Rewards limit this run: {percent(lost[Limit.REWARD])} of the replicas' time waits for grading."


def _learner(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    learn_s, step_s = seen.total("time/learn_s") / len(seen.rows), seen.seconds / len(seen.rows)
    return (
        f"The learner limits this run: the replicas wait for it {percent(lost[Limit.LEARNER])} of their time "
        f"({learn_s:.2f} of the {step_s:.2f} s of a step)."
    )


def _sync(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    seconds = (seen.total("time/sync_s") + seen.total("learner/publish_s")) / len(seen.rows)
    return (
        f"Weight transfer limits this run: publishing and loading take {percent(lost[Limit.SYNC])} of a step "
        f"({seconds:.2f} s)."
    )


def _staleness(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        "Staleness limits this run: replicas and learner wait for each other for "
        f"{percent(lost[Limit.STALENESS])} of a step under {seen.option('max_staleness')}={seen.max_staleness}."
    )


def _none(seen: StepWindow, lost: Mapping[Limit, float]) -> str:
    rate = seen.total("tokens/generated") / seen.seconds
    second = max((cause for cause in lost if cause is not Limit.NONE), key=lambda cause: lost[cause])
    return (
        f"Nothing but its replicas limits this run; they sample {percent(seen.idle('busy'))} of the time, "
        f"{rate:,.0f} tokens/s; next is {second} with {percent(lost[second])} of a step."
    )


_SENTENCES: dict[Limit, Callable[[StepWindow, Mapping[Limit, float]], str]] = {
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
