"""Whether a run moves, and how it ended."""

import pytest

from engine.diagnosis.pace import pace_of

STEPS = [{"step": 0, "eval/accuracy": 0.3}, *({"step": step, "time/step_s": 2.0} for step in range(1, 10))]


@pytest.mark.parametrize(
    ("rows", "age_s", "stalled", "sentence"),
    [
        (STEPS, 5.0, False, ""),
        (STEPS, 59.0, False, ""),  # an evaluation, say
        (STEPS, 61.0, True, "No step for 1 min 1 s; the last 8 took 2.0 s each."),
        (STEPS[:2], 3600.0, True, "No step for 1 h; the last one took 2.0 s."),
        ([{"step": 1, "time/step_s": 900.0}], 5000.0, False, ""),  # 6 times its pace is later
        (STEPS[:1], 100.0, False, "No step yet, 1 min 40 s after its first evaluation."),
        ([], 30.0, False, ""),
        ([], 100.0, False, "No step yet, 1 min 40 s after it began."),
    ],
)
def test_a_run_that_makes_no_step_for_six_times_its_pace_is_stalled(rows, age_s, stalled, sentence):
    pace = pace_of(rows, "running", age_s, None)
    assert (pace.stalled, pace.sentence) == (stalled, sentence)
    assert pace.age_s == age_s


def test_a_run_that_ended_says_where_and_why():
    assert pace_of(STEPS, "stopped", 9e9, "the disk is full").sentence == "The run ended after step 9: the disk is full"
    assert "killed" in pace_of([], "stopped", 0.0, None).sentence
    assert "before its first step" in pace_of([], "stopped", 0.0, None).sentence
    finished = pace_of(STEPS, "finished", 9e9, None)
    assert (finished.stalled, finished.sentence, finished.step_s) == (False, "", 2.0)
