"""Says in one sentence what limits a run, with alarms and advice. Pure: rows of metrics.jsonl go in.

Each figure is the share of the newest steps' seconds that was lost to one cause. The largest one is the limit, unless
the replicas sampled for longer: then nothing but the replicas limits the run. Alarms are given whatever the limit is.
Advice names the option to change.

Invariants
- A run that has lost a replica, whose machine others use, or whose event loop is blocked, is limited by that: its
  consequences are not taken for causes.
- Alarms and advice hold the figures that they are based on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import metric_names as metric
from engine.diagnosis.advice import Finding, advice, alarms
from engine.diagnosis.step_window import Limit, Row, StepWindow, percent

WINDOW = 8  # number of newest steps that a diagnosis covers
BLOCKED = 0.3  # above this share of blocked event-loop time, the other figures are not reliable
BUSY = 0.25  # above this share of cores that others use, while all cores are busy, the machine is the limit
DOWN = 0.1  # above this share of the replicas' time, a dead replica is the limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What limits a run.

    sentence: says that the run is healthy, or what limits it, with figures. lost: share of the steps by cause; shares
    overlap if several causes held at once. steps: the first and the last step that it covers; None if there is none.
    """

    sentence: str
    limit: Limit
    alarms: tuple[Finding, ...] = ()
    advice: tuple[Finding, ...] = ()
    lost: Mapping[Limit, float] = field(default_factory=dict)
    steps: tuple[int, int] | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing but the replicas themselves limits the run, and nothing is wrong."""
        return self.limit is Limit.NONE and not self.alarms


def diagnose(
    rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any] | None = None, *, window: int = WINDOW
) -> Diagnosis:
    """Returns the diagnosis of the newest `window` steps that have a duration.

    rows: those of metrics.jsonl, in order. config: that of config.json. summary: that of summary.json, once the run has
    ended (`StepWindow`).

    >>> row = {"step": 1, "time/step_s": 2.0, "time/rollout_s": 0.3, "time/learn_s": 1.7, "replicas/busy_s": 0.8}
    >>> diagnosis = diagnose([row | {"idle/staleness_gate_s": 3.2}], {"max_staleness": 0})
    >>> str(diagnosis.limit), round(diagnosis.lost[Limit.LEARNER], 2)
    ('learner', 0.8)
    """
    newest = [row for row in rows if metric.TIME_STEP_S in row][-window:]
    if not newest:
        return Diagnosis(sentence="No step is trained yet.", limit=Limit.NONE)
    steps = StepWindow(newest, config, summary)
    between = int(newest[0]["step"]), int(newest[-1]["step"])
    if not steps.is_measured:
        waits = percent(steps.share(metric.TIME_ROLLOUT_S))
        sentence = f"What the replicas waited for is not known; the learner waits for rollouts {waits} of the time."
        return Diagnosis(sentence=sentence, limit=Limit.NONE, alarms=tuple(alarms(steps)), steps=between)
    lost, wrong = steps.lost(), tuple(alarms(steps))
    limit = _limit(steps, lost)
    sentence = _SENTENCES[limit](steps, lost)
    return Diagnosis(
        sentence=f"Healthy. {sentence}" if limit is Limit.NONE and not wrong else sentence,
        limit=limit,
        alarms=wrong,
        advice=tuple(advice(steps, lost, limit)),
        lost=lost,
        steps=between,
    )


def _limit(steps: StepWindow, lost: Mapping[Limit, float]) -> Limit:
    if lost[Limit.DEAD_REPLICA] >= DOWN:
        return Limit.DEAD_REPLICA
    if lost[Limit.MACHINE] >= BUSY:
        return Limit.MACHINE
    if lost[Limit.HOST] >= BLOCKED and (_is_blocked(steps) or lost[Limit.HOST] >= lost[Limit.STAGE]):
        return Limit.HOST
    if _staleness_limits(steps, lost):
        return Limit.STALENESS
    causes = (Limit.STAGE, Limit.TOOL, Limit.KV, Limit.TAIL, Limit.REWARD, Limit.LEARNER, Limit.SYNC, Limit.NONE)
    return max(causes, key=lambda cause: lost[cause])


def _is_blocked(steps: StepWindow) -> bool:
    return steps.share(metric.HOST_LOOP_BLOCKED_S) >= BLOCKED


def _staleness_limits(steps: StepWindow, lost: Mapping[Limit, float]) -> bool:
    """Returns whether more staleness would save more than any other change.

    More staleness saves all the time that it overlaps. A part that becomes twice as fast saves half of its time. In an
    on-policy run the tail counts whole, since staleness cannot overlap it.
    """
    saved = lost[Limit.STALENESS]
    whole = [Limit.STAGE, Limit.TOOL, Limit.KV, Limit.REWARD] + ([] if steps.max_staleness else [Limit.TAIL])
    half = (Limit.TAIL, Limit.LEARNER, Limit.SYNC, Limit.NONE)
    return saved > max(lost[cause] for cause in whole) and saved >= max(lost[cause] / 2 for cause in half)


def _dead(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    live = steps.rows[-1].get(metric.REPLICAS_LIVE, 0)
    most = max(steps.value("replicas", 0), steps.most(metric.REPLICAS_LIVE))
    return (
        f"A dead replica limits this run: {percent(lost[Limit.DEAD_REPLICA])} of the replicas' time is lost to it, and "
        f"{live:.0f} of {most:.0f} serve now."
    )


def _machine(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"Other processes limit this run: they use {percent(lost[Limit.MACHINE])} of the machine's cores, and all of "
        "them are busy."
    )


def _host(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    blocked, share = steps.share(metric.HOST_LOOP_BLOCKED_S), percent(lost[Limit.HOST])
    if blocked < lost[Limit.HOST] / 2:
        if lost[Limit.HOST] > steps.idle("host"):
            return f"The host limits this run: the event loop computes for {share} of the time and has no time left."
        return f"The host limits this run: for {share} of their time the replicas wait for the node's own work."
    where = f", most of it at {steps.blocked_at}" if steps.blocked_at else ""
    return (
        f"The host limits this run: the event loop is blocked for {percent(blocked)} of the time, up to "
        f"{steps.most(metric.HOST_LOOP_LAG_MAX_MS):,.0f} ms at once{where}."
    )


def _stage(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    name, share = steps.busiest_stage
    works = f"{share * steps.seconds:,.1f} of {steps.seconds:,.1f} s"
    return (
        f"Your stage `{name}` limits this run: it works for {works}, and "
        f"the replicas wait for it {percent(lost[Limit.STAGE])} of their time."
    )


def _tool(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    waits = steps.tool_waits
    slowest = max(waits, key=lambda tool: waits[tool], default="")
    whose = f" of `{slowest}`" if slowest else ""
    return f"Tools limit this run: for {percent(lost[Limit.TOOL])} of a step the replicas wait for calls{whose}."


def _kv(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"The KV cache limits this run: for {percent(lost[Limit.KV])} of a step trajectories wait for KV blocks "
        f"(peak use {percent(steps.most(metric.KV_PEAK))}, {steps.total(metric.KV_PREEMPTIONS):.0f} preemptions)."
    )


def _tail(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"A few long rollouts limit this run: for {percent(lost[Limit.TAIL])} of a step all but an eighth of the "
        "trajectories have ended."
    )


def _reward(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return f"Rewards limit this run: for {percent(lost[Limit.REWARD])} of their time the replicas wait for grading."


def _learner(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    learn_s, step_s = steps.total(metric.TIME_LEARN_S) / len(steps.rows), steps.seconds / len(steps.rows)
    return (
        f"The learner limits this run: the replicas wait for it {percent(lost[Limit.LEARNER])} of their time "
        f"({learn_s:.2f} of the {step_s:.2f} s of a step)."
    )


def _sync(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    seconds = (steps.total(metric.TIME_SYNC_S) + steps.total(metric.LEARNER_PUBLISH_S)) / len(steps.rows)
    return (
        f"Weight transfer limits this run: publishing and loading take {percent(lost[Limit.SYNC])} of a step "
        f"({seconds:.2f} s)."
    )


def _staleness(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        "Staleness limits this run: replicas and learner wait for each other for "
        f"{percent(lost[Limit.STALENESS])} of a step under {steps.option('max_staleness')}={steps.max_staleness}."
    )


def _none(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    rate = steps.total(metric.TOKENS_GENERATED) / steps.seconds
    second = max((cause for cause in lost if cause is not Limit.NONE), key=lambda cause: lost[cause])
    return (
        f"Nothing but its replicas limits this run; they sample {percent(steps.idle('busy'))} of the time, "
        f"{rate:,.0f} tokens/s; next is {second} with {percent(lost[second])} of a step."
    )


_SENTENCES: dict[Limit, Callable[[StepWindow, Mapping[Limit, float]], str]] = {
    Limit.DEAD_REPLICA: _dead,
    Limit.MACHINE: _machine,
    Limit.STAGE: _stage,
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
