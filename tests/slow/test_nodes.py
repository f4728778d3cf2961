"""A quick start over several processes or hosts ends as on one machine, whoever is killed or cut off: real engines.

ROCSTAR_KILLS=50 makes it a campaign of that many kills at random moments (about 15 s each):

    ROCSTAR_KILLS=50 python -m pytest tests/slow/test_nodes.py -q -s -k random

Network namespaces stand for hosts: an own network and an own /dev/shm, so that weights and checkpoint go over TCP.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox import keys
from tests.support.runs import Run, command, numbers

# Steps of some seconds, to be in the middle of one.
FIELDS = [
    "eval_problems=8",
    "prompts_per_step=8",
    "group_size=4",
    "steps=4",
    "eval_every=4",
    "checkpoint_every=2",
    "replicas=1",
    "slots=2",
]

KILLS = int(os.environ.get("ROCSTAR_KILLS", "0"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    runs = tmp_path_factory.mktemp("undisturbed")
    run = Run(command(runs, *FIELDS))
    assert run.end() == 0, run.text()
    return numbers(runs / "quickstart")


class Cluster:
    """A lead and nodes. on: the words before a command that is run on a host."""

    def __init__(self, folder: Path, started: list[Run], listen: str, on: Callable[[str], list[str]]) -> None:
        self.folder, self._started, self._on = folder, started, on
        self._listen, self._port = listen, listen.rpartition(":")[2]
        keys.make(folder / "keys")
        self._node_keys = folder / "node-keys"
        self._node_keys.mkdir()
        for name in ("host.key", "node.pub"):
            shutil.copy(folder / "keys" / name, self._node_keys)

    def lead(self) -> Run:
        nodes = [f"nodes={self._listen}", f"nodes_keys={self.folder / 'keys'}", "nodes_only=true"]
        return self._start([*self._on("lead"), *command(self.folder / "runs", *FIELDS, *nodes)])

    def node(self, name: str, lead: str = "127.0.0.1") -> Run:
        where = ["--lead", f"tcp://{lead}:{self._port}", "--keys", str(self._node_keys), "--name", name]
        return self._start([*self._on(name), sys.executable, "-u", "-m", "engine.nodes", *where])

    def _start(self, words: list[str]) -> Run:
        run = Run(words)
        self._started.append(run)
        return run

    def until_under_way(self, step: int, size_bytes: int = 1000) -> None:
        """Some records of a step (from 0) are in the lead's journal."""
        path = self.folder / "runs" / "quickstart" / "journal" / f"step-{step:06d}"
        deadline = time.monotonic() + 90
        while not (path.exists() and path.stat().st_size > size_bytes):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def numbers(self) -> list[dict[str, float]]:
        return numbers(self.folder / "runs" / "quickstart")

    @property
    def notes(self) -> str:
        return (self.folder / "runs" / "quickstart" / "notes.log").read_text()


@pytest.fixture
def here(tmp_path: Path, started: list[Run]) -> Cluster:
    return Cluster(tmp_path, started, f"tcp://127.0.0.1:{free_port()}", lambda host: [])


def ends_well(*runs: Run) -> None:
    for run in runs:
        assert run.end() == 0, run.text()
        assert run.left() == []


@pytest.mark.timeout(500)
def test_a_node_that_is_killed_changes_no_number(here: Cluster, wanted: list[dict[str, float]]) -> None:
    lead = here.lead()
    lead.until("rollout nodes may join")
    one, two = here.node("one"), here.node("two")
    one.until("joined the run")
    two.until("joined the run")
    here.until_under_way(1)
    one.process.kill()
    three = here.node("three")  # nodes join while the run goes on
    ends_well(lead, two, three)
    assert one.end() == -9
    assert one.left() == []
    assert "node one was silent" in here.notes
    assert here.numbers == wanted


@pytest.mark.timeout(500)
def test_a_lead_that_is_killed_and_started_again_finds_its_nodes(here: Cluster, wanted: list[dict[str, float]]) -> None:
    lead = here.lead()
    lead.until("rollout nodes may join")
    one = here.node("one")
    one.until("joined the run")
    here.until_under_way(3)
    lead.process.kill()
    lead.end()
    again = here.lead()
    ends_well(again, one)
    assert "resuming" in again.text()
    assert here.numbers == wanted


@pytest.mark.timeout(500)
def test_a_node_that_is_interrupted_leaves_and_the_run_goes_on(here: Cluster, wanted: list[dict[str, float]]) -> None:
    lead = here.lead()
    lead.until("rollout nodes may join")
    one, two = here.node("one"), here.node("two")
    one.until("joined the run")
    two.until("joined the run")
    here.until_under_way(1)
    one.process.send_signal(signal.SIGINT)
    assert one.end() == 130, one.text()
    assert one.left() == []
    ends_well(lead, two)
    assert here.numbers == wanted


@pytest.mark.skipif(not KILLS, reason="a campaign: ROCSTAR_KILLS=50")
@pytest.mark.timeout(60 * KILLS + 300)
def test_random_kills_of_nodes_and_lead_change_no_number(here: Cluster, wanted: list[dict[str, float]]) -> None:
    """In as many runs as the kills take."""
    rng = random.Random(0)
    kills = 0
    while kills < KILLS:
        shutil.rmtree(here.folder / "runs", ignore_errors=True)
        lead = here.lead()
        nodes = [here.node("one"), here.node("two")]
        while lead.process.poll() is None and kills < KILLS:
            time.sleep(rng.uniform(1, 12))
            if lead.process.poll() is not None:
                break
            kills += 1
            victim = rng.choice(["lead", "one", "two"])
            print(f"kill {kills}: {victim}", flush=True)
            if victim == "lead":
                lead.process.kill()
                lead.end()
                lead = here.lead()
            else:
                number = ["one", "two"].index(victim)
                nodes[number].process.kill()
                nodes[number].end()
                nodes[number] = here.node(victim)
        ends_well(lead)
        for node in nodes:  # one that was started last may have found no lead any more
            node.process.kill()
            node.end()
        assert here.numbers == wanted


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Network namespaces: of the lead, and of two nodes with a cable each to it."""
    names = [f"rocstar-{os.getpid()}-{name}" for name in ("lead", "one", "two")]
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("network namespaces need root, ip and nsenter")
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for number, name in enumerate(names[1:]):
            ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", f"down{number}", "netns", names[0])
            for namespace, device, last in ((names[0], f"down{number}", 1), (name, "cable", 2)):
                ip("-n", namespace, "address", "add", f"10.77.{number}.{last}/24", "dev", device)
                ip("-n", namespace, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.mark.timeout(500)
def test_on_three_hosts_cables_that_are_pulled_for_a_while_change_no_number(
    hosts: list[str], tmp_path: Path, started: list[Run], wanted: list[dict[str, float]]
) -> None:
    own_memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]

    def on(host: str) -> list[str]:
        namespace = next(name for name in hosts if name.endswith(host))
        return ["nsenter", f"--net=/run/netns/{namespace}", *own_memory]

    cluster = Cluster(tmp_path, started, "tcp://0.0.0.0:5700", on)
    lead = cluster.lead()
    lead.until("rollout nodes may join")
    one, two = cluster.node("one", "10.77.0.1"), cluster.node("two", "10.77.1.1")
    one.until("joined the run")
    two.until("joined the run")
    cluster.until_under_way(1)
    for cable in ("down0", "down1"):  # else the other node may have made all that is left
        ip("-n", hosts[0], "link", "set", cable, "down")
    lead.until("was silent")
    lead.until("was silent")
    for cable in ("down0", "down1"):
        ip("-n", hosts[0], "link", "set", cable, "up")
    ends_well(lead, one, two)
    assert cluster.numbers == wanted
