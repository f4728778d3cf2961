"""Which steps of an engine the node hears of: each is counted once, and nothing that a policy acts upon comes late."""

from hypothesis import given
from hypothesis import strategies as st

from engine.replica.step_reports import BLOCKS_SHARE, EVERY_S, RUNNING_SHARE, EngineState, StepReports

CALM = EngineState(0.5, 8, 0)


def reported(states, step_s=0.001):
    reports = StepReports()
    return [reports.step(state, step_s * number) for number, state in enumerate(states)]


def test_a_calm_engine_is_heard_of_ten_times_a_second():
    assert reported([CALM] * 9, EVERY_S / 4) == [1, 0, 0, 0, 4, 0, 0, 0, 4]


def test_slow_steps_are_all_reported():
    assert reported([CALM] * 4, EVERY_S) == [1, 1, 1, 1]


def test_every_step_counts_while_requests_wait_and_the_first_in_which_none_does():
    assert reported([CALM, EngineState(0.5, 8, 1), EngineState(0.5, 8, 1), CALM, CALM]) == [1, 1, 1, 1, 0]


def test_a_preemption_is_told_at_once():
    assert reported([CALM, CALM, EngineState(0.5, 8, 0, preempted=1), CALM]) == [1, 0, 2, 0]


def test_an_engine_that_has_nothing_left_to_do_says_so():
    assert reported([CALM, CALM, EngineState(0.5, 0, 0)]) == [1, 0, 2]


def test_a_pause_is_no_time_of_the_steps_before_it():
    reports = StepReports()
    assert [reports.step(CALM, now) for now in (0.0, 0.01, 0.02)] == [1, 0, 0]
    assert reports.step(CALM, 0.03, last=True) == 3
    assert reports.step(CALM, 2.0) == 1, "the step after the pause alone has the gap"


STATES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 512), st.integers(0, 2), st.integers(0, 1)), min_size=1)


@given(STATES, st.floats(0.001, 0.2))
def test_what_the_node_knows_is_near_the_truth_and_no_step_is_lost(states, step_s):
    reports, known, heard = StepReports(), None, 0
    for number, fields in enumerate(states):
        state = EngineState(*fields)
        steps = reports.step(state, step_s * number)
        heard += steps
        if steps:
            known, at = state, number
            assert heard == number + 1
        assert known is not None
        assert (number - at) * step_s < EVERY_S
        assert known.waiting == state.waiting
        assert abs(known.usage - state.usage) <= BLOCKS_SHARE
        assert abs(known.running - state.running) <= RUNNING_SHARE * known.running
        assert steps or not state.preempted
