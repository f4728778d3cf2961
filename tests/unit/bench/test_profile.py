"""What a profile says: of each stage, and of each process."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.commands.profile import Options, hottest, stages
from bench.drawing.flame_graph import flame_graph
from bench.measuring.stacks import Stack, read, speedscope, working, write_text

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


@pytest.fixture
def stacks(tmp_path):
    raw = tmp_path / "profile.txt"
    raw.write_text(STACKS)
    return read(raw)


def test_a_sample_counts_for_the_innermost_line_of_ours_and_for_its_own_process(stacks):
    assert hottest(stacks) == {
        "replica": [("step (/x/site-packages/vllm/core.py:8)", 1.0)],
        "node": [("train (/here/recipes/quickstart.py:7)", 0.75), ("train (/here/recipes/quickstart.py:9)", 0.25)],
    }


def a_stack(*calls, samples=1):
    return Stack(process=("process 1:python r.py",), calls=calls, samples=samples)


def test_threads_that_wait_are_left_out_and_their_share_is_known():
    waits = a_stack("run (a.py:1)", "Condition.wait (/x/lib/python3.11/threading.py:327)", samples=3)
    works = [
        a_stack("run (a.py:1)"),
        a_stack("Socket.send (/x/zmq/sugar/socket.py:7)"),
        a_stack("select (/x/torch/ops.py:3)"),
    ]
    assert working([waits, *works]) == (works, 0.5)
    others = [
        "wait (/x/threading.py:3)",
        "Poller.poll (/x/zmq/sugar/poll.py:106)",
        "_worker (/x/concurrent/futures/thread.py:9)",
    ]
    assert working([a_stack(call) for call in others]) == ([], 1.0)
    assert working([]) == ([], 0.0)


def test_what_is_written_is_read_back(stacks, tmp_path):
    write_text(stacks, tmp_path / "again.txt")
    assert read(tmp_path / "again.txt") == stacks
    assert read(tmp_path / "nowhere.txt") == []


def test_speedscope_gets_a_profile_for_each_process_and_every_sample(stacks, tmp_path):
    speedscope(stacks, tmp_path / "a.json")
    written = json.loads((tmp_path / "a.json").read_text())
    names = [frame["name"] for frame in written["shared"]["frames"]]
    replica, node = written["profiles"]
    assert replica["name"].startswith("replica")
    assert (replica["endValue"], replica["weights"]) == (6, [6])
    assert [names[index] for index in replica["samples"][0]][-1] == "step (/x/site-packages/vllm/core.py:8)"
    assert node["endValue"] == sum(node["weights"]) == 4
    assert len(node["samples"]) == len(node["weights"])


def test_the_flame_graph_is_an_image_as_wide_as_its_samples(stacks, tmp_path):
    svg = tmp_path / "profile.svg"
    flame_graph(stacks, svg)
    root = ElementTree.parse(svg).getroot()
    boxes = root.findall("{*}g")
    widths = {box.find("{*}title").text: float(box.find("{*}rect").get("width")) for box in boxes}
    assert widths[f"{NODE}: 10"] == 1600
    assert widths[f"{REPLICA}: 6"] == 960


def test_names_are_cut_before_they_are_escaped(tmp_path):
    flame_graph([a_stack("<module> (r.py:1)", samples=53), a_stack("f (a.py:2)", samples=947)], tmp_path / "a.svg")
    assert ElementTree.parse(tmp_path / "a.svg").getroot() is not None


def test_a_recipe_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.py"):
        Options(recipe=Path("nowhere.py"))


def test_options_that_the_profile_sets_itself_are_refused():
    with pytest.raises(ValueError, match="runs"):
        Options(recipe=Path(__file__), fields=("seed=1", "runs=mine"))
