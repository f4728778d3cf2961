"""Finds what is wrong with a run (alarms) and what would help it on (advice), with figures and an option to change.

Invariant: no option is named that the run's recipe does not have. Without its option an alarm is still given, advice of
how to be faster is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engine import metric_names as metric
from engine.diagnosis.step_window import Limit, StepWindow, percent

NOTABLE = 0.1  # a cause that costs a smaller share of the steps is not mentioned
OFTEN = 0.2  # evaluations that take a smaller share of the time are not mentioned
# Above these there is an alarm.
FAILED = 0.01  # share of the trajectories that are lost to errors that are not the model's
TRUNCATED = 0.25  # share of the trajectories that are cut off by their budget of tokens
LATE = 0.05  # share of the trajectories that run out of time
QUEUED = 0.25  # share of a call's time in the queue from which more slots are advised
FLAT = 0.5  # share of the groups that have no signal; if most of them are solved, that is no alarm
ROUTED = 0.05  # share of the positions that the learner sends to other experts than the sampler
USED = 0.5  # share of the time in which a GPU computes, below which its clock says nothing
THROTTLED = 0.7  # below this share of its clock a busy GPU is held back
LEAST_BYTES = 1e9  # of a GPU that others hold; a desktop takes less
FULL = 0.9  # share of a replica's KV blocks in use, if requests were preempted


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An alarm or a piece of advice.

    figures: the metrics and limits that it is based on, by name. option: the option that changes it, as on the command
    line; empty if there is none or the recipe does not have it. value: the option's present value; None if the run's
    configuration does not tell it.
    """

    text: str
    figures: Mapping[str, float]
    option: str = ""
    value: Any = None

    def __str__(self) -> str:
        if not self.option:
            return self.text
        return f"{self.text}: {self.option}" + ("" if self.value is None else f" (now {self.value})")


def alarms(steps: StepWindow) -> Iterator[Finding]:
    """Yields what is wrong, whatever limits the run: first what concerns the machine, then the rollouts."""
    yield from _dead_replicas(steps)
    yield from _other_processes(steps)
    yield from _slow_replicas(steps)
    yield from _shared_gpus(steps)
    yield from _throttled_gpus(steps)
    yield from _blocked_loop(steps)
    yield from _full_cache(steps)
    yield from _lost_trajectories(steps)
    yield from _flat_groups(steps)
    yield from _other_routes(steps)


def _dead_replicas(steps: StepWindow) -> Iterator[Finding]:
    live, deaths = steps.rows[-1].get(metric.REPLICAS_LIVE), steps.total(metric.REPLICAS_DEATHS)
    wanted = max(int(steps.value("replicas", 0)), int(steps.most(metric.REPLICAS_LIVE)))
    figures = {metric.REPLICAS_LIVE: live or 0, metric.REPLICAS_DEATHS: deaths}
    fix = "Fix: the timeline shows why; often memory is short"
    if live is not None and live < wanted:
        yield _alarm(steps, f"{live:.0f} of {wanted} replicas {steps.verb('serve')}. {fix}", figures, "kv_blocks")
    elif deaths:
        yield _alarm(steps, f"replicas died {deaths:.0f} times and were replaced. {fix}", figures, "kv_blocks")


def _slow_replicas(steps: StepWindow) -> Iterator[Finding]:
    for replica, token_ms, usual_ms in steps.slow_replicas:
        text = (
            f"replica {replica} {steps.verb('needs')} {token_ms:.1f} ms for a token, the others {usual_ms:.1f} ms. "
            "Fix: see what holds its device back, or who else uses it"
        )
        yield Finding(text=text, figures={metric.member(metric.REPLICAS_TOKEN_MS, replica): token_ms})


def _other_processes(steps: StepWindow) -> Iterator[Finding]:
    if steps.others >= NOTABLE:
        text = (
            f"other processes {steps.verb('use')} {percent(steps.others)} of this machine's cores"
            f"{steps.looked(metric.HOST_OTHERS_CPU_SHARE)}. Fix: run it alone"
        )
        yield Finding(text=text, figures={metric.HOST_OTHERS_CPU_SHARE: steps.others})


def _blocked_loop(steps: StepWindow) -> Iterator[Finding]:
    blocked = steps.share(metric.HOST_LOOP_BLOCKED_S)
    if blocked < NOTABLE:
        return
    where = f"`{steps.blocked_at}`" if steps.blocked_at else "a stage, tool or reward"
    text = f"the event loop was blocked for {percent(blocked)} of the time"
    fix = f"Fix: move what computes in {where} into a thread (asyncio.to_thread)"
    if "(in thread " in where:
        fix = f"Fix: move what computes in {where} into a process: a thread that computes takes the loop's turns"
    yield Finding(text=f"{text}. {fix}", figures={metric.HOST_LOOP_BLOCKED_S: blocked})


def _full_cache(steps: StepWindow) -> Iterator[Finding]:
    preemptions, peak = steps.total(metric.KV_PREEMPTIONS), steps.most(metric.KV_PEAK)
    if preemptions and peak > FULL:
        text = f"{preemptions:.0f} requests were preempted and computed again, with {percent(peak)} of KV blocks in use"
        yield _alarm(steps, text, {metric.KV_PREEMPTIONS: preemptions, "kv_peak": peak}, "kv_blocks")


def _lost_trajectories(steps: StepWindow) -> Iterator[Finding]:
    causes = (
        (metric.ROLLOUT_TRAJECTORIES_FAILED, FAILED, "were lost to errors that are not the model's", ""),
        (metric.member(metric.STOP, "length"), TRUNCATED, "were cut off by their budget of tokens", "max_tokens"),
        (metric.member(metric.STOP, "deadline"), LATE, "ran out of time", "deadline_s"),
    )
    for name, most, what, option in causes:
        share = steps.total(name) / max(1.0, steps.total(metric.ROLLOUT_TRAJECTORIES))
        if share > most:
            yield _alarm(steps, f"{percent(share)} of the trajectories {what}", {name: share}, option)


def _flat_groups(steps: StepWindow) -> Iterator[Finding]:
    flat, solved = steps.flat_groups
    if flat > FLAT and solved < flat / 2:
        fix = "Fix: easier prompts" + (", or others in their place" if steps.has("refills") else "")
        text = (
            f"{percent(flat)} of the groups have no signal, since all of their trajectories get the same reward. {fix}"
        )
        yield _alarm(steps, text, {metric.GROUPS_FLAT: flat, metric.GROUPS_SOLVED: solved}, "refills")


def _other_routes(steps: StepWindow) -> Iterator[Finding]:
    differs = steps.mean(metric.LEARNER_ROUTING_DIFFERS)
    if differs > ROUTED and steps.value("replay_routing") is not True:
        text = f"the learner sends {percent(differs)} of the positions to other experts than the sampler did"
        yield _alarm(steps, text, {metric.LEARNER_ROUTING_DIFFERS: differs}, "replay_routing")


def _throttled_gpus(steps: StepWindow) -> Iterator[Finding]:
    for device, clock in sorted(steps.means_of(metric.GPU_CLOCK).items()):
        use = steps.mean(metric.member(metric.GPU_USE, device))
        if use >= USED and clock < THROTTLED:
            text = f"GPU {device} {steps.verb('runs')} at {percent(clock)} of its clock, held back by power or heat"
            fix = "Fix: `nvidia-smi -q -d PERFORMANCE` or `amd-smi metric` says by what"
            yield Finding(text=f"{text}. {fix}", figures={metric.member(metric.GPU_CLOCK, device): clock})


def _shared_gpus(steps: StepWindow) -> Iterator[Finding]:
    for device, size in sorted(steps.means_of(metric.GPU_OTHERS_BYTES).items()):
        if size >= LEAST_BYTES:
            text = f"other processes {steps.verb('hold')} {size / 1e9:.1f} GB of GPU {device}"
            fix = "Fix: end them, or devices without them"
            yield _alarm(steps, f"{text}. {fix}", {metric.member(metric.GPU_OTHERS_BYTES, device): size}, "devices")


def advice(steps: StepWindow, lost: Mapping[Limit, float], limit: Limit) -> Iterator[Finding]:
    """Yields what would help: about a task that is solved, about the limit, then about what costs most."""
    yield from _solved(steps)
    for cause in sorted(_ADVICE, key=lambda cause: (cause is not limit, -lost[cause])):
        least = OFTEN if cause is Limit.EVALUATION else NOTABLE
        if cause is limit or (lost[cause] >= least and cause is not Limit.NONE):
            whole = "the time" if cause is Limit.EVALUATION else "a step"
            known = ((text, option) for text, option in _ADVICE[cause](steps) if not option or steps.has(option))
            for text, option in islice(known, 1):
                yield _finding(steps, f"{text} ({percent(lost[cause])} of {whole})", {cause: lost[cause]}, option)


def _solved(steps: StepWindow) -> Iterator[Finding]:
    flat, solved = steps.flat_groups
    if flat > FLAT and solved >= flat / 2:
        text = f"{percent(solved)} of the groups are solved (what is kept of them is right) and teach no more. "
        text += "Harder prompts go on from here"
        if steps.has("refills"):
            text += ", or others in the place of solved ones"
        yield _alarm(steps, text, {metric.GROUPS_FLAT: flat, metric.GROUPS_SOLVED: solved}, "refills")


def _alarm(steps: StepWindow, text: str, figures: Mapping[str, float], option: str) -> Finding:
    return _finding(steps, text, figures, option if option and steps.has(option) else "")


def _finding(steps: StepWindow, text: str, figures: Mapping[str, float], option: str) -> Finding:
    name = steps.option(option) if option else ""
    return Finding(text=text, figures=figures, option=name, value=steps.config.get(name))


Advice = Iterator[tuple[str, str]]
"""What can be changed about a cause, each with its option, or with "" if no option changes it.

The first one whose option the recipe has is advised.
"""


def _faster_tools(steps: StepWindow) -> Advice:
    half = f"half of the calls take more than {steps.mean(metric.TOOLS_LATENCY_P50_MS):,.0f} ms"
    queue_ms, run_ms = steps.mean(metric.TOOLS_QUEUE_P50_MS), steps.mean(metric.TOOLS_RUN_P50_MS)
    if queue_ms > QUEUED * (queue_ms + run_ms):
        yield f"{half}, {queue_ms:,.0f} ms in the queue of the sandbox; more slots run more of them at once", "slots"
    yield f"{half}; more rollouts at once would hide it", "prompts_per_step"


def _another_device(steps: StepWindow) -> Advice:
    if steps.value("devices"):
        yield "a replica on another device would be as fast as the others", "devices"
    else:
        yield "fewer replicas share fewer cores", "replicas"


def _run_alone(steps: StepWindow) -> Advice:
    yield "without the other processes, or on cores of its own (taskset), the run has the whole machine", ""


def _faster_stage(steps: StepWindow) -> Advice:
    name, _ = steps.busiest_stage
    yield f"several workers, Stage(name={name!r}, workers=...), share the work of `{name}`", ""


def _less_host_work(steps: StepWindow) -> Advice:
    yield "`rocstar bench profile RECIPE` names the lines that take the event loop's time", ""


def _fewer_checkpoints(steps: StepWindow) -> Advice:
    yield "more steps between checkpoints write fewer of them; a faster disk helps too", "checkpoint_every"


def _fewer_evaluations(steps: StepWindow) -> Advice:
    yield "evaluations on replicas of their own run beside the training", "eval_replicas"
    yield "more steps between evaluations leave more time to train", "eval_every"


def _living_replicas(steps: StepWindow) -> Advice:
    yield "a smaller KV cache leaves the engines memory, the lack of which often ends them", "kv_blocks"


def _larger_cache(steps: StepWindow) -> Advice:
    yield "a larger KV cache lets more trajectories run at once", "kv_blocks"


def _shorter_tail(steps: StepWindow) -> Advice:
    if not steps.value("extra_samples"):
        yield "with extra samples the slowest rollouts of a group are cancelled", "extra_samples"
    yield "a smaller budget of tokens ends the longest rollouts", "max_tokens"


def _faster_rewards(steps: StepWindow) -> Advice:
    yield "more trajectories can be graded at once", "graders"


def _faster_learner(steps: StepWindow) -> Advice:
    if not steps.max_staleness and steps.may_overlap:
        yield "the learner can train while the next step is rolled out", "max_staleness"
    tokens = steps.total(metric.LEARNER_TOKENS) / max(1.0, steps.total(metric.LEARNER_TRAJECTORIES))
    if steps.value("micro_batch_tokens", 1e9) < 4 * tokens:
        yield "larger micro-batches make the learner faster", "micro_batch_tokens"
    if steps.value("minibatches", 1) > 4:
        yield "fewer optimizer steps per batch make the learner faster", "minibatches"
    yield "more ranks make the learner faster", "learner_ranks"


def _faster_transfer(steps: StepWindow) -> Advice:
    in_bfloat16 = steps.value("devices") or steps.config.get("dtype") == "bfloat16"
    if steps.value("weights_dtype") == "float32" and not in_bfloat16:
        yield "bfloat16 halves the bytes of the weights", "weights_dtype"
    if not steps.value("lora_rank"):
        yield "LoRA adapters are a small part of the weights", "lora_rank"
    elif not steps.value("adapters"):
        yield "sending the adapters alone is a small part of the transfer", "adapters"


def _more_staleness(steps: StepWindow) -> Advice:
    yield "one more version of staleness lets replicas and learner work at once", "max_staleness"


def _more_replicas(steps: StepWindow) -> Advice:
    if steps.value("devices"):
        yield "more replicas sample more at once if there are GPUs for them", "replicas"
    elif steps.has_free_cores:
        yield "more replicas sample more at once", "replicas"


_ADVICE: dict[Limit, Callable[[StepWindow], Advice]] = {
    Limit.DEAD_REPLICA: _living_replicas,
    Limit.SLOW_REPLICA: _another_device,
    Limit.MACHINE: _run_alone,
    Limit.STAGE: _faster_stage,
    Limit.HOST: _less_host_work,
    Limit.CHECKPOINT: _fewer_checkpoints,
    Limit.EVALUATION: _fewer_evaluations,
    Limit.TOOL: _faster_tools,
    Limit.KV: _larger_cache,
    Limit.TAIL: _shorter_tail,
    Limit.REWARD: _faster_rewards,
    Limit.LEARNER: _faster_learner,
    Limit.SYNC: _faster_transfer,
    Limit.STALENESS: _more_staleness,
    Limit.NONE: _more_replicas,
}
