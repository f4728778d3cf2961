"""The GPU kit: what is packed arrives whole, a part that fails costs its row, and the cheap parts run here."""

import importlib
import json
import os
import random
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

from bench.__main__ import BENCHES
from bench.gpu import gpu, pack
from bench.gpu.parts import Part, parts
from engine.console.options import parse
from recipes.quickstart import Config
from tests.support.paths import ROOT


def wheel(folder, name, files):
    path = folder / name
    with zipfile.ZipFile(path, "w") as opened:
        for file, content in files.items():
            opened.writestr(file, content)
    return path


@pytest.fixture
def packed(tmp_path):
    """A checkout of two files and two wheels, in pieces of 300 bytes."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "told.py").write_text("import small\nprint('from the checkout,', small.WORD)\n")
    (sources / "untracked.py").write_text("")
    for words in (["init", "-q"], ["add", "told.py"]):
        subprocess.run(["git", "-C", str(sources), *words], check=True)
    content = random.Random(0).randbytes(1000)
    wheels = [
        wheel(
            tmp_path,
            "small-1-py3-none-any.whl",
            {"small/__init__.py": "WORD = 'and from a wheel'\n", "small/bin/tool": "#!/bin/sh\n"},
        ),
        wheel(tmp_path, "vllm-0.26.0-any.whl", {"vllm/vllm-rs": "left out", "vllm/_C.so": content}),
    ]
    into = tmp_path / "into"
    pack.write(wheels, sources, into, piece_bytes=300)
    return into


def start(folder, *words):
    return subprocess.run(
        [sys.executable, str(folder / "start.py"), *words], capture_output=True, text=True, check=False
    )


def test_what_was_packed_is_unpacked_and_runs(packed):
    manifest = json.loads((packed / "MANIFEST.json").read_text())
    assert len(manifest["pieces"]) > 2
    assert {(packed / piece["name"]).stat().st_size for piece in manifest["pieces"][:-1]} == {300}
    done = start(packed, "told.py")
    assert done.stdout.splitlines()[-1] == "from the checkout, and from a wheel", done.stderr
    assert sorted(file.name for file in (packed / "unpacked/rocstar").iterdir()) == ["told.py"]
    assert [file.name for file in (packed / "unpacked/packages/vllm").iterdir()] == ["_C.so"]
    assert os.access(packed / "unpacked/packages/small/bin/tool", os.X_OK)


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_piece_that_is_not_what_was_packed_is_named_and_nothing_is_unpacked(packed, damage):
    piece = packed / "piece-01"
    if damage == "missing":
        piece.unlink()
    else:
        piece.write_bytes(b"x" + piece.read_bytes()[1:])
    done = start(packed, "told.py")
    assert done.returncode == 1
    assert f"{piece} is {damage}" in done.stderr
    assert not (packed / "unpacked").exists()


def test_a_folder_that_holds_anything_is_not_written_to(packed, tmp_path):
    with pytest.raises(ValueError, match=r"into is not empty"):
        pack.write([], tmp_path, packed)


def test_the_lock_gives_versions_by_any_spelling_of_a_name(tmp_path):
    lock = tmp_path / "lock"
    lock.write_text("# of\nPy_Zmq==27.1.0 ; x\nuvloop==0.22.1 \\\n    --hash=sha256:00\n")
    assert pack.versions(lock) == {"py-zmq": "27.1.0", "uvloop": "0.22.1"}


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
