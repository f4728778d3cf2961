"""Where the seconds of a step went, and not those between two steps."""

import pytest

from engine.telemetry.host_meter import STALL_S, HostMeter
from engine.telemetry.idle_clock import CAUSES
from engine.telemetry.step_meter import StepMeter
from engine.telemetry.timeline import Timeline


class Hand:
    """A clock that is set."""

    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


@pytest.fixture
def parts():
    clock = Hand()
    timeline = Timeline(clock)
    for index in (0, 1):
        timeline.idle.replica(index, 0.0)
    return clock, timeline, StepMeter(timeline)


def test_busy_and_idle_seconds_are_those_of_all_replicas_since_the_step_began(parts):
    clock, timeline, meter = parts
    timeline.idle.running(0, 1, 0.0)
    clock.time = 100.0  # an evaluation, say
    meter.begin()
    clock.time = 103.0
    timeline.idle.running(0, -1, 103.0)
    timeline.idle.tools(0, 1, 103.0)
    clock.time = 104.0
    found = meter.read()
    idle = {cause: found[f"idle/{cause}_s"] for cause in CAUSES}
    assert found["replicas/busy_s"] == 3.0
    assert found["replicas/busy_share"] == 3 / 8
    assert idle == dict.fromkeys(CAUSES, 0.0) | {"long_tail": 4.0, "tool_wait": 1.0}
    assert found["tools/starved_s"] == 1.0
    assert found["rollout/tail_s"] == 0.0


def test_few_requests_of_the_step_before_make_no_tail_of_this_one(parts):
    clock, timeline, meter = parts
    timeline.idle.running(0, 16, 0.0)
    timeline.idle.running(0, -15, 0.0)
    clock.time = 5.0
    assert meter.read()["rollout/tail_s"] == 5.0
    meter.begin()
    clock.time = 9.0
    assert meter.read()["rollout/tail_s"] == 0.0


def test_a_replica_that_is_down_counts_with_its_cause(parts):
    clock, timeline, meter = parts
    timeline.idle.down(1, 0.0)
    clock.time = 5.0
    assert meter.read()["idle/down_s"] == 5.0


def test_waits_for_blocks_and_leases_count_though_replicas_are_busy(parts):
    clock, timeline, meter = parts
    timeline.idle.running(0, 1, 0.0)
    timeline.idle.running(1, 1, 0.0)
    with timeline.idle_cause("kv_blocked"):
        clock.time = 2.0
        meter.begin()
        with timeline.idle_cause("kv_blocked"):  # of another trajectory: the same seconds
            clock.time = 3.0
        clock.time = 5.0
        assert meter.read()["kv/blocked_s"] == 3.0, "it goes on"
        clock.time = 6.0
    with timeline.idle_cause("lease"):
        clock.time = 10.0
    found = meter.read()
    assert found["kv/blocked_s"] == 4.0
    assert found["time/lease_wait_s"] == 4.0
    assert found["idle/kv_blocked_s"] == 0.0


def test_a_loop_that_is_held_up_is_measured_and_the_noise_of_a_busy_machine_is_not():
    host = HostMeter()
    host.late(STALL_S / 2)
    host.late(0.5)
    host.late(0.25)
    found = host.read()
    assert found["host/loop_blocked_s"] == 0.75
    assert found["host/loop_lag_max_ms"] == 500.0
    assert host.read()["host/loop_blocked_s"] == 0.0
