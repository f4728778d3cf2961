"""The preparation of data as a user starts it: stopped and gone on with, and without a network."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

from pyarrow import parquet

from tests.support.paths import ROOT
from tests.support.runs import Run

COMMAND = [sys.executable, str(ROOT / "recipes" / "rstar2" / "data.py")]


def test_an_interrupted_preparation_goes_on_by_the_same_command(tmp_path, started):
    source = tmp_path / "m.jsonl"
    with source.open("w") as file:
        for number in range(60_000):
            question = f"Ann has {number % 50_000} pens, and as many again. How many?"
            file.write(json.dumps({"input": question, "target": number}) + "\n")
    fields = ["set=mawps", f"source={source}", "train_rows=40000"]
    run = Run([*COMMAND, *fields, f"output={tmp_path / 'cut'}"])
    started.append(run)
    shards = tmp_path / "cut" / ".unfinished"
    while not (shards / "shard-000001.jsonl").exists():
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.01)
            raise AssertionError(run.text())
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end() == 130
    assert "set=mawps" in run.text()
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [".unfinished"]
    done = len(list(shards.glob("shard-*.jsonl")))
    assert 2 <= done < 12

    again = subprocess.run([*COMMAND, *fields, f"output={tmp_path / 'cut'}"], capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    assert f"{done * 5000:,} of 60,000" in again.stdout
    whole = subprocess.run([*COMMAND, *fields, f"output={tmp_path / 'whole'}"], capture_output=True, text=True)
    assert whole.returncode == 0
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("cut", "whole")]
    assert reports[0]["files"] == reports[1]["files"]
    assert reports[0]["dropped"] == {"duplicate": 10_000}
    assert parquet.read_metadata(tmp_path / "cut" / "test.parquet").num_rows == 10_000
    assert not shards.exists()


def test_without_the_hub_a_line_says_what_to_do(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [*COMMAND, "set=gpqa", f"output={tmp_path / 'out'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Idavidrein/gpqa" in done.stderr
    assert "source=" in done.stderr
    assert not (tmp_path / "out").exists()
