"""The bench of rollouts: the bare mode repeats exactly what was rolled out, and nothing is left of thousands."""

import gc
from itertools import chain

from bench.benches.rollout.load import Repeater, Schedule, Turn, bare
from bench.benches.rollout.rollout import METRICS
from bench.benches.rollout.scale import scale
from engine.rollout.rollout import derive_seed
from sandbox.wire import ToolResult
from tests.support.fakes import ScriptedReplica
from tests.support.node import ANSWER, END, Setup, call
from tests.support.paths import TINY


async def test_a_schedule_is_the_trajectory_cut_into_requests():
    async with Setup([call("print(1)") + END], [ANSWER]) as node:
        trajectory = await node.run()
    schedule = Schedule.of(trajectory, seed=3)
    first, last = trajectory.turns
    ids = trajectory.token_ids_T.tolist()
    assert [turn.tokens for turn in schedule.turns] == [first.end - first.start, last.end - last.start]
    assert [turn.seed for turn in schedule.turns] == [derive_seed(3, "p0", 0, number) for number in (0, 1)]
    given = [*schedule.prompt_ids, *chain.from_iterable(turn.given for turn in schedule.turns)]
    assert given == [token for token, sampled in zip(ids, trajectory.sampled_T, strict=True) if not sampled]
    assert schedule.turns[-1].given == ()


async def test_bare_trajectories_go_where_the_fewest_are_and_stay():
    """Two at a time: the long one keeps its replica, the short ones follow each other on the other."""
    lengths = [(40, 40), (5, 5), (5, 5), (5, 5)]
    schedules = [
        Schedule(prompt_ids=(n,) * 8, turns=tuple(Turn(tokens=length, seed=n, given=()) for length in turns))
        for n, turns in enumerate(lengths)
    ]
    replicas = [ScriptedReplica(index) for index in (0, 1)]
    measured = await bare(replicas, schedules, concurrent=2)
    homes = [{request_id.split("-")[1] for _, _, request_id in replica.requests} for replica in replicas]
    assert homes == [{"0"}, {"1", "2", "3"}]
    assert measured.tokens == 110


async def test_the_repeater_answers_what_was_recorded():
    repeater = Repeater({("print(1)", ""): ToolResult(outcome="error", stderr="no")})
    assert (await repeater.run("print(1)")).outcome == "error"
    assert (await repeater.run("print(2)")).outcome == "ok"
    assert repeater.unknown == 1


async def test_what_a_trajectory_holds_is_looked_at_while_it_runs():
    thresholds = gc.get_threshold()
    try:
        measured = await scale(TINY, queued=64, replica_count=1, step_s=0.002)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert measured["trajectories"] == 512 + 64
    # Equal where the process had memory to spare; one that nothing looked at would be negative.
    assert measured["trajectory_peak_bytes"] >= measured["trajectory_bytes"]
    assert measured.keys() <= METRICS.keys()
