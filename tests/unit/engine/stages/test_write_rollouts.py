"""Rollouts that are written for people: what was sampled, graded and chosen, and a reader for the terminal."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Pipeline, Stage
from engine.programs.rollouts import Options, main, rollouts
from engine.stages.write_rollouts import Call, path_of, read_rollouts, rows, steps_of, write_rollouts
from engine.types import Group
from tests.support.algo_fakes import tool_use
from tests.support.fakes import a_prompt, a_trajectory


def a_group(lease, rewards, kept=()):
    prompt = replace(a_prompt(), id=f"problem-{lease}")
    members = tuple(replace(a_trajectory(sampled=5, reward=reward), prompt=prompt) for reward in rewards)
    advantages = np.asarray([rewards[index] - 0.5 for index in kept]) if kept else None
    return Group(
        prompt=prompt,
        trajectories=members,
        lease=lease,
        kept=kept,
        advantages_K=advantages,
        drop=None if kept else "flat",
    )


async def write(folder, steps, every):
    """Steps of two groups go through the stage; returns what comes out."""
    passed = []

    async def source(inbox, outbox):
        for step in range(steps):
            await outbox.put([a_group(2 * step, [0.0, 1.0], kept=(0, 1)), a_group(2 * step + 1, [1.0, 1.0])])

    async def sink(inbox, outbox):
        async for groups in inbox:
            passed.append([group.lease for group in groups])

    stage = write_rollouts(folder, Leases(2, 0), every=every)
    names = (("source", source), ("write", stage), ("sink", sink))
    await Pipeline([Stage(name=name, run=run) for name, run in names]).run()
    return passed


async def test_each_nth_step_is_written_and_every_step_goes_on(tmp_path):
    assert await write(tmp_path / "rollouts", steps=5, every=2) == [[2 * step, 2 * step + 1] for step in range(5)]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step-000002.jsonl", "step-000004.jsonl"]
    found = [msgspec.json.decode(line) for line in (tmp_path / "rollouts/step-000002.jsonl").read_bytes().splitlines()]
    assert [(row["prompt_id"], row["kept"], row["advantage"], row["drop"]) for row in found] == [
        ("problem-2", True, -0.5, None),
        ("problem-2", True, 0.5, None),
        ("problem-3", False, None, "flat"),
        ("problem-3", False, None, "flat"),
    ]


async def test_the_reader_shows_what_is_asked_for(tmp_path, capsys):
    await write(tmp_path / "rollouts", steps=2, every=1)
    assert [row.step for row in rollouts(Options(run=tmp_path))] == [2] * 4, "the last one unless a step is given"
    assert [row.reward for row in rollouts(Options(run=tmp_path, step=1, only="wrong"))] == [0.0]
    assert [row.kept for row in rollouts(Options(run=tmp_path, only="kept"))] == [True, True]
    assert main([str(tmp_path), "first=1", "prompt=problem-3"]) == 0
    assert "problem-3" in capsys.readouterr().out


async def test_what_is_not_there_or_damaged_is_named(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "rollouts" in capsys.readouterr().err
    await write(tmp_path / "rollouts", steps=2, every=1)
    assert main([str(tmp_path), "step=7"]) == 1
    assert "1, 2" in capsys.readouterr().err
    path = tmp_path / "rollouts/step-000002.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert main([str(tmp_path)]) == 1
    assert f"{path}, line 4" in capsys.readouterr().err


async def test_the_exact_tokens_and_what_was_sampled_of_them_come_back(tmp_path):
    await write(tmp_path / "rollouts", steps=4, every=2)
    assert steps_of(tmp_path) == [2, 4]
    group = a_group(2, [0.0, 1.0], kept=(0, 1))
    for row, member in zip(read_rollouts(path_of(tmp_path, 2)), group.trajectories, strict=False):
        assert row.ids.tolist() == member.token_ids_T.tolist()
        sampled_T = np.zeros(len(row.ids), np.bool_)
        for start, end in row.turns:
            sampled_T[start:end] = True
        assert sampled_T.tolist() == member.sampled_T.tolist()


def test_a_call_has_the_number_of_its_turn():
    whole = a_trajectory(sampled=5, reward=1.0)
    turns = [replace(whole.turns[0], start=3, end=4, tool_uses=(tool_use("ok"), tool_use("error")))]
    turns += [
        replace(whole.turns[0], start=5, end=6),
        replace(whole.turns[0], start=7, end=8, tool_uses=turns[0].tool_uses),
    ]
    group = replace(a_group(0, []), trajectories=(replace(whole, turns=tuple(turns)),))
    [row] = rows(1, [group])
    assert [(call.outcome, call.turn) for call in row.calls] == [("ok", 0), ("error", 0), ("ok", 2), ("error", 2)]
    assert row.turns == ((3, 4), (5, 6), (7, 8))


def test_rows_of_before_the_token_ids_are_read_and_damaged_ids_are_named(tmp_path):
    [row] = rows(1, [replace(a_group(0, [1.0]), drop=None)])
    old = {name: value for name, value in msgspec.to_builtins(row).items() if name not in ("token_ids", "turns")}
    (tmp_path / "old.jsonl").write_bytes(msgspec.json.encode(old))
    [found] = read_rollouts(tmp_path / "old.jsonl")
    assert (found.text, found.ids.tolist(), found.turns) == (row.text, [], ())
    with pytest.raises(ValueError, match="problem-0 #0"):
        _ = msgspec.structs.replace(row, token_ids=b"no").ids


def test_a_step_that_nothing_divides_is_refused(tmp_path):
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        write_rollouts(tmp_path, Leases(2, 0), every=0)


def test_the_scores_of_a_reward_are_written_and_shown(tmp_path, capsys):
    group = a_group(0, [1.0, 0.0])
    scored = replace(group.trajectories[0], scores={"style": 0.25, "words": None})
    file = path_of(tmp_path, 1)
    file.parent.mkdir()
    members = (scored, *group.trajectories[1:])
    file.write_bytes(
        b"".join(msgspec.json.encode(row) + b"\n" for row in rows(1, [replace(group, trajectories=members)]))
    )
    assert [row.scores for row in read_rollouts(file)] == [{"style": 0.25, "words": None}, {}]
    assert main([str(tmp_path), "step=1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("style 0.25, words -") == 1


def test_replies_stand_below_the_calls_that_they_answer(tmp_path, capsys):
    [row] = rows(1, [a_group(0, [1.0])])
    text = "first<tool_call>{}</tool_call>then<tool_call>{}</tool_call><|im_end|>last"
    calls = tuple(Call(name="run", arguments="{}", outcome="ok", reply=f"reply {n}") for n in range(3))
    path_of(tmp_path, 1).parent.mkdir(parents=True)
    path_of(tmp_path, 1).write_bytes(msgspec.json.encode(msgspec.structs.replace(row, text=text, calls=calls)) + b"\n")
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    pieces = ["first", "reply 0", "then", "reply 1", "last", "reply 2"]
    places = [shown.index(piece) for piece in pieces]
    assert places == sorted(places)
