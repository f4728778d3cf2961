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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine import metric_names as metric
from engine.diagnosis.advice import Finding, advice, alarms
from engine.diagnosis.changes import changes
from engine.diagnosis.figures import Figures, figures_of
from engine.diagnosis.step_window import Limit, Row, StepWindow, percent

WINDOW = 8  # number of newest steps that a diagnosis covers
BLOCKED = 0.3  # above this share of blocked event-loop time, the other figures are not reliable
BUSY = 0.25  # above this share of cores that others use, while all cores are busy, the machine is the limit
SLOWER = 1.25  # steps that take so many times as long as before are an alarm
LONG = 0.5  # from this share of the time on, evaluations are the limit
FULL_WIDTH = 0.8  # from this share of sampling on, a run without alarms is healthy
NAMED = 0.05  # smaller shares are not named beside the sampling
DOWN = 0.1  # above this share of the replicas' time, a dead replica is the limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What limits a run.

    sentence: says that the run is healthy, or what limits it, with figures; in the past tense if it has ended. lost:
    share of the steps by cause; shares overlap if several causes held at once. steps: the first and the last step that
    it covers; None if there is none. figures: those of these steps (`figures_of`).
    """

    sentence: str
    limit: Limit
    alarms: tuple[Finding, ...] = ()
    advice: tuple[Finding, ...] = ()
    lost: Mapping[Limit, float] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    figures: Figures = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether the replicas sample for nearly all of the time, and nothing is wrong."""
        return self.limit is Limit.NONE and not self.alarms and self.lost.get(Limit.NONE, 0.0) >= FULL_WIDTH


def diagnose(
    rows: Sequence[Row],
    config: Mapping[str, Any],
    summary: Mapping[str, Any] | None = None,
    *,
    ended: bool = False,
    window: int = WINDOW,
) -> Diagnosis:
    """Returns the diagnosis of the newest `window` steps that have a duration, and whether they are slower than before.

    rows: those of metrics.jsonl, in order. config: that of config.json. summary: that of summary.json, once the run has
    ended (`StepWindow`). ended: whether the run goes on no more.

    >>> row = {"step": 1, "time/step_s": 2.0, "time/rollout_s": 0.3, "time/learn_s": 1.7, "replicas/busy_s": 0.8}
    >>> diagnosis = diagnose([row | {"idle/staleness_gate_s": 3.2}], {"max_staleness": 0})
    >>> str(diagnosis.limit), round(diagnosis.lost[Limit.LEARNER], 2)
    ('learner', 0.8)
    """
    newest = [row for row in rows if metric.TIME_STEP_S in row][-window:]
    if not newest:
        sentence = f"No step {'was trained' if ended else 'is trained yet'}."
        if any(row.get("step", 0) > 0 for row in rows):
            sentence = "Every step began before this process did, so where their time went is not known."
        return Diagnosis(sentence=sentence, limit=Limit.NONE)
    steps = StepWindow(newest, config, summary, ended=ended)
    between = int(newest[0]["step"]), int(newest[-1]["step"])
    if not steps.is_measured:
        waits = percent(steps.share(metric.TIME_ROLLOUT_S))
        verb = steps.verb("waits")
        sentence = f"What the replicas waited for is not known; the learner {verb} for rollouts {waits} of the time."
        return Diagnosis(
            sentence=sentence,
            limit=Limit.NONE,
            alarms=tuple(alarms(steps)),
            steps=between,
            figures=figures_of(steps),
        )
    lost, wrong = steps.lost(), (*_slower(rows), *alarms(steps))
    limit = _limit(steps, lost)
    diagnosis = Diagnosis(
        sentence=_SENTENCES[limit](steps, lost),
        limit=limit,
        alarms=wrong,
        advice=tuple(advice(steps, lost, limit)),
        lost=lost,
        steps=between,
        figures=figures_of(steps),
    )
    if diagnosis.healthy and not ended:
        return replace(diagnosis, sentence=f"Healthy. {diagnosis.sentence}")
    return diagnosis


def _slower(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yields an alarm if the steps take much longer than before, and have not become faster since."""
    newest = changes(rows)[-1:]
    for change in newest:
        if change.ratio >= SLOWER:
            yield Finding(text=change.sentence.removesuffix("."), figures={metric.TIME_STEP_S: change.after_s})


def _limit(steps: StepWindow, lost: Mapping[Limit, float]) -> Limit:
    if lost[Limit.DEAD_REPLICA] >= DOWN:
        return Limit.DEAD_REPLICA
    if lost[Limit.MACHINE] >= BUSY:
        return Limit.MACHINE
    if lost[Limit.HOST] >= BLOCKED and (_is_blocked(steps) or lost[Limit.HOST] >= lost[Limit.STAGE]):
        return Limit.HOST
    if lost[Limit.EVALUATION] >= LONG:
        return Limit.EVALUATION
    if _staleness_limits(steps, lost):
        return Limit.STALENESS
    causes = (Limit.STAGE, Limit.CHECKPOINT, Limit.TOOL, Limit.KV, Limit.TAIL, Limit.REWARD, Limit.LEARNER, Limit.SYNC)
    return max((Limit.NONE, Limit.SLOW_REPLICA, *causes), key=lambda cause: lost[cause])  # the first of equals


def _is_blocked(steps: StepWindow) -> bool:
    return steps.share(metric.HOST_LOOP_BLOCKED_S) >= BLOCKED


def _staleness_limits(steps: StepWindow, lost: Mapping[Limit, float]) -> bool:
    """Returns whether more staleness would save more than any other change.

    More staleness saves all the time that it overlaps. A part that becomes twice as fast saves half of its time. In an
    on-policy run the tail counts whole, since staleness cannot overlap it.
    """
    saved = lost[Limit.STALENESS]
    whole = [Limit.STAGE, Limit.CHECKPOINT, Limit.TOOL, Limit.KV, Limit.REWARD] + (
        [] if steps.max_staleness else [Limit.TAIL]
    )
    half = (Limit.TAIL, Limit.LEARNER, Limit.SYNC, Limit.NONE)
    return saved > max(lost[cause] for cause in whole) and saved >= max(lost[cause] / 2 for cause in half)


def _dead(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    live = steps.rows[-1].get(metric.REPLICAS_LIVE, 0)
    most = max(steps.value("replicas", 0), steps.most(metric.REPLICAS_LIVE))
    return (
        f"A dead replica {steps.verb('limits')} this run: {percent(lost[Limit.DEAD_REPLICA])} of the replicas' time "
        f"{steps.verb('is')} lost to it, and {live:.0f} of {most:.0f} {steps.verb('serve now')}."
    )


def _slow_replica(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    replica, token_ms, usual_ms = steps.slow_replicas[0]
    return (
        f"Replica {replica} {steps.verb('limits')} this run: it {steps.verb('needs')} {token_ms:.1f} ms for a token, "
        f"the others {usual_ms:.1f} ms."
    )


def _machine(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"Other processes {steps.verb('limit')} this run: they {steps.verb('use')} "
        f"{percent(lost[Limit.MACHINE])} of the machine's cores, and all of them {steps.verb('are')} busy"
        f"{steps.looked(metric.HOST_OTHERS_CPU_SHARE)}."
    )


def _host(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    blocked, share = steps.share(metric.HOST_LOOP_BLOCKED_S), percent(lost[Limit.HOST])
    limits = f"The host {steps.verb('limits')} this run"
    if blocked < lost[Limit.HOST] / 2:
        if lost[Limit.HOST] > steps.idle("host"):
            computes, has = steps.verb("computes"), steps.verb("has")
            return f"{limits}: the event loop {computes} for {share} of the time and {has} no time left."
        return f"{limits}: for {share} of their time the replicas {steps.verb('wait')} for the node's own work."
    where = f", most of it at {steps.blocked_at}" if steps.blocked_at else ""
    return (
        f"{limits}: the event loop {steps.verb('is')} blocked for {percent(blocked)} of the time, up to "
        f"{steps.most(metric.HOST_LOOP_LAG_MAX_MS):,.0f} ms at once{where}."
    )


def _stage(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    name, share = steps.busiest_stage
    return (
        f"Your stage `{name}` {steps.verb('limits')} this run: it {steps.verb('works')} for "
        f"{share * steps.seconds:,.1f} of {steps.seconds:,.1f} s, and the replicas {steps.verb('wait')} for it "
        f"{percent(lost[Limit.STAGE])} of their time."
    )


def _checkpoint(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    written_s = steps.total(metric.TIME_CHECKPOINT_S)
    return (
        f"Checkpoints {steps.verb('limit')} this run: writing them {steps.verb('takes')} {written_s:,.1f} of "
        f"{steps.seconds:,.1f} s, and the replicas {steps.verb('wait')} for it {percent(lost[Limit.CHECKPOINT])} of "
        "their time."
    )


def _evaluation(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    evaluated_s = steps.total(metric.TIME_EVAL_S)
    return (
        f"Evaluations {steps.verb('limit')} this run: they {steps.verb('take')} {percent(lost[Limit.EVALUATION])} of "
        f"the time ({evaluated_s:,.1f} s beside {steps.seconds:,.1f} s of training)."
    )


def _tool(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    waits = steps.tool_waits
    slowest = max(waits, key=lambda tool: waits[tool], default="")
    whose = f" of `{slowest}`" if slowest else ""
    what = f"{steps.verb('wait')} for calls{whose}"
    if steps.idle("tool_wait") < lost[Limit.TOOL] / 2:
        what = f"{steps.verb('have')} little to sample, since trajectories {what}"
    return f"Tools {steps.verb('limit')} this run: for {percent(lost[Limit.TOOL])} of a step the replicas {what}."


def _kv(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"The KV cache {steps.verb('limits')} this run: for {percent(lost[Limit.KV])} of a step trajectories "
        f"{steps.verb('wait')} for KV blocks (peak use {percent(steps.most(metric.KV_PEAK))}, "
        f"{steps.total(metric.KV_PREEMPTIONS):.0f} preemptions)."
    )


def _tail(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"A few long rollouts {steps.verb('limit')} this run: for {percent(lost[Limit.TAIL])} of a step all but an "
        f"eighth of the trajectories {steps.verb('have')} ended."
    )


def _reward(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"Rewards {steps.verb('limit')} this run: for {percent(lost[Limit.REWARD])} of their time the replicas "
        f"{steps.verb('wait')} for grading."
    )


def _learner(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    learn_s, step_s = steps.total(metric.TIME_LEARN_S) / len(steps.rows), steps.seconds / len(steps.rows)
    return (
        f"The learner {steps.verb('limits')} this run: the replicas {steps.verb('wait')} for it "
        f"{percent(lost[Limit.LEARNER])} of their time ({learn_s:.2f} of the {step_s:.2f} s of a step)."
    )


def _sync(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    seconds = (steps.total(metric.TIME_SYNC_S) + steps.total(metric.LEARNER_PUBLISH_S)) / len(steps.rows)
    return (
        f"Weight transfer {steps.verb('limits')} this run: publishing and loading {steps.verb('take')} "
        f"{percent(lost[Limit.SYNC])} of a step ({seconds:.2f} s)."
    )


def _staleness(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    return (
        f"Staleness {steps.verb('limits')} this run: replicas and learner {steps.verb('wait')} for each other for "
        f"{percent(lost[Limit.STALENESS])} of a step under {steps.option('max_staleness')}={steps.max_staleness}."
    )


def _none(steps: StepWindow, lost: Mapping[Limit, float]) -> str:
    named = [(name, lost[cause]) for cause, name in _NEXT.items() if lost[cause] >= NAMED]
    most = sorted(named, key=lambda entry: -entry[1])[:2]
    rest = "".join(f", {name} {percent(share)}" for name, share in most)
    rate = steps.total(metric.TOKENS_GENERATED) / steps.seconds
    takes = f"ampling {steps.verb('takes')} {percent(lost[Limit.NONE])} of a step{rest}; {rate:,.0f} tokens/s."
    if lost[Limit.NONE] >= FULL_WIDTH:
        return f"S{takes}"
    return f"No one cause {steps.verb('limits')} this run: s{takes}"


_NEXT = {
    Limit.STAGE: "a stage of yours",
    Limit.CHECKPOINT: "checkpoints",
    Limit.TOOL: "tools",
    Limit.KV: "waits for KV blocks",
    Limit.TAIL: "the last rollouts",
    Limit.REWARD: "grading",
    Limit.LEARNER: "the learner",
    Limit.SYNC: "weight transfer",
    Limit.HOST: "the node's own work",
}


_SENTENCES: dict[Limit, Callable[[StepWindow, Mapping[Limit, float]], str]] = {
    Limit.DEAD_REPLICA: _dead,
    Limit.SLOW_REPLICA: _slow_replica,
    Limit.MACHINE: _machine,
    Limit.STAGE: _stage,
    Limit.HOST: _host,
    Limit.CHECKPOINT: _checkpoint,
    Limit.EVALUATION: _evaluation,
    Limit.TOOL: _tool,
    Limit.KV: _kv,
    Limit.TAIL: _tail,
    Limit.REWARD: _reward,
    Limit.LEARNER: _learner,
    Limit.SYNC: _sync,
    Limit.STALENESS: _staleness,
    Limit.NONE: _none,
}
