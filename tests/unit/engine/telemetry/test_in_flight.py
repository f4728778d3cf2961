"""Which rollouts are under way, as a run's own parts tell it, and the file in which it is written."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.recording import in_flight as written
from engine.run.journal import Journal
from engine.stages.group import GroupConfig, GroupMaker
from engine.telemetry.in_flight import NEWEST, InFlight, Snapshot
from tests.support.fakes import Gate, ScriptedRunner, SlowReward, a_prompt, settle
from tests.support.node import ANSWER, END, Setup, call


async def right(trajectory: Any) -> float:
    return 1.0


async def test_a_rollout_is_followed_from_its_place_to_its_grade() -> None:
    runner, first, reward = ScriptedRunner(hold=True), Gate(), SlowReward(right)
    async with Setup([call("print(1)"), first, END], [ANSWER], runner=runner) as node:
        in_flight = node.timeline.in_flight
        config = GroupConfig(samples=1)
        maker = GroupMaker(rollouts=node.rollouts, reward=reward, config=config, timeline=node.timeline)
        group = asyncio.create_task(maker(a_prompt(), 5, 0, journal=Journal()))

        def now() -> tuple[str, int, bool, int]:
            [rollout] = in_flight.snapshot(groups_per_step=2).under_way
            return rollout.state, rollout.turn, rollout.tokens > 0, rollout.replica

        await first.started.wait()
        assert now() == ("sampling", 1, True, 0)
        first.release()
        await settle()
        assert now() == ("tool call", 1, True, 0)
        runner.release()
        await reward.started.wait()
        assert now() == ("grading", 2, True, 0)
        reward.release()
        await group
        snapshot = in_flight.snapshot(groups_per_step=2)
        [ended] = snapshot.ended
        assert (ended.stop, ended.reward, ended.turns, ended.lease) == ("answer", 1.0, 2, 5)
        assert snapshot.under_way == []
        assert set(snapshot.counts.values()) == {0}
        assert in_flight.calls == {("python", "ok"): 1}


async def test_a_rollout_that_is_cancelled_or_fails_leaves_the_list() -> None:
    first = Gate()
    async with Setup([first, ANSWER]) as node:
        maker = GroupMaker(rollouts=node.rollouts, reward=right, config=GroupConfig(samples=2), timeline=node.timeline)
        group = asyncio.create_task(maker(a_prompt(), 0, 0, journal=Journal()))
        await first.started.wait()
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        snapshot = node.timeline.in_flight.snapshot(groups_per_step=1)
        assert snapshot.under_way == []
        assert Counter(ended.stop for ended in snapshot.ended) == {"cancelled": 2}
        assert set(snapshot.counts.values()) == {0}


def test_a_snapshot_is_bounded_and_counts_all() -> None:
    clock = iter(range(1 << 20)).__next__
    in_flight = InFlight(clock)
    opened = [in_flight.rollout(f"p{number}", sample=0, lease=number) for number in range(16_384)]
    for each in opened:
        each.__enter__()
    snapshot = in_flight.snapshot(groups_per_step=512)
    assert [each.prompt for each in snapshot.under_way[:2]] == ["p16383", "p16382"]
    assert len(snapshot.under_way) == NEWEST
    assert snapshot.counts["starting"] == 16_384
    for each in opened:
        each.__exit__(None, None, None)
    assert len(in_flight.snapshot(groups_per_step=512).ended) == 50


async def read_until(run: Path, *, starting: int) -> Snapshot:
    """The file of a run, once so many rollouts are starting in it: a thread writes it."""
    for _ in range(1000):
        snapshot = written.read(run)
        if snapshot is not None and snapshot.counts["starting"] == starting:
            return snapshot
        await asyncio.sleep(0.01)
    raise AssertionError(snapshot)


async def test_the_file_is_there_while_a_run_goes_on_and_says_so_when_nothing_is_left(tmp_path) -> None:
    in_flight, notes = InFlight(time.time), list[str]()
    writing = asyncio.create_task(written.keep_written(tmp_path, in_flight, groups_per_step=4, note=notes.append))
    with in_flight.rollout("p", sample=0, lease=9):
        await settle()
        snapshot = await read_until(tmp_path, starting=1)
    assert snapshot.groups_per_step == 4
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    last = await read_until(tmp_path, starting=0)
    assert set(last.counts.values()) == {0}
    assert [path.name for path in tmp_path.iterdir()] == [written.NAME]
    assert notes == []


async def test_a_folder_that_cannot_be_written_is_said_once(tmp_path) -> None:
    notes = list[str]()
    gone = tmp_path / "gone"
    keep = written.keep_written(gone, InFlight(time.time), groups_per_step=4, note=notes.append, every_s=0.01)
    writing = asyncio.create_task(keep)
    await asyncio.sleep(0.2)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert len(notes) == 1


def test_a_file_of_another_version_is_a_line(tmp_path) -> None:
    (tmp_path / written.NAME).write_text('{"at": "x"}')
    with pytest.raises(written.NotReadable, match="cannot be read"):
        written.read(tmp_path)
