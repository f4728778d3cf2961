"""Six nodes come and go as a cluster likes, and a quick start ends as on one machine: real engines, for ten minutes.

tests/slow/test_nodes.py has the short tests; this is a part of `make campaigns`:

    ROCSTAR_ELASTIC_S=600 python -m pytest tests/slow/test_elastic_nodes.py -m campaign -s
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.slow.test_nodes import FIELDS, Cluster, ends_well, free_port
from tests.support.runs import Run, command, numbers

ELASTIC_S = float(os.environ.get("ROCSTAR_ELASTIC_S", "600"))
NAMES = ("one", "two", "three", "four", "five", "six")
AT_ONCE = 4  # nodes that are there at most: each is an engine, and tests run on two cores
STEPS = 12


def alone(runs: Path, *fields: str) -> list[dict[str, float]]:
    """Returns the numbers of a run without nodes."""
    run = Run(command(runs, *FIELDS, *fields))
    assert run.end(300) == 0, run.text()
    return numbers(runs / "quickstart")


@pytest.mark.campaign
@pytest.mark.timeout(ELASTIC_S + 900)
def test_six_nodes_that_come_and_go_change_no_number(tmp_path: Path, started: list[Run]) -> None:
    """There are as many runs as the time allows, each from its start to its end."""
    wanted = alone(tmp_path / "alone", f"steps={STEPS}")
    rng = random.Random(0)
    begun, happenings, exits = time.monotonic(), {"comes": 0, "SIGTERM": 0, "SIGKILL": 0}, set()
    while time.monotonic() - begun < ELASTIC_S:
        here = Cluster(tmp_path, started, f"tcp://127.0.0.1:{free_port()}", lambda host: [])
        lead, there = here.lead(f"steps={STEPS}"), dict[str, Run]()
        while lead.process.poll() is None:
            time.sleep(rng.uniform(2, 8))
            away = [name for name in NAMES if name not in there]
            if len(there) < AT_ONCE and (not there or rng.random() < 0.6):
                name = rng.choice(away)
                there[name] = here.node(name)
                happenings["comes"] += 1
            else:
                name = rng.choice(sorted(there))
                how = rng.choice([signal.SIGTERM, signal.SIGKILL])
                there[name].process.send_signal(how)
                code = there.pop(name).end()
                exits.add((how.name, code))
                happenings[how.name] += 1
            print(f"{time.monotonic() - begun:4.0f} s: {name}, {sorted(there)} are there", flush=True)
        ends_well(lead)
        for node in there.values():
            node.process.send_signal(signal.SIGTERM)  # one that came last may have found no lead any more
            assert node.end() in (0, -signal.SIGTERM), node.text()  # Python itself had not yet begun
            assert node.left() == []
        assert here.numbers == wanted
        print(f"a run of {STEPS} steps ended with the same numbers; so far {happenings}", flush=True)
        shutil.rmtree(tmp_path / "runs")
        shutil.rmtree(tmp_path / "keys")
        shutil.rmtree(tmp_path / "node-keys")
    assert exits == {("SIGTERM", 0), ("SIGKILL", -9)}
    assert min(happenings.values()) > 0
