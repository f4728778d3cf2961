"""Does placement by KV cache pay on real engines? Policies against each other on two vLLM replicas with a small cache.

    rocstar bench fleet [rounds=3] [kinds=math8k,agentic] [policies=kv_aware,round_robin] [record=FILE]

Traces of multi-turn rollouts (bench/traces) are replayed token for token on the CPU: one core and 99 blocks of 32
tokens per replica, 3 M random parameters in fp32. A round runs every policy once, in random order, on the same engines
with empty prefix caches; round r uses seed r of the trace. On this kind of machine decoding is bound by fixed costs, so
that filling the KV cache buys less than on a GPU: read the counts first. `record` writes each report of an engine as a
JSON line, for `rocstar bench sim_live`. The KV use over time is drawn in runs/bench/fleet_KIND.png.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Annotated, NamedTuple

import uvloop

from bench import ROOT
from bench.benches.fleet.engines import VOCABULARY, Engines, write_model
from bench.benches.fleet.plot import plot
from bench.benches.fleet.replay import Record, Timed, replay
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import count, microseconds, ratio, seconds, share
from bench.measuring.terminal import say, written
from bench.placement.policies import NAMES, OURS, POLICIES, Policy, Setting
from bench.placement.workload import KINDS, Kind, Traced, Turn, load
from bench.simulator.fit import features, fitted
from bench.simulator.machine import Machine, lower_bound_s
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from sandbox.require import at_least, none_or, require_fields


class Engine(NamedTuple):
    blocks: int
    block_size: int
    max_num_seqs: int


ENGINE = Engine(blocks=99, block_size=32, max_num_seqs=64)
REPLICAS = 2
# ThunderAgent's settings, in the scale of these traces: seconds are about a tenth of real ones, tokens a fourteenth.
POLL_S, BUFFER_TOKENS = 0.1, 36
SEEDS = (111, 112, 113)  # 101 to 103 were used for tuning
TRACES = ROOT / "bench" / "traces"
PLOTS = Path("runs/bench")
WARM_UP = [Traced(traj=n, group=n, turns=(Turn(prompt_new_tokens=64, gen_tokens=64),)) for n in range(8)]


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "runs of every policy on every workload"] = 3
    kinds: Annotated[tuple[Kind, ...], "workloads"] = KINDS
    policies: Annotated[tuple[Policy, ...], "policies; kv_aware is compared with the others"] = NAMES
    seeds: Annotated[tuple[int, ...], "seeds of the traces"] = SEEDS
    groups: Annotated[int | None, "the first groups of each trace; none: all"] = None
    checkpoint: Annotated[Path | None, "a model folder instead of 3 M random parameters"] = None
    deadline_s: Annotated[float, "limit of a run, and of an engine's start and steps"] = 300.0
    device: Annotated[int | None, "a GPU for one replica instead of the CPU for two"] = None
    record: Annotated[Path | None, "file that gets what the engines report"] = None

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds")
        require_fields(self, none_or(at_least(1)), "groups")
        if OURS not in self.policies:
            raise ValueError(f"policies must hold {OURS}, with which the others are compared, got {self.policies}")
        if self.checkpoint is not None and not (self.checkpoint / "config.json").is_file():
            raise ValueError(f"checkpoint must be a folder with config.json, got {str(self.checkpoint)!r}")
        for kind, seed in product(self.kinds, self.seeds):
            if not trace_of(kind, seed).exists():
                raise ValueError(f"seeds must be those of traces, got {seed}: there is no {trace_of(kind, seed)}")

    @property
    def replicas(self) -> int:
        return REPLICAS if self.device is None else 1


METRICS = {
    f"ratio_{kind}": ratio(kind, f"makespan over that of {OURS} in the same round, above 1 where {OURS} is faster")
    for kind in KINDS
} | {
    "makespan_s": seconds("makespan", "sum over the workloads"),
    "preemptions": count("preempted", "preemptions in all workloads, mean", summary="mean"),
    "recomputed_tokens": count("recomputed", "tokens computed again in all workloads, mean", summary="mean"),
    "prefix_hits": share("prefix hits", "share of the requests' tokens that were in the cache", form=".0f"),
    "free_spread": share("free spread", "difference of the replicas' free shares, mean over time", form=".0f"),
    "moves": count("moves", "trajectories moved in the middle of a turn, mean", form=".1f", summary="mean"),
    "rehomed": count("rehomed", "turns that began on another replica than the one before, mean", summary="mean"),
    "over_bound": ratio("/ bound", "makespan over a lower bound from the run's own step costs"),
    "decide_s": microseconds("decision", "CPU of a decision", form=".0f"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A policy's run over one trace. decide_s: mean CPU of one decision."""

    kind: str
    seed: int
    policy: str
    traces: Sequence[Traced]
    record: Record
    decide_s: float = 0.0

    def over_bound(self, replicas: int) -> float:
        """Returns the makespan over a lower bound. On a shared machine each run has costs of its own."""
        fit = fitted(*features([self.record.steps], ENGINE.blocks, ENGINE.block_size))
        machine = Machine(
            blocks=ENGINE.blocks,
            block_size=ENGINE.block_size,
            cost=fit.cost,
            max_num_seqs=ENGINE.max_num_seqs,
            max_num_batched_tokens=32_768,
        )
        return self.record.makespan_s / lower_bound_s(self.traces, machine, replicas)


@dataclass(frozen=True, slots=True)
class Case:
    """What a round gives to every policy."""

    round: int
    kind: str
    seed: int
    traces: Sequence[Traced]


def trace_of(kind: str, seed: int) -> Path:
    return TRACES / f"{kind}.{seed}.jsonl.gz"


def setting_of(traces: Sequence[Traced]) -> Setting:
    kv_tokens = ENGINE.blocks * ENGINE.block_size
    return Setting.of(traces, kv_tokens, poll_s=POLL_S, buffer_tokens=BUFFER_TOKENS)


def measure(options: Options, keep: Keep) -> None:
    prepare_environment()
    with workspace() as folder:
        uvloop.run(_measure(options, folder, keep))


async def _measure(options: Options, folder: Path, keep: Keep) -> None:
    shuffled, failures = random.Random(0), list[str]()
    if not options.checkpoint:
        write_model(folder)
    config = ReplicaConfig(
        checkpoint=str(options.checkpoint or folder),
        max_model_len=2048,
        max_num_seqs=ENGINE.max_num_seqs,
        kv_blocks=ENGINE.blocks + 1,  # one is vLLM's own
        block_size=ENGINE.block_size,
        dtype="float32" if options.device is None else "bfloat16",
        devices=() if options.device is None else (options.device,),
        start_deadline_s=options.deadline_s,
        step_deadline_s=options.deadline_s,
    )
    async with Engines(config, options.replicas) as engines:
        say("engines start")
        await run_once(engines, Case(-1, "warm-up", 0, WARM_UP), "round_robin")
        gc.freeze()  # without it, a collection in the middle of a run walks all that vLLM and torch have allocated
        for number in range(options.rounds):
            runs = [
                run
                for case in cases(options, number)
                for policy in shuffled.sample(options.policies, len(options.policies))
                if (run := await attempt(options, engines, case, policy, failures)) is not None
            ]
            if options.record:
                write_steps(options.record, runs, number * len(options.kinds) * len(options.policies))
            if number == 0:
                _plot(runs)
            keep(figures(runs, options.kinds, options.replicas))
    if failures:
        raise BenchFailed(f"{len(failures)} runs failed: {failures[0]}")


def cases(options: Options, number: int) -> Iterator[Case]:
    seed = options.seeds[number % len(options.seeds)]
    for kind in options.kinds:
        rows = load(trace_of(kind, seed))
        yield Case(number, kind, seed, [row for row in rows if options.groups is None or row.group < options.groups])


async def attempt(options: Options, engines: Engines, case: Case, policy: str, failures: list[str]) -> Run | None:
    """Runs a policy; None where that failed, which is noted."""
    say(f"round {case.round + 1} of {options.rounds}: {case.kind}.{case.seed}, {policy}")
    try:
        async with asyncio.timeout(options.deadline_s):
            return await run_once(engines, case, policy)
    except (TimeoutError, RuntimeError, AssertionError, ExceptionGroup) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error  # Ctrl-C, while a run failed or because of it
        failures.append(f"{case.kind}.{case.seed} {policy}: {str(error) or type(error).__name__}")
        say(f"FAILED {failures[-1]}")
        return None


async def run_once(engines: Engines, case: Case, policy: str) -> Run:
    """Runs a policy from empty caches. Raises RuntimeError when an engine died."""
    inner = POLICIES[policy](setting_of(case.traces))
    balancer = Timed(inner)
    record = Record(block_size=ENGINE.block_size)
    config = FleetConfig(replicas=engines.count, block_size=ENGINE.block_size)
    async with Fleet(config, engines.make, balancer, Timeline()) as fleet:
        await engines.forget()
        engines.on_sample = record.sample
        try:
            await replay(fleet, case.traces, record, case.seed, VOCABULARY)
        finally:
            engines.on_sample = lambda index, sample: None
        if fleet.deaths:
            raise RuntimeError(f"{fleet.deaths} engines died")
    if (check := getattr(inner, "check", None)) is not None:
        check()
    return Run(
        kind=case.kind,
        seed=case.seed,
        policy=policy,
        traces=case.traces,
        record=record,
        decide_s=balancer.decide_s / max(1, balancer.decisions),
    )


def figures(runs: Sequence[Run], kinds: Sequence[str], replicas: int) -> dict[str, dict[str, float]]:
    """Returns the figures of the policies of a round that ran on all its workloads."""
    by_policy: dict[str, dict[str, Run]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, {})[run.kind] = run
    whole = {policy: of for policy, of in by_policy.items() if len(of) == len(kinds)}
    ours = by_policy.get(OURS, {})
    return {policy: _figures(of, ours, replicas) for policy, of in whole.items()}


def _figures(of: Mapping[str, Run], ours: Mapping[str, Run], replicas: int) -> dict[str, float]:
    records = [run.record for run in of.values()]
    return {
        **{
            f"ratio_{kind}": run.record.makespan_s / ours[kind].record.makespan_s
            for kind, run in of.items()
            if kind in ours
        },
        "makespan_s": sum(record.makespan_s for record in records),
        "preemptions": sum(record.preemptions for record in records),
        "recomputed_tokens": sum(record.recomputed for record in records),
        "prefix_hits": fmean(record.prefix_hits for record in records),
        "free_spread": fmean(record.spread(ENGINE.blocks) for record in records),
        "moves": sum(record.moves for record in records),
        "rehomed": sum(record.rehomed for record in records),
        "over_bound": geometric_mean(run.over_bound(replicas) for run in of.values()),
        "decide_s": fmean(run.decide_s for run in of.values()),
    }


def _plot(runs: Sequence[Run]) -> None:
    for kind in dict.fromkeys(run.kind for run in runs):
        of_kind = [run for run in runs if run.kind == kind]
        say(f"KV use over time: {written(PLOTS / f'fleet_{kind}.png', partial(plot, of_kind, ENGINE.blocks))}")


def write_steps(path: Path, runs: Sequence[Run], written_runs: int = 0) -> None:
    """Writes a JSON line for each step: its fields, and the run to which it belongs.

    written_runs: runs that the file has; with 0 it is begun anew.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if written_runs else "w") as file:
        for number, run in enumerate(runs, written_runs):
            of = {"run": number, "kind": run.kind, "seed": run.seed, "policy": run.policy}
            file.writelines(json.dumps(asdict(step) | of) + "\n" for step in run.record.steps)


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("makespan_s", "over_bound", "preemptions", "ratio_math8k", "ratio_agentic"),
    quick={"rounds": "1", "kinds": "math8k", "groups": "6", "policies": "kv_aware,round_robin,static,cap"},
)
