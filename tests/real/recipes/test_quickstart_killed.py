"""A quick start that is killed with -9 goes on when it is started again. tests/slow kills it in more ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import SMALL, Run, command, metrics

FIELDS = [*SMALL, "steps=3", "checkpoint_every=1"]


@pytest.mark.smoke
@pytest.mark.timeout(300)
def test_a_killed_run_is_resumed_where_it_was(started: list[Run], tmp_path: Path) -> None:
    first = Run(command(tmp_path, *FIELDS))
    started.append(first)
    first.until("step   2")
    first.process.kill()
    assert first.end() == -9
    last = Run(command(tmp_path, *FIELDS))
    started.append(last)
    assert last.end() == 0, last.text()
    folder = tmp_path / "quickstart"
    assert f"resuming {folder} at step" in last.text()
    assert "step   1" not in last.text()
    assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3]
    assert first.left() == last.left() == []
