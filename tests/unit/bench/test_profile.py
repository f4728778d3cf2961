"""What a profile says: of each stage, and of each process."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.commands.profile import Options, flame_graph, hottest, stages

NODE, REPLICA = 'process 1:"python quickstart.py"', 'process 2:"VLLM::EngineCore"'
STACKS = f"""{NODE};train (/here/recipes/quickstart.py:7);run (/x/lib/python3.11/asyncio/base.py:1) 3
{NODE};train (/here/recipes/quickstart.py:9) 1
{NODE};{REPLICA};build (/here/engine/replica.py:5);step (/x/site-packages/vllm/core.py:8) 6
torn line
"""
ROW = {"busy_s": 1.0, "blocked_in_s": 3.0, "blocked_out_s": 0.0, "items": 8}


def test_each_stage_has_its_time_of_the_whole_run_and_its_longest_queue():
    rows = [
        {"step": 0},
        {"step": 1, "stage/mine/queue": 5, **{f"stage/mine/{name}": value / 4 for name, value in ROW.items()}},
        {"step": 2, "stage/mine/queue": 2, **{f"stage/mine/{name}": value * 3 / 4 for name, value in ROW.items()}},
        {"step": 2, "eval/accuracy": 0.5},
    ]
    [mine] = stages(rows)
    assert mine.row(seconds=4.0) == ["mine", "2.00", "25 %", "75 %", "0 %", "5"]
    assert stages([{"step": 0}]) == []


def test_a_sample_counts_for_the_innermost_line_of_ours_and_for_its_own_process():
    assert hottest(STACKS.splitlines(keepends=True)) == {
        "replica": [("step (/x/site-packages/vllm/core.py:8)", 1.0)],
        "node": [("train (/here/recipes/quickstart.py:7)", 0.75), ("train (/here/recipes/quickstart.py:9)", 0.25)],
    }


def test_the_flame_graph_is_an_image_as_wide_as_its_samples(tmp_path):
    raw, svg = tmp_path / "profile.txt", tmp_path / "profile.svg"
    raw.write_text(STACKS)
    flame_graph(raw, svg)
    root = ElementTree.parse(svg).getroot()
    boxes = root.findall("{*}g")
    widths = {box.find("{*}title").text: float(box.find("{*}rect").get("width")) for box in boxes}
    assert widths[f"{NODE}: 10"] == 1600
    assert widths[f"{REPLICA}: 6"] == 960


def test_names_are_cut_before_they_are_escaped(tmp_path):
    raw, svg = tmp_path / "profile.txt", tmp_path / "profile.svg"
    raw.write_text("process 1:python r.py;<module> (r.py:1);main (r.py:9) 53\nprocess 2:x;f (a.py:2) 947\n")
    flame_graph(raw, svg)
    assert ElementTree.parse(svg).getroot() is not None


def test_a_recipe_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.py"):
        Options(recipe=Path("nowhere.py"))
