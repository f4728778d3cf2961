"""A span of the timeline leads to its trajectory."""

import pytest

from engine.view.answers.owner import owner_of
from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles
from tests.support.recorded_run import START, STEP_S
from tests.support.viewed_runs import write_viewed_run

BEGIN = START + 2 * STEP_S  # of trajectory 0 of each group in step 2


@pytest.mark.parametrize(
    ("what", "start", "end", "sample"),
    [
        ("a turn", BEGIN + 0.02 + 0.01, BEGIN + 0.02 + 0.21, 2),
        ("a turn, rounded by the page", BEGIN + 0.02 + 0.010009, BEGIN + 0.02 + 0.209991, 2),
        ("a request of an agent", BEGIN, BEGIN + 0.25, 0),
        ("the call", BEGIN + 0.15, BEGIN + 0.35, 0),
        ("the wait for both calls", BEGIN + 0.21, BEGIN + 0.3501, 0),
    ],
)
def test_a_span_of_a_trajectory_leads_to_it(tmp_path, what, start, end, sample):
    write_viewed_run(tmp_path / "run", groups=1)
    owner = owner_of(RunFiles(tmp_path / "run"), 1, 3, start, end)
    assert owner == {"step": 2, "group": 0, "sample": sample}, what


def test_a_span_of_nobody_leads_nowhere(tmp_path):
    write_viewed_run(tmp_path / "run", groups=1)
    with pytest.raises(NotThere):
        owner_of(RunFiles(tmp_path / "run"), 1, 3, BEGIN + 0.02, BEGIN + 0.5)
