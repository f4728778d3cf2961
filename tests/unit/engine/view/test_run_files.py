"""What the page reads of a run's folder, whole, damaged, and while it grows."""

import pytest

from engine.view.answers.about import about
from engine.view.run_files import NotARun, RunFiles
from tests.support.viewed_runs import metrics, run_under_way, write_viewed_run


def test_rows_that_come_later_are_read_by_the_next_refresh(tmp_path):
    with run_under_way(tmp_path / "run", steps=2) as folder:
        run = RunFiles(tmp_path / "run")
        assert [row["step"] for row in run.rows] == [1, 2]
        folder.step(3, metrics(3))
        run.refresh()
        assert [row["step"] for row in run.rows] == [1, 2, 3]
        assert run.epoch == 1


def test_a_damaged_row_is_left_out_and_named(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b'"reward":0', b'"reward":9') + lines[2])
    run = RunFiles(tmp_path / "run")
    assert [row["step"] for row in run.rows] == [1, 3]
    [problem] = run.problems
    assert "metrics.jsonl" in problem
    assert "line 2" in problem


def test_a_row_without_its_end_is_read_once_it_is_whole(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    run = RunFiles(tmp_path / "run")
    assert [row["step"] for row in run.rows] == [1, 2]
    with path.open("ab") as file:
        file.write(whole[-40:])
    run.refresh()
    assert [row["step"] for row in run.rows] == [1, 2, 3]
    assert run.problems == []


def test_rows_of_a_run_that_was_resumed_from_an_earlier_step_are_read_anew(tmp_path):
    with run_under_way(tmp_path / "run", steps=3) as folder:
        run = RunFiles(tmp_path / "run")
        folder.resume(1)
        folder.step(2, metrics(2) | {"reward": 0.125})
        folder.step(3, metrics(3))
        run.refresh()
        assert [row["step"] for row in run.rows] == [1, 2, 3]
        assert run.rows[1]["reward"] == 0.125
        assert run.epoch == 2


def test_a_run_that_nobody_holds_has_stopped_or_is_finished(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    assert RunFiles(tmp_path / "run").state == "finished"
    (tmp_path / "run" / "summary.json").unlink()
    stopped = RunFiles(tmp_path / "run")
    assert (stopped.state, stopped.ended) == ("stopped", None)
    assert 0 <= stopped.age_s < 60
    (tmp_path / "run" / "ended.txt").write_text("the disk is full\n")
    assert stopped.ended == "the disk is full"


def test_a_folder_that_holds_runs_is_refused_with_their_names(tmp_path):
    write_viewed_run(tmp_path / "runs" / "mine", recorded=0)
    with pytest.raises(NotARun, match="mine"):
        RunFiles(tmp_path / "runs")


def test_what_is_no_folder_and_no_run_is_refused_with_its_path(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(NotARun, match=path.name):
            RunFiles(path)


def test_a_damaged_configuration_is_named(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    (tmp_path / "run" / "config.json").write_text('{"steps": ')
    with pytest.raises(NotARun, match=r"config\.json"):
        RunFiles(tmp_path / "run")


def test_a_damaged_summary_is_named_on_each_page(tmp_path):
    write_viewed_run(tmp_path / "run", recorded=0)
    path = tmp_path / "run" / "summary.json"
    path.write_bytes(path.read_bytes()[:-5])
    run = RunFiles(tmp_path / "run")
    [problem] = run.problems
    assert "summary.json cannot be read" in problem
    answer = about(run)
    assert (answer["summary"], answer["summary_fault"]) == (None, problem)
    path.unlink()
    assert (run.problems, about(run)["summary_fault"]) == ([], None)
