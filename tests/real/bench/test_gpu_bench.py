"""The bench of one GPU: a part that fails costs its row, and the cheap parts run here."""

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench.__main__ import BENCHES
from bench.benches.gpu import gpu
from bench.benches.gpu.parts import Part, parts
from engine.console.options import parse
from recipes.quickstart import Config
from tests.support.paths import ROOT


def part(code, **options):
    words = ("-c", code, "FILE")
    given = {
        "name": "p",
        "full": words,
        "rehearsal": words,
        "limit_s": 30.0,
        "read": lambda found: {"remark": found["said"]},
    }
    return Part(**{**given, **options})


WRITES = "import json, sys; json.dump({'said': 'well'}, open(sys.argv[1], 'w'))"


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("print('this is why'); raise SystemExit(3)", 30.0, "exit code 3, this is why"),
        ("import time; time.sleep(60)", 0.5, "not done after 0 s"),
        ("pass", 30.0, "its result cannot be read: FileNotFoundError"),
        (WRITES.replace("said", "other"), 30.0, "its result cannot be read: KeyError"),
    ],
)
def test_a_part_that_fails_says_why_in_its_row_and_leaves_no_result(tmp_path, code, limit_s, said):
    row = gpu.run(part(code), tmp_path / "p.json", limit_s=limit_s, rehearse=True)
    assert row.failed.startswith(said)
    assert row.cells()[-1] == f"failed: {row.failed}"
    assert not (tmp_path / "p.json").exists()


def test_a_part_that_has_a_result_is_passed_over_and_none_begins_that_cannot_end(tmp_path):
    options = SimpleNamespace(into=tmp_path, minutes=1.0, again=False, rehearse=False)
    rows = []
    gpu.measure(options, [part(WRITES), part(WRITES, name="q", limit_s=61.0)], rows)
    assert [(row.part, row.cells()[-1]) for row in rows] == [("p", "well")]
    gpu.measure(options, [part("raise SystemExit(1)")], rows)
    assert [row.failed for row in rows] == ["", ""]
    options.again = True
    gpu.measure(options, [part("raise SystemExit(1)")], rows)
    assert rows[-1].failed


def test_parts_are_told_by_their_beginnings(capsys):
    assert {one.name for one in gpu.arguments(["--parts", "sleep,weights"]).wanted} == {
        "sleep",
        "weights_shm",
        "weights_adapter",
    }
    assert len({one.name for one in parts()}) == len(parts())
    with pytest.raises(SystemExit):
        gpu.arguments(["--parts", "dance"])
    assert "'dance' names none of doctor, quickstart" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_the_cheap_parts_are_rehearsed_to_the_last_line(tmp_path):
    words = ["-m", "bench", "gpu", "--rehearse", "--parts", "doctor,attention,learner_qwen3-1.7b_4k_lora"]
    command = [sys.executable, *words, "--into", str(tmp_path / "results")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert [found["failed"] for found in metrics.values()] == ["", "", ""]
    assert "largest difference" in metrics["attention"]["remark"]
    assert metrics["learner_qwen3-1.7b_4k_lora"]["training_tgs"] > 0


def test_what_a_part_asks_of_a_gpu_is_understood_where_there_is_none():
    """So that the first minute on a GPU is not spent on a wrong word."""
    understood = 0
    for one in parts():
        words = list(one.full)
        if words[1] == "bench":
            name, given = words[2], words[3 : words.index("--json")]
            given = ["cpu" if word == "cuda" else word for word in given]  # it looks whether there is one
            importlib.import_module(BENCHES[name]).arguments(given)
            understood += 1
        elif words[2] == "quickstart":
            given = words[3 : words.index("--into")]
            assert parse(Config, given).training().devices.shared
            understood += 1
    assert understood == len(parts()) - 3, "doctor, attention and sleep have the words that they are rehearsed with"
