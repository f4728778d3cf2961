"""Recorded groups through a stage of the user's: what comes in, what comes out, what holds the loop up."""

import pytest

from bench.__main__ import main
from bench.commands.stage import fed, groups, load, pace
from engine.errors import BadInput
from engine.recording import files
from engine.recording.reader import RecordedRun
from tests.support.recorded_run import damaged, write_recorded_run

STAGES = """
import asyncio, signal, time

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

async def dozes(inbox, outbox):
    async for group in inbox:
        time.sleep(0.01)
        await outbox.put(group)

async def waits(inbox, outbox):
    async for group in inbox:
        await asyncio.sleep(0.01)
        await outbox.put(group)

async def raises(inbox, outbox):
    async for group in inbox:
        raise KeyError("no such key")

async def takes_one(inbox):
    pass

def is_plain(inbox, outbox):
    pass

async def yields(inbox, outbox):
    async for group in inbox:
        yield group

async def ends(inbox, outbox):
    pass

async def never(inbox, outbox):
    await asyncio.Event().wait()

async def hears_ctrl_c(inbox, outbox):
    signal.raise_signal(signal.SIGINT)
    await asyncio.Event().wait()
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
    measured, interrupted = fed(load(f"{stages}:every_other"), list(groups(run)), 0.1)
    assert not interrupted
    assert measured.stats.items_in > 4
    assert measured.stats.items_out == (measured.stats.items_in + 1) // 2


def test_a_stage_that_holds_the_event_loop_up_is_named_with_its_line(run, stages):
    measured, _ = fed(load(f"{stages}:blocks"), list(groups(run))[:2], 0.4)
    [place] = measured.blocked_at
    line = STAGES.splitlines().index("        time.sleep(0.15)") + 1
    assert place == f"my_stages.py:{line} blocks"


def test_a_short_block_counts_as_held_and_a_wait_does_not(run, stages):
    feed = list(groups(run))
    dozes, _ = fed(load(f"{stages}:dozes"), feed, 0.3)
    waits, _ = fed(load(f"{stages}:waits"), feed, 0.3)
    assert dozes.held_per_item_s >= 0.01
    assert dozes.held_s > 0.9 * dozes.seconds
    assert waits.held_s < 0.5 * waits.seconds


def test_a_stage_that_keeps_what_it_gets_ends_soon_after_the_time(run, stages):
    measured, _ = fed(load(f"{stages}:never"), list(groups(run)), 0.1)
    assert measured.stats.items_out == 0
    assert measured.seconds < 5


def test_ctrl_c_shows_what_there_is(tmp_path, run, stages, capsys):
    assert main(["stage", f"{stages}:hears_ctrl_c", f"feed={tmp_path}"]) == 130
    shown = capsys.readouterr()
    assert "items in" in shown.out
    assert "of the 12 groups" in shown.err, "the share of the groups that was fed is said"


def test_the_pace_of_a_run_is_that_of_its_steps(tmp_path):
    assert pace(tmp_path) is None
    rows = (
        '{"step": 0}\n{"step": 1, "time/step_s": 3, "groups/all": 4}\n{"step": 2, "time/step_s": 1, "groups/all": 4}\n'
    )
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert pace(tmp_path) == 2.0


@pytest.mark.parametrize(("name", "named"), [("nowhere.py:stage", "nowhere"), ("{stages}:other", "other"), ("a", "a")])
def test_what_is_no_stage_is_named(name, named, stages):
    with pytest.raises(ValueError, match=named):
        load(name.format(stages=stages))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "KeyError: 'no such key' (my_stages.py:{line})"),
        ("takes_one", "takes_one (my_stages.py:"),
        ("is_plain", "is not async"),
        ("yields", "outbox.put"),
        ("ends", "ends (my_stages.py:"),
    ],
)
def test_a_stage_that_fails_is_one_line_with_its_place(name, says, run, stages, tmp_path, capsys):
    assert main(["stage", f"{stages}:{name}", f"feed={tmp_path}", "step=1", "seconds=0.1"]) == 2
    said = capsys.readouterr().err.splitlines()
    line = 1 + STAGES.splitlines().index('        raise KeyError("no such key")')
    assert says.format(line=line) in said[-1]
    assert "Fix:" in said[-1]
    assert len(said) < 5


def test_a_damaged_step_is_said(run, stages, tmp_path, capsys):
    damaged(files.step_path(run.folder, 2), "cut")
    assert main(["stage", f"{stages}:waits", f"feed={tmp_path}", "seconds=0.1"]) == 0
    assert "of 4 groups of step 2 can be read" in capsys.readouterr().out


def test_a_run_without_that_step_is_named(run):
    with pytest.raises(BadInput, match="step 99"):
        list(groups(run, 99))
