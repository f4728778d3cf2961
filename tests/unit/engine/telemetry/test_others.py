"""What other processes use is measured at a small cost, and a failure to measure it ends no run."""

import asyncio

import pytest

from engine.telemetry import host_meter, others
from engine.telemetry.host_meter import HostMeter
from engine.telemetry.others import COST, LEAST_S, OthersMeter
from tests.support.fakes import Clock, settle


def test_the_more_a_look_costs_the_rarer_it_is(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(others, "sees_all", lambda: True)
    used = iter([{1: (0.0, 0.0)}, {1: (3.0, 0.0)}, {1: (3.0, 0.0)}])

    def look():
        clock.now += 1.0
        return next(used)

    monkeypatch.setattr(others, "beyond_family", look)
    monkeypatch.setattr(others.os, "cpu_count", lambda: 2)
    meter = OthersMeter(clock)
    assert meter.pause_s == LEAST_S
    clock.now += 9.0
    assert meter.share() == pytest.approx(3.0 / 10.0 / 2)
    assert meter.pause_s == pytest.approx(1.0 / COST)
    assert meter.share() == 0.0


def test_where_nothing_can_be_seen_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(others, "sees_all", lambda: False)
    monkeypatch.setattr(others, "_container_s", lambda: None)
    assert OthersMeter().share() is None


async def test_a_failed_look_is_said_and_the_run_goes_on(monkeypatch):
    class Fails:
        pause_s = 0.0

        def share(self):
            raise OSError("no /proc")

    monkeypatch.setattr(host_meter, "OthersMeter", Fails)
    said = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(HostMeter(say=said.set_result).run())
    async with asyncio.timeout(5):
        line = await said
    await settle()
    assert not running.done()
    assert line == "what other processes use of the machine is not measured any more: no /proc"
    running.cancel()
    await asyncio.wait([running])
