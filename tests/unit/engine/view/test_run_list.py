"""The list of runs that the page finds by itself."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from engine.commands.view import opened
from engine.view.answers.trajectories import NotThere
from engine.view.questions import Questions
from engine.view.run_files import RunFiles
from engine.view.run_list import RunList, runs_below
from tests.support.viewed_runs import metrics, run_under_way, write_viewed_run


def written_at(path: Path, seconds: float) -> Path:
    os.utime(path / "metrics.jsonl", (seconds, seconds))
    return path


def test_runs_are_found_at_any_depth_and_a_model_is_none(tmp_path: Path) -> None:
    for name, at in (("old", 1e9), ("sweep/lr-1", 3e9), ("chain", 2e9), ("chain/stage-2", 2.5e9)):
        write_viewed_run(tmp_path / name, recorded=0)
        written_at(tmp_path / name, at)
    write_viewed_run(tmp_path / "old" / "checkpoint", recorded=0)  # what a run holds is no run of its own
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in runs_below([tmp_path])]
    assert found == ["sweep/lr-1", "chain/stage-2", "chain", "old"]
    assert runs_below([tmp_path / "nowhere"]) == []


def test_a_row_says_how_a_run_is(tmp_path: Path) -> None:
    write_viewed_run(tmp_path / "done", recorded=0)
    listed = RunList([tmp_path])
    with run_under_way(tmp_path / "goes-on", steps=1, recipe="recipes/mine.py") as folder:
        folder.json("config.json", {"steps": 9, "recipe": "recipes/mine.py"})
        [going] = [row for row in listed.rows() if row["name"] == "goes-on"]
        assert (going["step"], going["steps"], going["accuracy"], going["recipe"]) == (1, 9, None, "recipes/mine.py")
        folder.step(2, metrics(2))
        folder.step(3, metrics(3))
        [going] = [row for row in listed.rows() if row["name"] == "goes-on"]
        assert (going["step"], going["accuracy"]) == (3, metrics(2)["eval/accuracy"])
        folder.resume(1)
        [going] = [row for row in listed.rows() if row["name"] == "goes-on"]
        assert (going["step"], going["accuracy"]) == (1, None)
        folder.step(2, metrics(2))
        listed.rows()
        folder.resume(1)  # the file is another one, and soon longer than the one before
        for step in (3, 5, 7, 9):
            folder.step(step, metrics(step))
        [going] = [row for row in listed.rows() if row["name"] == "goes-on"]
        assert (going["step"], going["accuracy"]) == (9, None)
    [done] = [row for row in listed.rows() if row["name"] == "done"]
    assert (done["state"], done["step"], done["steps"]) == ("finished", 3, 3)
    assert 0 <= done["age_s"] < 60


def test_a_damaged_run_is_listed(tmp_path: Path) -> None:
    write_viewed_run(tmp_path / "run", recorded=0)
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"\xff{}\n{\n")
    (tmp_path / "run" / "config.json").write_text("[")
    [row] = RunList([tmp_path]).rows()
    assert (row["step"], row["steps"], row["recipe"]) == (0, None, "")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "run" / "metrics.jsonl")
    assert RunList([tmp_path]).rows() == []


def test_only_a_run_of_the_list_is_opened(tmp_path: Path) -> None:
    write_viewed_run(tmp_path / "runs" / "a", recorded=0)
    write_viewed_run(tmp_path / "b", recorded=0)
    asked = Questions([RunFiles(tmp_path / "runs" / "a")], below=[tmp_path / "runs"])
    with pytest.raises(NotThere):
        asked.answer("open", {"path": str(tmp_path / "b")})
    write_viewed_run(tmp_path / "runs" / "later", recorded=0)
    path = str(tmp_path / "runs" / "later")
    assert asked.answer("open", {"path": path}) == asked.answer("open", {"path": path}) == {"number": 1}
    assert [run["name"] for run in asked.answer("runs", {})["runs"]] == ["a", "later"]
    numbers = {row["name"]: row["number"] for row in asked.answer("run-list", {})["runs"]}
    assert numbers == {"a": 0, "later": 1}


async def test_a_folder_without_runs_is_waited_for_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = threading.Timer(0.3, write_viewed_run, [tmp_path / "runs" / "first"], {"recorded": 0})
    later.start()
    asked = await opened([tmp_path / "runs"], follow=False)
    later.join()
    assert [run.name for run in asked.runs] == ["first"]
    assert capsys.readouterr().out.count("waiting for one") == 1
    assert asked.answer("runs", {})["listed"]
    named = await opened([tmp_path / "runs" / "first"], follow=False)
    assert not named.answer("runs", {})["listed"]


async def test_a_run_that_is_waited_for_by_its_name_is_no_list(tmp_path: Path) -> None:
    later = threading.Timer(0.3, write_viewed_run, [tmp_path / "mine"], {"recorded": 0})
    later.start()
    asked = await opened([tmp_path / "mine"], follow=False)
    later.join()
    assert [run.name for run in asked.runs] == ["mine"]
    assert not asked.answer("runs", {})["listed"]


async def test_a_run_that_is_named_stands_beside_one_that_is_not_there_yet(tmp_path: Path) -> None:
    write_viewed_run(tmp_path / "a", recorded=0)
    asked = await opened([tmp_path / "a", tmp_path / "b"], follow=False)
    assert [run.name for run in asked.runs] == ["a"]
    write_viewed_run(tmp_path / "b", recorded=0)
    assert {row["name"] for row in asked.answer("run-list", {})["runs"]} == {"a", "b"}


async def test_the_newest_run_that_can_be_read_is_opened_and_the_damaged_one_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, at in (("good", 1e9), ("torn", 2e9)):
        write_viewed_run(tmp_path / name, recorded=0)
        written_at(tmp_path / name, at)
    whole = (tmp_path / "torn" / "config.json").read_text()
    (tmp_path / "torn" / "config.json").write_text(whole[:20])
    asked = await opened([tmp_path], follow=False)
    assert [run.name for run in asked.runs] == ["good"]
    assert f"left out: {tmp_path / 'torn' / 'config.json'}" in capsys.readouterr().out
    faults = {row["name"]: row["fault"] for row in asked.answer("run-list", {})["runs"]}
    assert faults["good"] == ""
    assert "config.json cannot be read" in faults["torn"]
    (tmp_path / "torn" / "config.json").write_text(whole)
    assert all(row["fault"] == "" for row in asked.answer("run-list", {})["runs"])


async def test_a_place_without_runs_says_what_is_there_and_how_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_viewed_run(tmp_path / "only", recorded=0)
    (tmp_path / "only" / "config.json").write_text("{")
    (tmp_path / "empty").mkdir()
    places = [tmp_path / "later", tmp_path / "none" / "a", tmp_path / "empty"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(opened([*places, tmp_path], follow=False), 0.2)
    told = capsys.readouterr().out
    assert f"{places[0]} is not there yet" in told
    assert f"{places[1]} is not there, nor is {tmp_path / 'none'}" in told
    assert f"no run that can be read in {places[2]} (a folder with config.json and metrics.jsonl)" in told
    assert told.count("left out") == 1
    assert "Ctrl-C ends it" in told


def test_a_run_that_is_not_there_is_no_folder_of_runs(tmp_path: Path) -> None:
    write_viewed_run(tmp_path / "a", recorded=0)
    (tmp_path / "list").mkdir()
    asked = Questions([RunFiles(tmp_path / "a")], below=[tmp_path / "list", tmp_path / "b"])
    assert asked.title == f"a, the runs in {tmp_path / 'list'}, {tmp_path / 'b'} once it is there"
    assert Questions([RunFiles(tmp_path / "a")], below=[tmp_path]).title == f"the runs in {tmp_path}"
