"""The bench of the fleet: what it counts, and what its figures are."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.benches.fleet.engines import VOCABULARY
from bench.benches.fleet.fleet import BENCH, METRICS, Case, Options, attempt, figures, write_steps
from bench.benches.fleet.fleet import Run as PolicyRun
from bench.benches.fleet.plot import plot
from bench.benches.fleet.replay import Record, Step, Timed, replay
from bench.measuring.terminal import written
from bench.placement.policies import OURS
from bench.placement.workload import Traced, Turn
from engine.balancing.balancer import Place
from engine.balancing.kv_aware import KvAware
from engine.balancing.round_robin import RoundRobin
from engine.contracts import check_balancer
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.port import KvSample
from engine.telemetry.timeline import Timeline
from tests.support.fakes import Replicas, ScriptedReplica, fleet_of


def traced(key: int, group: int, *turns: tuple[int, int, float]) -> Traced:
    return Traced(
        traj=key,
        group=group,
        turns=tuple(
            Turn(prompt_new_tokens=new, gen_tokens=generated, tool_latency_s=tool) for new, generated, tool in turns
        ),
    )


TWO = [traced(0, 0, (40, 30, 0.0), (5, 10, 0.0)), traced(1, 0, (40, 20, 0.0))]


async def test_a_replay_generates_the_lengths_of_its_trace() -> None:
    replicas, record = Replicas(), Record(block_size=32)
    balancer = Timed(KvAware(max_tokens=100))
    async with fleet_of(replicas, 2, balancer=balancer) as fleet:
        await replay(fleet, TWO, record, 0, VOCABULARY)
    requests = sorted(
        (len(ids), sampling.max_tokens) for replica in replicas.made for ids, sampling, _ in replica.requests
    )
    assert requests == [(40, 20), (40, 30), (75, 10)]
    assert (record.requests, record.generated, record.prompt, record.moves) == (3, 60, 155, 0)
    assert len(record.completed_s) == 2
    prompts = [ids for replica in replicas.made for ids, _, _ in replica.requests if len(ids) == 40]
    assert prompts[0] == prompts[1], "a group shares its prompt"
    assert balancer.decisions > 0
    assert 0 < balancer.decide_s <= balancer.cpu_s


class Terse(ScriptedReplica):
    """Ends each turn after one token."""

    async def _tokens(self, *request):
        yield 7, True


class Alternate(RoundRobin):
    """Every turn on the next replica."""

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        super().trajectory_ended(key, tokens, False)


async def test_a_turn_on_another_replica_than_the_one_before_is_counted() -> None:
    record = Record(block_size=32)
    async with fleet_of(Replicas(), 2, balancer=Alternate()) as fleet:
        await replay(fleet, [traced(0, 0, (40, 2, 0.0), (5, 2, 0.0), (5, 2, 0.0))], record, 0, VOCABULARY)
    assert (record.rehomed, record.moves) == (2, 0)


class Restless(RoundRobin):
    """Trajectory 0 is sent to the other replica when trajectory 1 has left, in the middle of its turn."""

    left = False

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        super().trajectory_ended(key, tokens, finished)
        self.left = key == 1

    def decide(self, now: float) -> list[Place]:
        left, self.left = self.left, False
        return super().decide(now) + ([Place(0, 0, "move", 0.0)] if left else [])


class Forgetful(ScriptedReplica):
    """Finds nothing in its cache."""

    async def generate(self, *request):
        async for delta in super().generate(*request):
            yield replace(delta, cached_tokens=0)


async def test_what_a_move_computes_again_is_counted() -> None:
    made: list[Forgetful] = []

    def make(index, core, on_step):
        made.append(Forgetful(index, on_step))
        return made[-1]

    record = Record(block_size=32)
    traces = [traced(0, 0, (40, 60, 0.0)), traced(1, 0, (40, 10, 0.0))]
    async with Fleet(FleetConfig(replicas=2), make, Restless(), Timeline()) as fleet:
        await replay(fleet, traces, record, 0, VOCABULARY)
    [length] = [len(ids) for ids, _, _ in made[0].requests if len(ids) > 40]
    assert (record.moves, record.requests, record.rehomed) == (1, 3, 0)
    assert record.recomputed == record.held(length) > 0


async def test_a_turn_of_another_length_ends_the_replay() -> None:
    def make(index, core, on_step):
        return Terse(index, on_step)

    async with Fleet(FleetConfig(replicas=1), make, RoundRobin(), Timeline()) as fleet:
        with pytest.raises(ExceptionGroup) as failure:
            await replay(fleet, TWO, Record(block_size=32), 0, VOCABULARY)
    assert "41 tokens instead of those of" in str(failure.value.exceptions[0])


def test_what_a_request_lost_is_what_was_held_and_not_found() -> None:
    record = Record(block_size=32)
    assert [record.held(tokens) for tokens in (1, 32, 33, 64, 65)] == [0, 0, 32, 32, 64]
    record.request(60, 0, 0)  # first turns, of which one finds the prompt of its group
    record.request(40, 0, 32)
    record.request(150, 96, 96)  # its prefix was found,
    record.request(170, 128, 32)  # and a block of it
    assert (record.prompt, record.cached, record.lost) == (420, 160, 96)
    record.sample(0, KvSample(10, 1, 0, 1, prefilled=200))
    record.sample(1, KvSample(10, 1, 0, 0, prefilled=120))
    assert record.recomputed == 96 + (320 - 260), "60 more than the requests asked for: preempted ones"
    assert record.preemptions == 1
    assert record.prefix_hits == pytest.approx(160 / 420)


def test_spread_is_the_mean_over_time_of_the_difference_of_free_blocks() -> None:
    record = Record(block_size=32)
    rows = [(0, 0.0, 50), (1, 1.0, 40), (0, 3.0, 40), (1, 4.0, 20)]
    record.steps = [Step(replica, t, free, 1, 0, 0, 0) for replica, t, free in rows]
    assert record.spread(100) == pytest.approx((0 * 1 + 10 * 2 + 0 * 1) / 4 / 100)


def test_the_timed_balancer_is_a_balancer() -> None:
    check_balancer(lambda: Timed(KvAware(max_tokens=200)))


def steps_of(count: int = 60) -> list[Step]:
    """Steps of two replicas, of which one has nothing to do for a second after every tenth."""
    steps, t = [], [0.0, 0.0]
    for number in range(count):
        for replica in (0, 1):
            idle = number % 10 == 0
            running, prefilled = (0, 0) if idle else (1 + (number * 7 + replica) % 11, (number * 37) % 100)
            t[replica] += 0.004 + 0.0005 * running + 0.0001 * prefilled
            t[replica] += 1.0 if number % 10 == 1 else 0.0
            steps.append(Step(replica, t[replica], 50, running, 0, 0, prefilled))
    return steps


def run_of(policy: str, makespan_s: float, kind: str = "math8k", preempted: int = 0) -> PolicyRun:
    record = Record(block_size=32)
    record.steps = steps_of()
    record.steps[0] = Step(0, 0.0, 50, 1, 0, preempted, 0)
    record.completed_s = [makespan_s / 2, makespan_s]
    return PolicyRun(kind=kind, seed=101, policy=policy, traces=TWO, record=record)


def test_a_ratio_is_of_the_makespans_of_one_round_and_workload() -> None:
    runs = [run_of(OURS, 2.0), run_of(OURS, 4.0, "uniform")]
    runs += [run_of("static", 3.0, preempted=6), run_of("static", 2.0, "uniform", preempted=1)]
    rows = figures(runs, ("math8k", "uniform"), 2)
    assert (rows["static"]["ratio_math8k"], rows["static"]["ratio_uniform"]) == (1.5, 0.5)
    assert rows[OURS]["ratio_math8k"] == 1.0
    assert (rows["static"]["preemptions"], rows["static"]["makespan_s"]) == (7, 5.0)
    assert all(row.keys() <= METRICS.keys() for row in rows.values())


def test_a_policy_that_failed_on_a_workload_has_no_row() -> None:
    runs = [run_of(OURS, 2.0), run_of(OURS, 4.0, "uniform"), run_of("static", 3.0)]
    assert figures(runs, ("math8k", "uniform"), 2).keys() == {OURS}


def test_recorded_steps_say_to_which_run_they_belong(tmp_path: Path) -> None:
    run = run_of(OURS, 2.0)
    path = tmp_path / "new" / "steps.jsonl"
    write_steps(path, [run_of("static", 1.0)])
    write_steps(path, [run])
    write_steps(path, [run], 1)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 2 * len(run.record.steps)
    assert {"replica", "t", "free_blocks", "running", "waiting", "preempted", "prefilled"} < set(rows[0])
    assert (rows[-1]["run"], rows[-1]["kind"], rows[-1]["policy"]) == (1, "math8k", OURS)


async def test_a_run_that_takes_too_long_fails_with_its_reason() -> None:
    failures: list[str] = []
    case = Case(0, "math8k", 111, [Traced(traj=0, group=0, turns=(Turn(prompt_new_tokens=8, gen_tokens=8),))])
    engines = SimpleNamespace(make=Replicas(), count=2)
    assert await attempt(Options(deadline_s=0), engines, case, "static", failures) is None
    [failure] = failures
    assert "math8k.111 static" in failure


def test_the_plot_has_a_panel_per_policy(tmp_path: Path) -> None:
    runs = [run_of(OURS, 2.0), run_of("static", 4.0, preempted=3)]
    assert written(tmp_path / "new" / "kv.png", partial(plot, runs, 99)) == str(tmp_path / "new" / "kv.png")
    assert (tmp_path / "new" / "kv.png").read_bytes().startswith(b"\x89PNG")


def test_the_rivals_need_ours_beside_them_and_a_trace() -> None:
    with pytest.raises(ValueError, match=OURS):
        BENCH.options(policies=("static",))
    with pytest.raises(ValueError, match="104"):
        BENCH.options(seeds=(104,))
