"""A step of 512 x 32 trajectories on 64 replicas is a page like any other, and the end of the step is on it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from engine.recording import files
from engine.recording.records import EngineSteps, Segment
from engine.telemetry.idle_clock import Interval
from engine.telemetry.timeline import SpanEvent
from tests.real.engine.view.test_pages import viewed
from tests.support.browser import MISSING, PROGRAM, Page, chromium
from tests.support.recorded_run import START, STEP_S
from tests.support.viewed_runs import write_viewed_run

pytestmark = [pytest.mark.skipif(PROGRAM is None, reason=MISSING), pytest.mark.timeout(180)]
TRAJECTORIES, TURNS, REPLICAS = 512 * 32, 8, 64
IDLE = 100  # stretches of each replica
FRAME_S = 0.05  # CPU of the page's main thread for a frame while one drags or pans
SECONDS, TAIL_S = 600.0, 90.0  # of the step, and of its last trajectory alone
# How many colours the canvas has between two heights and two seconds.
PAINTED = """(([top, bottom, from, to]) => {
    const canvas = document.getElementById("lanes"), scale = devicePixelRatio || 1;
    const x = (second) => Math.round((128 + (second / %f) * (canvas.clientWidth - 128)) * scale);
    const [left, right] = [x(from), x(to)];
    const { data } = canvas.getContext("2d").getImageData(left, top * scale, right - left, (bottom - top) * scale);
    const colours = new Set();
    for (let at = 0; at < data.length; at += 4) colours.add(data.slice(at, at + 3).join());
    return colours.size;
})"""


def a_large_segment(step: int) -> Segment:
    """Every trajectory has TURNS turns but the last, which goes on alone; then the learner, the weights."""
    draw, start = random.Random(0), START + STEP_S * step
    spans = []
    for lane in range(TRAJECTORIES):
        at = start + draw.uniform(0, 20)
        for turn in range(TURNS):
            ends = at + draw.uniform(20, 45)
            spans.append(SpanEvent("trajectories", lane, "generate", at, ends, {"turn": turn}))
            at = ends + draw.uniform(0, 5)
    learnt = start + SECONDS - 60
    spans.append(SpanEvent("trajectories", 0, "generate", learnt - TAIL_S, learnt, {"turn": TURNS}))
    spans.append(SpanEvent("learner", 0, f"step {step}", learnt, learnt + 50, {}))
    spans.append(SpanEvent("weights", 0, "load", learnt + 50, start + SECONDS, {}))
    spans.append(SpanEvent("stages", 2, "judge", learnt - 10, learnt, {}))
    times = [start + (learnt - start) * part / IDLE for part in range(IDLE + 1)]
    idle = [
        Interval(replica, ("busy", "tool_wait")[part % 2], times[part], times[part + 1])
        for replica in range(REPLICAS)
        for part in range(IDLE)
    ]
    steps = [_engine_steps(replica, start, learnt) for replica in range(REPLICAS)]
    return Segment(
        step=step,
        node="",
        start=start,
        end=start + SECONDS,
        spans=tuple(spans),
        idle=tuple(idle),
        engine_steps=tuple(steps),
    )


def _engine_steps(replica: int, start: float, end: float) -> EngineSteps:
    at = np.arange(start, end, 0.05)
    ones = np.ones(len(at), np.int32)
    counts = dict.fromkeys(("used_blocks", "running", "waiting", "preempted", "prefilled", "steps"), ones)
    return EngineSteps(replica=replica, at=at, **counts)


# How many seconds of CPU the page's main thread takes for a frame while this goes on in each of 40.
DRAGGED = """(async () => {
    const canvas = document.getElementById("lanes"), box = canvas.getBoundingClientRect();
    const at = (kind, x) => canvas.dispatchEvent(new PointerEvent(kind, { clientX: x, clientY: box.top + 60 }));
    canvas.setPointerCapture = () => {};
    at("pointerdown", box.left + 300);
    for (let x = 0; x < 40; x++) {
        at("pointermove", box.left + 310 + 5 * x);
        await new Promise(requestAnimationFrame);
    }
    at("pointerup", box.left + 300);
})()"""
PANNED = """(async () => {
    const canvas = document.getElementById("lanes");
    for (let frame = 0; frame < 40; frame++) {
        const key = frame < 2 ? "+" : frame % 2 ? "ArrowLeft" : "ArrowRight";
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
        await new Promise(requestAnimationFrame);
    }
})()"""


async def cpu_of(page: Page, script: str, frames: int = 40) -> float:
    """Seconds of CPU of the page's main thread per frame; what others do on the machine does not count."""

    async def used() -> float:
        metrics = (await page.command("Performance.getMetrics"))["metrics"]
        return next(each["value"] for each in metrics if each["name"] == "TaskDuration")

    before = await used()
    await page.evaluate(script)
    return (await used() - before) / frames


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("large") / "run"
    write_viewed_run(run, steps=3, recorded=3)
    path = files.timeline_path(files.folder_of(run), 3)
    path.unlink()
    files.append_to(path, a_large_segment(3))
    return run


async def test_a_step_of_real_size_shows_its_tail_its_learner_and_its_weights(large_run, tmp_path):
    async with viewed(large_run) as address, chromium(tmp_path) as web:
        page = await web.open(f"{address}#/time?run=0&step=3")
        await page.until("document.getElementById('lanes')?.width > 300")
        height = await page.evaluate("document.getElementById('lanes').clientHeight")
        assert height < 32_000 / 2, "a canvas of 65,535 pixels stays blank"
        text = await page.evaluate("document.querySelector('main').textContent")
        assert "the number is shown that is busy at once" in text
        assert page.complaints == []
        rows = REPLICAS * 7 + 9 + 36
        colours = f"{PAINTED % SECONDS}"
        learnt = SECONDS - 60
        tail = await page.evaluate(f"{colours}([{rows}, {rows + 120}, {learnt - TAIL_S + 5}, {learnt - 5}])")
        assert tail > 1, "one trajectory of 16,384 is seen"
        after = await page.evaluate(f"{colours}([{rows}, {rows + 120}, {learnt + 5}, {SECONDS - 5}])")
        assert after == 1, "nothing samples while the learner works"


async def test_a_closer_look_shows_lanes_again_and_moving_about_is_quick(large_run, tmp_path):
    async with viewed(large_run) as address, chromium(tmp_path) as web:
        page = await web.open("about:blank")
        await page.command("Performance.setTimeDomain", timeDomain="threadTicks")
        await page.command("Performance.enable")
        await page.goto(f"{address}#/time?run=0&step=3")
        await page.until("document.getElementById('lanes')?.width > 300")
        assert await cpu_of(page, DRAGGED) < FRAME_S
        assert await cpu_of(page, PANNED) < FRAME_S
        await page.evaluate("document.querySelector('[data-zoom=all]').click()")
        await page.evaluate("document.querySelector('[data-pick=trajectories] button:last-of-type').click()")
        await page.until(f"document.getElementById('thinned').textContent.includes('longest of {TRAJECTORIES:,}')")
        await page.evaluate("document.querySelector('[data-pick=replicas] button:last-of-type').click()")
        await page.until("document.getElementById('thinned').textContent.includes('8 of 64 replicas')")
        assert page.complaints == []
