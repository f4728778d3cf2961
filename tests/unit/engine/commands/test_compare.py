"""`rocstar compare`: a table, and the answer as the last line."""

import json

from engine.commands.compare import main
from tests.support.viewed_runs import write_viewed_run


def test_two_runs_are_compared_and_the_last_line_is_the_answer(tmp_path, capsys):
    for name in ("a", "b"):
        write_viewed_run(tmp_path / name)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["a_s"] == answer["b_s"]


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    write_viewed_run(tmp_path / "a")
    assert main([str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
