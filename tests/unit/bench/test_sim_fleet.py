"""The simulated fleet: policies get the events of a live one, every token is generated once, jumps change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.benches import sim_fleet
from bench.benches.sim_fleet import METRICS, Options, figures, joined, streamed
from bench.placement import workload
from bench.placement.policies import OURS, POLICIES, Setting
from bench.placement.workload import Size, Traced, Turn
from bench.simulator.fleet import Death, Result, Simulation
from bench.simulator.machine import H200, Machine, lower_bound_s
from engine.balancing.balancer import Balancer, Place
from engine.balancing.kv_aware import KvAware
from engine.balancing.round_robin import RoundRobin
from engine.balancing.step_cost import StepCost
from engine.replica.port import KvSample

COST = StepCost(fixed_s=4e-3, per_request_s=331e-6, per_kv_token_s=1e-7, per_token_s=131e-6)
TINY = Machine(blocks=99, block_size=32, cost=COST, max_num_seqs=64)


def trace(kind: str = "math8k", seed: int = 5) -> list[Traced]:
    return workload.small(kind, seed)


def policy_of(name: str, rows: list[Traced]) -> Balancer:
    return POLICIES[name](Setting.of(rows, TINY.kv_tokens, poll_s=0.1, buffer_tokens=36))


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
    result, simulation = simulate(policy_of(name, rows), rows)
    assert result.makespan_s >= lower_bound_s(rows, TINY, 2)
    assert result.generated_tokens == sum(row.gen_tokens for row in rows)
    for engine in simulation.engines:
        engine.check()
        assert engine.cache.free == 99
    prompts = sum(turn.prompt_new_tokens for row in rows for turn in row.turns[1:])
    assert result.prefilled_tokens >= prompts + result.recomputed_tokens
    assert 0 < result.busy <= 1


@pytest.mark.parametrize("name", ["round_robin", "cap", "static"])
def test_jumps_over_many_steps_change_nothing(name: str) -> None:
    """The same run step by step, for policies that do not look at samples."""
    rows = trace("math8k")
    jumps, _ = simulate(policy_of(name, rows), rows, tick_s=0.0)
    steps, _ = simulate(policy_of(name, rows), rows, longest_segment=1, tick_s=0.0)
    assert jumps.makespan_s == pytest.approx(steps.makespan_s, rel=1e-9)
    for count in ("preemptions", "recomputed_tokens", "prefilled_tokens"):
        assert getattr(jumps, count) == getattr(steps, count), count
    assert steps.preemptions > 0, "the trace does not fit"


def test_the_same_run_twice_is_the_same_run() -> None:
    rows = trace("agentic")
    first, second = (simulate(KvAware(2000), rows)[0] for _ in range(2))
    assert replace(first, decide_s=0.0) == replace(second, decide_s=0.0)


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
    policy = policy_of(name, rows)
    result, simulation = simulate(Watched(policy, hear), rows, deaths=deaths)
    calm, _ = simulate(policy_of(name, rows), rows)
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


UNIT = replace(TINY, cost=StepCost(fixed_s=1.0, per_request_s=0.0, per_token_s=0.0))  # every step takes a second
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
    assert min(later - earlier for earlier, later in pairwise(times)) >= TINY.cost.fixed_s - 1e-12
    waits = []
    arrived: list[float] = []
    for name, now in heard:
        if name == "request_turn":
            arrived.append(now)
        else:
            waits += [now - then for then in arrived]
            arrived = []
    assert max(waits) <= TINY.cost.fixed_s + 1e-12


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
    left_out_s = TINY.cost.per_token_s * (row.turns[0].prompt_new_tokens + len(row.turns) - 1)
    assert result.makespan_s == pytest.approx(lower_bound_s([row], machine, 2) + left_out_s, rel=1e-3)


@pytest.mark.parametrize("kind", workload.KINDS)
def test_no_policy_beats_the_bound(kind: str) -> None:
    rows = workload.generate(kind, 3, Size(groups=8, samples=8))
    machine = replace(H200, blocks=H200.blocks // 8)
    bound = lower_bound_s(rows, machine, 2)
    for name in ("kv_aware", "round_robin"):
        result = Simulation(policy_of(name, rows), rows, machine, 2).run()
        assert bound <= result.makespan_s < 12 * bound


def test_steps_are_joined_with_groups_of_their_own() -> None:
    rows = joined([trace(seed=1), trace(seed=2)])
    assert [row.traj for row in rows] == list(range(192))
    assert len({row.group for row in rows}) == 24
    assert [row.turns for row in rows] == [row.turns for seed in (1, 2) for row in trace(seed=seed)]


def test_a_round_of_the_bench_compares_each_policy_with_ours_and_with_the_best_other() -> None:
    options = Options(rounds=2, replicas=2, groups=4, kv=0.1, kinds=("bimodal", "uniform"), policies=(OURS, "static"))
    rounds: list = []
    sim_fleet.measure(options, rounds.append)
    assert len(rounds) == 2
    for figures_of in rounds:
        ours, static = figures_of[OURS], figures_of["static"]
        assert ours["ratio_bimodal"] == ours["ratio_uniform"] == 1
        assert ours["regret"] * static["regret"] == pytest.approx(1), "each is the only other of the other"
        assert static["worst"] == max(static["ratio_bimodal"], static["ratio_uniform"])
        assert ours["over_bound"] > 1
        assert ours.keys() <= METRICS.keys()


def test_a_policy_alone_has_no_regret() -> None:
    outcome = sim_fleet.Outcome(cost=2.0, figures={})
    assert figures({"math8k": {"static": outcome}}, "static") == {}


def test_a_stream_of_groups_gives_a_throughput_and_a_group_for_each_complete_one() -> None:
    rows = joined([trace(seed=seed) for seed in (1, 2, 3)])
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
    token_s = streamed(Watched(RoundRobin(), hear), rows, TINY, 2, 3).cost  # type: ignore[arg-type]
    assert {groups[key] for key in waiting} == set(range(36)), "all came"
    step_s = TINY.cost.step_s(1)
    assert step_s / (2 * TINY.max_num_seqs) < token_s < step_s
