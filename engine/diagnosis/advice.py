"""What is wrong with a run, and what would make it faster: alarms and advice, each with its figures and its option.

Invariant: no option is named that the run's recipe does not have. An alarm then goes without, and advice that would
need it is not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engine.diagnosis.step_window import Limit, StepWindow, percent

NOTABLE = 0.1  # share of the steps that is worth a word
FAILED = 0.01  # share of the trajectories that may be lost to errors of ours before it is an alarm
TRUNCATED = 0.25  # that may be cut off by their budget of tokens
LATE = 0.05  # that may run out of time
FLAT = 0.5  # share of the groups that may teach nothing
FULL = 0.9  # of a KV cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An alarm or a piece of advice.

    figures: what it is based on, by the names of metrics and limits. option: what changes it, as on the command line;
    empty where no option does, or the recipe does not have it. value: the option's present value; None where the run's
    configuration does not say.
    """

    text: str
    figures: Mapping[str, float]
    option: str = ""
    value: Any = None

    def __str__(self) -> str:
        if not self.option:
            return self.text
        return f"{self.text}: {self.option}" + ("" if self.value is None else f" (now {self.value})")


def alarms(seen: StepWindow) -> Iterator[Finding]:
    """Yields what is wrong whatever limits the run: what concerns the machine first, then the rollouts."""
    yield from _dead_replicas(seen)
    yield from _blocked_loop(seen)
    yield from _full_cache(seen)
    yield from _lost_trajectories(seen)
    yield from _flat_groups(seen)


def _dead_replicas(seen: StepWindow) -> Iterator[Finding]:
    live, deaths = seen.rows[-1].get("replicas/live"), seen.total("replicas/deaths")
    wanted = max(int(seen.value("replicas", 0)), int(seen.most("replicas/live")))
    figures = {"replicas/live": live or 0, "replicas/deaths": deaths}
    if live is not None and live < wanted:
        text = f"{live:.0f} of {wanted} replicas serve. Fix: the timeline says why; often they lack memory"
        yield _alarm(seen, text, figures, "kv_blocks")
    elif deaths:
        text = f"replicas died {deaths:.0f} times and were replaced. Fix: the timeline says why; often they lack memory"
        yield _alarm(seen, text, figures, "kv_blocks")


def _blocked_loop(seen: StepWindow) -> Iterator[Finding]:
    blocked = seen.share("host/loop_blocked_s")
    if blocked < NOTABLE:
        return
    where = f"`{seen.blocked_at}`" if seen.blocked_at else "a stage, tool or reward"
    text = f"the event loop stood still for {percent(blocked)} of the time"
    fix = f"Fix: what computes in {where} goes into a thread (asyncio.to_thread)"
    yield Finding(text=f"{text}. {fix}", figures={"host/loop_blocked_s": blocked})


def _full_cache(seen: StepWindow) -> Iterator[Finding]:
    preemptions, peak = seen.total("kv/preemptions"), seen.most("kv_peak/")
    if preemptions and peak > FULL:
        text = f"{preemptions:.0f} requests lost their KV blocks and were computed again, at {percent(peak)} in use"
        yield _alarm(seen, text, {"kv/preemptions": preemptions, "kv_peak": peak}, "kv_blocks")


def _lost_trajectories(seen: StepWindow) -> Iterator[Finding]:
    causes = (
        ("rollout/trajectories_failed", FAILED, "were lost to errors of ours, not the model's", ""),
        ("stop/length", TRUNCATED, "were cut off by their budget of tokens", "max_tokens"),
        ("stop/deadline", LATE, "ran out of time", "deadline_s"),
    )
    for name, most, what, option in causes:
        share = seen.total(name) / max(1.0, seen.total("rollout/trajectories"))
        if share > most:
            yield _alarm(seen, f"{percent(share)} of the trajectories {what}", {name: share}, option)


def _flat_groups(seen: StepWindow) -> Iterator[Finding]:
    groups = max(1.0, seen.total("groups/all"))
    flat, solved = seen.total("groups/flat") / groups, seen.total("groups/solved") / groups
    if flat > FLAT:
        fix = f"{'harder' if solved > flat / 2 else 'easier'} prompts"
        if seen.has("refills"):
            fix += ", or others in their place"
        text = f"{percent(flat)} of the groups teach nothing, {percent(solved)} because all of it is solved. Fix: {fix}"
        yield _alarm(seen, text, {"groups/flat": flat, "groups/solved": solved}, "refills")


def advice(seen: StepWindow, lost: Mapping[Limit, float], limit: Limit) -> Iterator[Finding]:
    """Yields what would make it faster: by the limit first, then by what costs most."""
    for cause in sorted(_ADVICE, key=lambda cause: (cause is not limit, -lost[cause])):
        if cause is limit or (lost[cause] >= NOTABLE and cause is not Limit.NONE):
            known = ((text, option) for text, option in _ADVICE[cause](seen) if seen.has(option))
            for text, option in islice(known, 1):
                yield _finding(seen, f"{text} ({percent(lost[cause])} of a step)", {cause: lost[cause]}, option)


def _alarm(seen: StepWindow, text: str, figures: Mapping[str, float], option: str) -> Finding:
    return _finding(seen, text, figures, option if option and seen.has(option) else "")


def _finding(seen: StepWindow, text: str, figures: Mapping[str, float], option: str) -> Finding:
    name = seen.option(option) if option else ""
    return Finding(text=text, figures=figures, option=name, value=seen.config.get(name))


# What can be changed about each cause, with the option that does it: the first that the recipe has is advised.
Advice = Iterator[tuple[str, str]]


def _faster_tools(seen: StepWindow) -> Advice:
    half = f"half of the calls take more than {seen.mean('tools/latency_p50_ms'):,.0f} ms"
    if seen.total("tools/calls_jailed"):
        yield f"{half}; where they queue for the sandbox, let more run at once", "slots"
    yield f"{half}; more rollouts under way would hide it", "prompts_per_step"


def _larger_cache(seen: StepWindow) -> Advice:
    yield "a larger KV cache lets more trajectories run at once", "kv_blocks"


def _shorter_tail(seen: StepWindow) -> Advice:
    if not seen.value("extra_samples"):
        yield "with extra samples the slowest rollouts of a group are cancelled", "extra_samples"
    yield "a smaller budget of tokens ends the longest rollouts", "max_tokens"


def _faster_rewards(seen: StepWindow) -> Advice:
    yield "more trajectories can be graded at once", "graders"


def _faster_learner(seen: StepWindow) -> Advice:
    if not seen.max_staleness and seen.may_overlap:
        yield "the learner can train while the next step is rolled out", "max_staleness"
    tokens = seen.total("learner/tokens") / max(1.0, seen.total("learner/trajectories"))
    if seen.value("micro_batch_tokens", 1e9) < 4 * tokens:
        yield "larger passes of the learner", "micro_batch_tokens"
    if seen.value("minibatches", 1) > 4:
        yield "fewer optimizer steps per batch", "minibatches"
    yield "more ranks of the learner", "learner_ranks"


def _faster_transfer(seen: StepWindow) -> Advice:
    if seen.value("weights_dtype") == "float32" and not seen.value("devices"):  # on GPUs they are bfloat16
        yield "bfloat16 halves the bytes of a weight", "weights_dtype"
    if not seen.value("lora_rank"):
        yield "adapters are a small part of the weights", "lora_rank"
    elif not seen.value("adapters"):
        yield "the adapters alone are a small part of the weights", "adapters"


def _more_staleness(seen: StepWindow) -> Advice:
    yield "one version more lets replicas and learner work at once", "max_staleness"


def _more_replicas(seen: StepWindow) -> Advice:
    yield "more replicas sample more at once, where they have cores or GPUs", "replicas"


_ADVICE: dict[Limit, Callable[[StepWindow], Advice]] = {
    Limit.TOOL: _faster_tools,
    Limit.KV: _larger_cache,
    Limit.TAIL: _shorter_tail,
    Limit.REWARD: _faster_rewards,
    Limit.LEARNER: _faster_learner,
    Limit.SYNC: _faster_transfer,
    Limit.STALENESS: _more_staleness,
    Limit.NONE: _more_replicas,
}
