"""Prompts from the Hugging Face hub: a split by its name, from the hub once and later from the cache."""

import json
import os
import subprocess
import sys

import pyarrow as pa
from pyarrow import parquet

from tests.support.fake_hub import REVISION, fake_hub
from tests.support.paths import ROOT

CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.parquet}
  - {split: test, path: main/test.parquet}
- config_name: other
  data_files: other.parquet
---
"""
PROGRAM = """
import json, sys
from engine.data.prompts import read_prompts
for name in sys.argv[1:]:
    try:
        print(json.dumps([prompt.id for prompt in read_prompts(name, seed=0)]))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


def content(path, rows):
    parquet.write_table(pa.Table.from_pylist([{"question": f"q{n}", "answer": n} for n in range(rows)]), path)
    return path.read_bytes()


def asked(names, **variables):
    """The ids of each set, or what is said instead."""
    command = [sys.executable, "-c", PROGRAM, *names]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_split_of_the_hub_is_read_by_its_name_and_without_the_hub_from_the_cache(tmp_path):
    rows = {"main/train": 30, "main/test": 5, "other": 2}
    files = {f"{name}.parquet": content(tmp_path / "a.parquet", count) for name, count in rows.items()}
    cache = {"HF_HOME": str(tmp_path / "hub"), "HF_DATASETS_CACHE": str(tmp_path / "converted")}
    with fake_hub("org/sums", {"README.md": CARD, **files}) as endpoint:
        train, pinned, test, no_config, no_split, nobody = asked(
            [
                "org/sums/main:train",
                f"org/sums@{REVISION}/main:train",
                "org/sums/main:test[:3]",
                "org/sums:train",
                "org/sums/main:dev",
                "org/none:train",
            ],
            HF_ENDPOINT=endpoint,
            **cache,
        )
    assert train == pinned
    assert sorted(train) == sorted(f"sums-{number}" for number in range(30)) != train
    assert sorted(test) == ["sums-0", "sums-1", "sums-2"]
    for message, parts in (
        (no_config, ("org/sums:train", "main", "other")),
        (no_split, ("org/sums/main:dev", "train", "test")),
        (nobody, ("org/none:train", "Fix: ")),
    ):
        assert all(part in message for part in parts), message
    assert asked(["org/sums/main:train"], HF_HUB_OFFLINE="1", **cache) == [train]
