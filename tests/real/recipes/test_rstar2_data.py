"""The preparation of data as a user starts it: stopped and gone on with, and without a network."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from pyarrow import parquet

from recipes.rstar2.parts.preparation.demonstrations import gsm8k_demonstration
from recipes.rstar2.parts.preparation.rows import Place
from recipes.rstar2.parts.sampling.protocol import PROTOCOLS
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


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["report", "release"])
async def test_the_replies_in_demonstrations_are_those_of_the_tool(box, name):
    row = {"question": "Half of 48, and 48 more?", "answer": "<<48/2=24>>24 <<48+24=72>>72\n#### 72"}
    tool = PROTOCOLS[name].tool(box, stateful=False)
    compared = set()
    for number in range(40):
        place = Place(id=f"gsm-{number}", index=number, protocol=name, broken_calls=0.8)
        messages = gsm8k_demonstration(row, place).messages
        for turn, reply in itertools.pairwise(messages):
            if turn.get("tool_calls"):  # a malformed call has none, and reaches no tool
                arguments = json.loads(turn["tool_calls"][0]["function"]["arguments"])
                answered = (await tool(arguments)).text
                assert _without_time(reply["content"]) == _without_time(answered)
                compared.add(_without_time(answered))
    assert len(compared) == 5  # one that works, an open bracket, three names


def _without_time(reply):
    return re.sub(r"time: \d+\.\d\ds", "time", reply)
