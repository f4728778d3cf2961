"""Recorded groups through a stage of the user's: what comes in, what comes out, what holds the loop up."""

import asyncio

import pytest

from bench.commands.stage import groups, load, measure
from engine.errors import BadInput
from engine.recording.reader import RecordedRun
from tests.support.recorded_run import write_recorded_run

STAGES = """
import time

async def every_other(inbox, outbox):
    number = 0
    async for group in inbox:
        number += 1
        if number % 2:
            await outbox.put(group)

async def blocks(inbox, outbox):
    async for group in inbox:
        time.sleep(0.15)
        await outbox.put(group)
"""


@pytest.fixture
def run(tmp_path):
    write_recorded_run(tmp_path)
    return RecordedRun(tmp_path)


@pytest.fixture
def stages(tmp_path):
    path = tmp_path / "my_stages.py"
    path.write_text(STAGES)
    return path


def test_groups_are_fed_as_they_were_recorded(run):
    fed = list(groups(run))
    [first, *_] = fed
    [record, *_] = run.groups(run.steps[0])
    assert (first.prompt, first.kept) == (record.group.prompt, record.group.kept)
    assert first.rewards_G.tolist() == record.group.rewards_G.tolist()
    tokens = run.tokens(run.steps[0], record.number)
    for member, parts in zip(first.trajectories, tokens.trajectories, strict=True):
        assert member.token_ids_T.tolist() == parts[0].token_ids_T.tolist()
        assert member.logprobs_T.tolist() == parts[0].logprobs_T.tolist()
    assert len(list(groups(run, run.steps[-1]))) < len(fed)


def test_what_a_stage_drops_is_counted(run, stages):
    measured = asyncio.run(measure(load(f"{stages}:every_other"), list(groups(run)), times=4))
    assert measured.stats.items_in == 4 * len(list(groups(run)))
    assert measured.stats.items_out == (measured.stats.items_in + 1) // 2


def test_a_stage_that_holds_the_event_loop_up_is_named_with_its_line(run, stages):
    measured = asyncio.run(measure(load(f"{stages}:blocks"), list(groups(run))[:2], times=2))
    [place] = measured.blocked_at
    line = STAGES.splitlines().index("        time.sleep(0.15)") + 1
    assert place == f"my_stages.py:{line} blocks"


@pytest.mark.parametrize(("name", "named"), [("nowhere.py:stage", "nowhere"), ("{stages}:other", "other"), ("a", "a")])
def test_what_is_no_stage_is_named(name, named, stages):
    with pytest.raises(ValueError, match=named):
        load(name.format(stages=stages))


def test_a_run_without_that_step_is_named(run):
    with pytest.raises(BadInput, match="step 99"):
        list(groups(run, 99))
