"""Recorded groups under another reward or selection: what changes, what is said of it, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from algo.group.batch import Selection
from algo.group.roc import RoC
from bench.commands.reverify import Options, main, reverify
from bench.reselection import OtherRoC
from engine.recording import files
from engine.view.programs import SELECTIONS
from tests.support.recorded_run import TOKENIZER, damaged, made_group, made_row, made_tokens

REWARDS = """
import asyncio

from engine.ports import GraderUnavailable

async def of_odd_samples(trajectory):
    await asyncio.sleep(0.001 * (4 - trajectory.sample % 4))  # they end in another order
    return float(trajectory.sample % 2)

def same(trajectory):
    return trajectory.reward

def fails(trajectory):
    if trajectory.sample == 2:
        raise KeyError("no such key")
    return 1.0

def refuses(trajectory):
    raise ValueError("boom")

def unavailable(trajectory):
    raise GraderUnavailable("no grader")

class First:
    sees_group = True

    def __call__(self, trajectories):
        return [float(member.sample == 0) for member in trajectories]
"""
SELECTION = Selection(selector=RoC(keep=4), seed=7)


@pytest.fixture
def run(tmp_path):
    """Two steps of three groups of eight trajectories, of which RoC has kept four."""
    folder = files.folder_of(tmp_path)
    (folder / "steps").mkdir(parents=True)
    files.tokenizer_path(folder).write_bytes(TOKENIZER.read_bytes())
    for step in (1, 2):
        made = [selected(made_group(step, number, 8)) for number in range(3)]
        tokens = [made_tokens(record) for record in made]
        files.write(
            files.step_path(folder, step), [files.packed(each) for each in (made_row(step, made), *made, *tokens)]
        )
    (tmp_path / "config.json").write_text(json.dumps({"algorithm": "roc", "group_size": 4, "seed": 7}))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def selected(record):
    """The group as a run with this selection would have put it out; RoC's reasons differ by sample."""
    reasons = tuple({"p_err": 0.1 * sample, "p_format": 0.05 * (8 - sample)} for sample in range(8))
    members = tuple(replace(member, prompt=record.group.prompt) for member in record.group.trajectories)
    known = {(record.group.prompt.id, at): (each["p_err"], each["p_format"]) for at, each in enumerate(reasons)}
    choose = Selection(selector=OtherRoC(keep=4, known=known), seed=7)
    group = choose(replace(record.group, trajectories=members, kept=(), advantages_K=None, drop=None))
    return replaced(record, group=replace(group, trajectories=record.group.trajectories), reasons=reasons)


async def total(run, **options):
    return (await reverify(Options(run=run, **options)))["total"]


async def test_the_runs_own_settings_select_what_was_recorded(run):
    counts = await total(run)
    assert counts["reproduced"] == counts["comparable"] == counts["groups"] == 6
    assert counts["kept"] == counts["other_kept"] > 0
    assert counts["kept_others"] == counts["rewards_changed"] == 0
    assert counts["advantage"] == counts["other_advantage"]


async def test_the_same_reward_changes_nothing(run):
    counts = await total(run, reward=f"{run}/rewards.py:same")
    assert counts["rewards_changed"] == counts["kept_others"] == 0


async def test_another_reward_changes_what_is_trained(run):
    counts = await total(run, reward=f"{run}/rewards.py:of_odd_samples")
    assert counts["rewards_changed"] > 20  # the record has even samples right, and the first group flat
    assert counts["other_correct"] == 24
    assert counts["other_flat"] == 0 < counts["flat"]
    assert counts["kept_others"] > 0


async def test_a_reward_that_sees_the_group_grades_it_whole(run):
    counts = await total(run, reward=f"{run}/rewards.py:First")
    assert counts["other_correct"] == 6


def test_an_exception_of_a_reward_names_the_trajectory(run, capsys):
    assert main([str(run), f"reward={run}/rewards.py:fails"]) == 1
    assert "train-1-0, sample 2" in capsys.readouterr().err
    assert main([str(run), f"reward={run}/rewards.py:refuses"]) == 1  # a ValueError, too, is the reward's
    said = capsys.readouterr().err.splitlines()[-1]
    line = 1 + REWARDS.splitlines().index('    raise ValueError("boom")')
    assert f"ValueError: boom (rewards.py:{line})" in said
    assert "for train-1-0, sample 0" in said


def test_a_file_with_a_mistake_is_one_line(run, capsys):
    (run / "mistake.py").write_text("x = 1\ndef f(:\n")
    (run / "raises.py").write_text("\nraise KeyError('x')\n")
    for name, at in (("mistake.py", "mistake.py:2"), ("raises.py", "raises.py:2")):
        assert main([str(run), f"reward={run}/{name}:f"]) == 2
        said = capsys.readouterr().err.strip()
        assert at in said
        assert "Fix:" in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (["group_size=999"], "at most 8"),
        (["group_size=5", "rollouts=4"], "at most 4"),
        (["algorithm=grpo", "smoothing=0.5"], "algorithm=roc"),
        (["algorithm=random", "penalties=errors"], "algorithm=roc"),
        (["algorithm=grpo", "group_size=2"], "rollouts="),
    ],
)
def test_an_option_without_an_effect_is_refused(run, options, fix, capsys):
    assert main([str(run), *options]) == 2
    assert fix in capsys.readouterr().err


def test_what_was_not_measured_is_no_zero(run, capsys):
    assert main([str(run), f"reward={run}/rewards.py:unavailable"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    total = json.loads(last)["total"]
    assert total["other_correct"] is total["rewards_changed"] is total["other_mean_advantage"] is None
    assert total["other_error_share"] is None
    assert total["error_share"] > 0
    assert "none of 48 trajectories could be graded" in shown[0]
    assert "-> –" in shown[-2]


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_damaged_step_is_said(run, how, capsys):
    path = files.step_path(files.folder_of(run), 2)
    damaged(path, how)
    assert main([str(run)]) == 0
    out = capsys.readouterr().out.splitlines()
    lost = json.loads(out[-1])["damage"]
    assert len(lost) == 1
    assert "of 3 groups of step 2 can be read" in lost[0]
    assert lost[0] in out[:-1]


async def test_other_selections_keep_other_trajectories(run):
    everything = await total(run, algorithm="grpo")
    assert everything["other_kept"] == 4 * 8  # the first group of each step is flat
    half = await total(run, algorithm="grpo", rollouts=4)
    assert half["other_kept"] == 4 * 4
    assert half["trajectories"] == 24
    assert (await total(run, group_size=2))["other_kept"] == 4 * 2
    assert (await total(run, smoothing=100.0))["kept_others"] > 0


async def test_penalties_decide_which_successes_are_kept(run):
    by_errors = await total(run, penalties="errors", smoothing=1e-6)
    by_format = await total(run, penalties="format", smoothing=1e-6)
    assert by_errors["other_error_share"] < by_format["other_error_share"]


def test_a_quota_of_failures_is_kept_where_there_are_so_many():
    assert RoC(keep=8).quota(12, 4) == (6, 2)
    assert OtherRoC(keep=8, failures=0.5).quota(12, 4) == (4, 4)
    assert OtherRoC(keep=8, failures=0.5).quota(14, 2) == (6, 2)
    assert OtherRoC(keep=8, failures=0.0).quota(3, 13) == (3, 5)


async def test_the_advantages_of_a_batch_are_computed(run):
    counts = await total(run, algorithm="grpo", advantage="reinforce++")
    assert counts["other_advantage"] > 0
    assert counts["other_flat"] == 0  # compared with other groups, a flat one has a signal


async def test_a_configuration_that_does_not_say_how_it_selected_is_named(run):
    (run / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="algorithm="):
        await reverify(Options(run=run))
    answer = await reverify(Options(run=run, algorithm="grpo"))
    assert answer["total"]["comparable"] == 0
    assert "not in its configuration" in answer["notes"][0]


async def test_texts_are_read_only_where_they_are_needed(run):
    files.tokenizer_path(files.folder_of(run)).unlink()
    assert (await total(run))["reproduced"] == 6  # the record has the penalties
    with pytest.raises(ValueError, match="tokenizer"):
        await total(run, reward=f"{run}/rewards.py:same")


async def test_groups_that_other_code_selected_are_counted(run):
    config = {"algorithm": "random", "group_size": 4, "seed": 7}
    (run / "config.json").write_text(json.dumps(config))
    answer = await reverify(Options(run=run))
    assert answer["total"]["reproduced"] < answer["total"]["comparable"]
    assert "other code or settings" in answer["notes"][0]


@pytest.mark.parametrize("reward", ["none.py:x", "rewards.py:missing", "rewards.py"])
def test_a_reward_that_is_not_there_is_refused(run, reward, capsys):
    assert main([str(run), f"reward={run}/{reward}"]) == 2
    assert "Fix:" in capsys.readouterr().err


@pytest.mark.parametrize("selection", SELECTIONS)
def test_what_the_page_offers_is_understood(run, selection):
    assert main([str(run), "step=1", *selection.split()]) == 0


def test_the_last_line_is_the_answer(run, capsys):
    assert main([str(run), "step=2"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["step"] for row in answer["rows"]] == [2]
    assert np.isfinite(answer["total"]["mean_advantage"])
