"""The simulated fleet: policies get the events of a live one, every token is generated once, jumps change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.benches.sim_fleet import sim_fleet
from bench.benches.sim_fleet.sim_fleet import POLICIES
from bench.placement import workload
from bench.placement.workload import Size, Traced, Turn
from bench.simulator.costs import H200, Costs, Machine, lower_bound_s
from bench.simulator.fleet import Death, Result, Simulation
from engine.balancing.balancer import Balancer, Place
from engine.balancing.kv_aware import KvAware
from engine.balancing.round_robin import RoundRobin
from engine.replica.port import KvSample

TINY = Machine(blocks=99, block_size=32, costs=Costs(o=4e-3, b=2e-4, c=1e-7, d=131e-6), max_num_seqs=64)


def trace(kind: str = "math8k", seed: int = 5) -> list[Traced]:
    return workload.small(kind, seed)


def simulate(
    policy: Balancer, rows: list[Traced], machine: Machine = TINY, **options: int
) -> tuple[Result, Simulation]:
    simulation = Simulation(policy, rows, machine, 2, **options)
    return simulation.run(), simulation


class Watched:
    """Passes everything on to a policy; `hear` gets each event first."""

    def __init__(self, policy: Balancer, hear: Callable[..., None]) -> None:
        self._policy, self._hear = policy, hear

    def __getattr__(self, name: str):
        def called(*arguments):
            self._hear(name, *arguments)
            return getattr(self._policy, name)(*arguments)

        return called


class Wandering(RoundRobin):
    """Moves what runs to the other replica whenever a sample was the seventh; forgets where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, int] = {}
        self.samples = 0

    def sample(self, replica: int, sample: KvSample, now: float) -> None:
        self.samples += 1

    def turn_finished(self, key: int, tokens: int, now: float) -> None:
        super().turn_finished(key, tokens, now)
        del self.running[key]

    def trajectory_ended(self, key: int, tokens: int, finished: bool) -> None:
        super().trajectory_ended(key, tokens, finished)
        self.running.pop(key, None)

    def request_turn(self, key: int, group: int, prompt_tokens: int, tokens: int, now: float) -> None:
        super().request_turn(key, group, prompt_tokens, tokens, now)
        self.running.pop(key, None)

    def decide(self, now: float) -> list[Place]:
        moved = []
        if self.samples >= 7:
            self.samples = 0
            moved = [
                Place(key, 1 - replica, "wander", 0.0)
                for key, replica in list(self.running.items())[::3]
                if 1 - replica in self.replicas
            ]
        places = super().decide(now)
        self.running |= {place.key: place.replica for place in [*moved, *places]}
        return [*moved, *places]


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_finishes_a_trace(name: str) -> None:
    rows = trace()
    result, simulation = simulate(POLICIES[name](max(row.total_tokens for row in rows)), rows)
    assert result.makespan_s >= lower_bound_s(rows, TINY, 2)
    assert result.generated_tokens == sum(row.gen_tokens for row in rows)
    for engine in simulation.engines:
        engine.check()
        assert engine.cache.free == 99
    prompts = sum(turn.prompt_new_tokens for row in rows for turn in row.turns[1:])
    assert result.prefilled_tokens >= prompts + result.recomputed_tokens
    assert 0 < result.busy <= 1


@pytest.mark.parametrize("name", ["round_robin", "cap24", "static_barrier"])
def test_jumps_over_many_steps_change_nothing(name: str) -> None:
    """The same run step by step, for policies that do not look at samples."""
    rows = trace("math8k")
    jumps, _ = simulate(POLICIES[name](700), rows, tick_s=0.0)
    steps, _ = simulate(POLICIES[name](700), rows, longest_segment=1, tick_s=0.0)
    assert jumps.makespan_s == pytest.approx(steps.makespan_s, rel=1e-9)
    for count in ("preemptions", "recomputed_tokens", "prefilled_tokens"):
        assert getattr(jumps, count) == getattr(steps, count), count
    assert steps.preemptions > 0, "the trace does not fit"


def test_the_same_run_twice_is_the_same_run() -> None:
    rows = trace("agentic")
    first, second = (simulate(KvAware(2000), rows)[0] for _ in range(2))
    timed = {"wall_s": 0.0, "decide_us": 0.0}
    assert replace(first, **timed) == replace(second, **timed)


def test_moves_lose_and_repeat_nothing() -> None:
    rows = trace("agentic")
    ends: dict[int, int] = {}

    def hear(name: str, *arguments) -> None:
        if name == "trajectory_ended":
            ends[arguments[0]] = arguments[1]

    result, simulation = simulate(Watched(Wandering(), hear), rows)
    assert result.moves > 50
    assert ends == {row.traj: row.total_tokens for row in rows}
    for engine in simulation.engines:
        engine.check()
        assert engine.cache.free == 99


@pytest.mark.parametrize("name", list(POLICIES))
def test_replicas_may_die_at_any_time(name: str) -> None:
    """Every trajectory ends with all its tokens; what a replica had is computed again."""
    rows = trace("math8k")
    ends: dict[int, int] = {}

    def hear(event: str, *arguments) -> None:
        if event == "trajectory_ended":
            ends[arguments[0]] = arguments[1]

    deaths = [Death(n % 2, 0.3 + 0.7 * n, 0.5) for n in range(8)]
    policy = POLICIES[name](max(row.total_tokens for row in rows))
    result, simulation = simulate(Watched(policy, hear), rows, deaths=deaths)
    calm, _ = simulate(POLICIES[name](max(row.total_tokens for row in rows)), rows)
    assert len(simulation.dead) == 8
    assert ends == {row.traj: row.total_tokens for row in rows}
    assert result.makespan_s > calm.makespan_s
    assert result.prefilled_tokens > calm.prefilled_tokens
    for engine in simulation.engines + simulation.dead:
        engine.check()
        assert engine.cache.free == 99
    if isinstance(policy, KvAware):
        policy.check()
        assert policy.reserved_blocks() == 0


UNIT = replace(TINY, costs=Costs(o=1.0, b=0.0, c=0.0, d=0.0))  # every step takes a second
ALONE = [Traced(traj=0, group=0, turns=(Turn(prompt_new_tokens=64, gen_tokens=10),))]


def test_a_dead_replica_finishes_its_step_and_forgets_everything() -> None:
    simulation = Simulation(RoundRobin(), ALONE, UNIT, 1, tick_s=0.0, deaths=[Death(0, 5.5, 1.0)])
    result = simulation.run()
    assert result.makespan_s == 6 + 1 + 4, "6 tokens, a second without replica, 4 tokens"
    assert result.prefilled_tokens == 64 + 70
    assert result.recomputed_tokens == 64, "of 69 in the cache 2 whole blocks"


class Mover:
    """Places on replica 1, and after three seconds moves to replica 0."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.waiting: list[int] = []

    def __getattr__(self, name: str):
        return lambda *arguments: None

    def request_turn(self, key: int, group: int, prompt_tokens: int, tokens: int, now: float) -> None:
        self.arrivals.append(now)
        self.waiting.append(key)

    def decide(self, now: float) -> list[Place]:
        waiting, self.waiting = self.waiting, []
        moved = [Place(0, 0, "move", 0.0)] if now == 3.0 else []
        return moved + [Place(key, 1, "home", 0.0) for key in waiting]


def test_the_goal_of_a_move_may_die_first() -> None:
    """It arrives again at the step boundary where it would have moved."""
    policy = Mover()
    simulation = Simulation(policy, ALONE, UNIT, 2, tick_s=0.0, longest_segment=1, deaths=[Death(0, 3.5, 9.0)])
    assert simulation.run().makespan_s == 10.0
    assert simulation.moves == 1
    assert policy.arrivals == [0.0, 4.0]


def test_replicas_die_while_trajectories_move() -> None:
    rows = trace("agentic")
    ends: dict[int, int] = {}

    def hear(event: str, *arguments) -> None:
        if event == "trajectory_ended":
            ends[arguments[0]] = arguments[1]

    deaths = [Death(n % 2, 0.05 + 0.211 * n, 0.1) for n in range(30)]
    result, _ = simulate(Watched(Wandering(), hear), rows, deaths=deaths)
    assert result.moves > 20
    assert ends == {row.traj: row.total_tokens for row in rows}


def test_a_policy_hears_what_a_live_one_does() -> None:
    """In the order of the fleet's; a running trajectory grows by the steps of the samples."""
    rows = [
        Traced(
            traj=0,
            group=0,
            turns=(
                Turn(prompt_new_tokens=40, gen_tokens=70, tool_latency_s=0.5),
                Turn(prompt_new_tokens=9, gen_tokens=30),
            ),
        )
    ]
    heard: list[tuple] = []
    simulate(Watched(RoundRobin(), lambda *event: heard.append(event)), rows)
    told = [event for event in heard if event[0] not in ("sample", "decide")]
    assert told[:2] == [("replica_up", 0, 99, 32), ("replica_up", 1, 99, 32)]
    assert [event[:4] for event in told[2:4]] == [("request_turn", 0, 0, 40), ("turn_finished", 0, 110, told[3][3])]
    assert told[4][:5] == ("request_turn", 0, 0, 40, 119)
    assert told[4][5] == pytest.approx(told[3][3] + 0.5)
    assert told[5:] == [("trajectory_ended", 0, 149, True)]
    before_tools = heard.index(told[3])
    samples = [event[2] for event in heard[:before_tools] if event[0] == "sample"]
    assert sum(sample.steps for sample in samples) == 70
    assert samples[0] == KvSample(free_blocks=97, running=1, waiting=0, preempted=0, prefilled=40)
    assert max(sample.steps for sample in samples) == 32


def test_decisions_follow_the_events_of_a_moment_and_keep_their_distance() -> None:
    heard: list[tuple[str, float]] = []

    def hear(name: str, *arguments) -> None:
        if name in ("decide", "request_turn"):
            heard.append((name, arguments[-1]))

    simulate(Watched(RoundRobin(), hear), trace())
    times = [now for name, now in heard if name == "decide"]
    assert min(later - earlier for earlier, later in pairwise(times)) >= TINY.costs.o - 1e-12
    waits = []
    arrived: list[float] = []
    for name, now in heard:
        if name == "request_turn":
            arrived.append(now)
        else:
            waits += [now - then for then in arrived]
            arrived = []
    assert max(waits) <= TINY.costs.o + 1e-12


def test_a_trajectory_that_nobody_places_is_an_error() -> None:
    class Deaf(RoundRobin):
        def decide(self, now: float) -> list[Place]:
            return []

    with pytest.raises(RuntimeError, match="96 trajectories are left"):
        simulate(Deaf(), trace())


def test_a_policy_that_acts_at_intervals_is_asked_again_when_nothing_happens() -> None:
    class Late(RoundRobin):
        """Places nothing for the first five seconds."""

        def decide(self, now: float) -> list[Place]:
            asked.append(now)
            return super().decide(now) if now >= 5 else []

    asked: list[float] = []
    result, _ = simulate(Late(), ALONE, UNIT)
    assert asked[:6] == [0, 1, 2, 3, 4, 5]
    assert result.makespan_s == 15


def test_the_bound_is_reached_by_a_trajectory_alone() -> None:
    """But for its first prompt, which the bound leaves out, and the last token of each turn, computed with the next."""
    row = trace("agentic")[0]
    machine = replace(TINY, blocks=99 * 32, block_size=1)
    result, _ = simulate(RoundRobin(), [row], machine, tick_s=0.0)
    left_out_s = TINY.costs.d * (row.turns[0].prompt_new_tokens + len(row.turns) - 1)
    assert result.makespan_s == pytest.approx(lower_bound_s([row], machine, 2) + left_out_s, rel=1e-3)


@pytest.mark.parametrize("kind", workload.KINDS)
def test_no_policy_beats_the_bound(kind: str) -> None:
    rows = workload.generate(kind, 3, Size(groups=8, samples=8))
    machine = replace(H200, blocks=H200.blocks // 8)
    bound = lower_bound_s(rows, machine, 2)
    for name in ("kv_aware", "round_robin"):
        result = Simulation(POLICIES[name](max(row.total_tokens for row in rows)), rows, machine, 2).run()
        assert bound <= result.makespan_s < 12 * bound


def test_host_memory_saves_recompute() -> None:
    rows = trace("agentic")
    machine = replace(TINY, costs=replace(TINY.costs, restore=9e-6))
    without, _ = simulate(RoundRobin(), rows, machine)
    within, _ = simulate(RoundRobin(), rows, machine, host_blocks=400)
    assert without.restored_tokens == 0 < within.restored_tokens
    assert within.recomputed_tokens < 0.2 * without.recomputed_tokens
    assert within.makespan_s < without.makespan_s


def test_steps_are_joined_with_groups_of_their_own() -> None:
    rows = sim_fleet.joined([trace(seed=1), trace(seed=2)])
    assert [row.traj for row in rows] == list(range(192))
    assert len({row.group for row in rows}) == 24
    assert [row.turns for row in rows] == [row.turns for seed in (1, 2) for row in trace(seed=seed)]


def test_the_bench_ends_with_its_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--replicas", "2", "--groups", "4", "--seeds", "1,2", "--kv", "0.1"]
    further = ["--offload", "2", "--overlap", "2", "--deaths", "3"]
    sim_fleet.main([*sizes, "--kinds", "bimodal", "--policies", "kv_aware,static", *further])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    metrics = line["metrics"]
    assert line["bench"] == "sim_fleet"
    assert metrics["replicas"] == [2]
    assert metrics["bound_ratio"] > 1
    assert metrics["makespan_ratio_static"].keys() == {"bimodal@2", "overall"}
    assert metrics["preemptions_static"] >= 0
    assert metrics["recomputed_tokens_kv_aware"] >= 0
    assert metrics["regret_kv_aware"]["worst"] >= metrics["regret_kv_aware"]["geomean"]
    ratios = [metrics[f"regret_{name}"]["geomean"] for name in ("kv_aware", "static")]
    assert ratios[0] * ratios[1] == pytest.approx(1), "each is the only other of the other"
    for metric in ("host_speedup_static", "deaths_speedup_static", "overlap_speedup_static"):
        assert metrics[metric].keys() == {"bimodal@2"}


def test_a_stream_of_groups_gives_a_throughput_and_a_group_for_each_complete_one() -> None:
    rows = sim_fleet.joined([trace(seed=seed) for seed in (1, 2, 3)])
    groups = {row.traj: row.group for row in rows}
    waiting: list[int] = []

    def hear(name: str, *arguments: float) -> None:
        if name == "request_turn":
            key = int(arguments[0])
            assert groups[key] == arguments[1]
            waiting.append(key)
        if name == "trajectory_ended":
            here = {groups[key] for key in waiting}
            assert len(here) <= 12 + len(ended), "no more than a step's groups at once"
            left[groups[int(arguments[0])]] -= 1
            if not left[groups[int(arguments[0])]]:
                ended.add(groups[int(arguments[0])])

    ended: set[int] = set()
    left = dict.fromkeys(groups.values(), 8)
    rate = sim_fleet.streamed_tokens_per_s(Watched(RoundRobin(), hear), rows, TINY, 2, 3)  # type: ignore[arg-type]
    assert {groups[key] for key in waiting} == set(range(36)), "all came"
    step_s = TINY.costs.step_s(1, 0)
    assert 1 / step_s < rate < 2 * TINY.max_num_seqs / step_s


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kinds", "chess"], "chess: it knows math8k"),
        (["--policies", "best"], "best: it knows kv_aware"),
        (["--kv", "0"], "argument --kv: 0 is not a number of at least 0.001"),
        (["--overlap", "0"], "argument --overlap: '0' is not a whole number"),
    ],
)
def test_wrong_options_are_named(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sim_fleet.arguments(given)
    assert said in capsys.readouterr().err
