"""The bench of rollouts: the bare mode repeats exactly what was rolled out."""

from itertools import chain

from bench.rollout_load import Repeater, Schedule
from engine.rollout import derive_seed
from sandbox.wire import ToolResult
from tests.engine.node import ANSWER, END, Setup, call


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


async def test_the_repeater_answers_what_was_recorded():
    repeater = Repeater({("print(1)", ""): ToolResult(outcome="error", stderr="no")})
    assert (await repeater.run("print(1)")).outcome == "error"
    assert (await repeater.run("print(2)")).outcome == "ok"
    assert repeater.unknown == 1
