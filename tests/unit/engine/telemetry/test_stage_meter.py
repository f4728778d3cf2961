"""What stages did in one step."""

from dataclasses import replace

from engine.pipeline.pipeline import StageStats
from engine.telemetry.stage_meter import StageMeter

ROW = StageStats(
    name="mine", workers=2, items_in=3, items_out=3, busy_s=1.0, blocked_in_s=2.0, blocked_out_s=0.5, queue=4
)


def test_figures_are_those_since_the_step_began_and_the_queue_is_the_present_one():
    rows = [ROW]
    meter = StageMeter(lambda: rows)
    meter.begin()
    rows[0] = replace(ROW, items_in=10, busy_s=1.5, blocked_in_s=6.0, queue=5)
    rows.append(replace(ROW, name="new"))
    found = meter.read()
    mine = {name: found[f"stage/mine/{name}"] for name in ("busy_s", "blocked_in_s", "blocked_out_s", "items", "queue")}
    assert mine == {"busy_s": 0.5, "blocked_in_s": 4.0, "blocked_out_s": 0.0, "items": 7, "queue": 5}
    assert found["stage/new/items"] == 3


def test_of_a_first_stage_the_items_are_those_that_it_put_out():
    row = replace(ROW, name="admit", items_in=0, items_out=2)
    rows = [row]
    meter = StageMeter(lambda: rows)
    meter.begin()
    rows[0] = replace(row, items_out=18)
    assert meter.read()["stage/admit/items"] == 16
