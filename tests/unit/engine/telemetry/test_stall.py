"""What is done about an event loop that stands still: said once, then the process is ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.telemetry.stall_watch import LOOK_S, SEEN_S, Stall, StallWatch
from tests.unit.engine.telemetry.test_stall_watch import stand_still


@pytest.mark.parametrize(
    ("looks", "actions"),
    [
        ([True] * 5, [None, "say", None, "end", "end"]),
        ([True, False, True, True], [None, None, None, "say"]),  # it moved: the count begins anew
        ([True, True, False, True, True], [None, "say", None, None, "say"]),
        ([False] * 3, [None] * 3),
    ],
)
def test_looks_and_actions(looks, actions):
    stall = Stall(said_s=1.0, silence_s=2.0)
    assert [stall.look(late=late, passed_s=0.5) for late in looks] == actions


def test_a_process_that_was_stopped_for_an_hour_has_not_stood_still():
    stall = Stall(said_s=60.0, silence_s=900.0)
    assert stall.look(late=True, passed_s=3600.0) is None
    assert stall.seconds == SEEN_S


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=60))
def test_it_is_said_once_a_stall_and_the_end_comes_only_after_silence(looks):
    stall, stood, said = Stall(said_s=3.0, silence_s=9.0), 0.0, 0
    for late, passed_s in looks:
        action = stall.look(late=late, passed_s=passed_s)
        stood, said = (stood + min(passed_s, SEEN_S), said + (action == "say")) if late else (0.0, 0)
        assert said <= 1
        assert (action == "end") == (stood >= 9.0)


def test_the_line_is_said_and_the_process_ended():
    lines, ended = [], []
    watch = StallWatch(
        lambda: 0.3, say=lines.append, end=lambda: ended.append(1), said_s=2 * LOOK_S, silence_s=4 * LOOK_S
    )
    with watch:
        stand_still(lambda: ended)
    assert "test_stall_watch.py" in lines[0]
    assert "stand_still" in lines[0]
    assert "Fix: " in lines[0]
