"""A quick start over several processes or hosts ends as on one machine, whoever is killed or cut off: real engines.

`make campaigns` adds kills and cuts at random moments (about 15 s each):

    ROCSTAR_KILLS=50 python -m pytest tests/slow/test_nodes.py -m campaign -s

Network namespaces stand for hosts: an own network and an own /dev/shm, so that weights and checkpoint go over TCP.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bench.benches.nodes.network import address, network
from engine.run.workspace import workspace
from sandbox import keys
from tests.support.paths import ROCSTAR, ROOT, TINY
from tests.support.runs import Run, command, numbers

# Steps of some seconds, to be in the middle of one.
FIELDS = [
    "eval_problems=8",
    "prompts_per_step=8",
    "group_size=4",
    "steps=3",
    "eval_every=3",
    "checkpoint_every=2",
    "replicas=1",
    "slots=2",
]

QUICKSTART, DISTILL = (ROOT / "recipes" / f"{name}.py" for name in ("quickstart", "distill"))
NODES = ("one", "two")
OWN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
KILLS = int(os.environ.get("ROCSTAR_KILLS", "8"))


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

    hosts: Hosts

    def __init__(self, folder: Path, started: list[Run], listen: str, on: Callable[[str], list[str]]) -> None:
        self.folder, self._started, self._on = folder, started, on
        self._listen, self._port = listen, listen.rpartition(":")[2]
        keys.make(folder / "keys")
        self._node_keys = folder / "node-keys"
        self._node_keys.mkdir()
        for name in ("host.key", "node.pub"):
            shutil.copy(folder / "keys" / name, self._node_keys)

    def lead(self, *fields: str, recipe: Path = QUICKSTART) -> Run:
        nodes = [f"nodes={self._listen}", f"nodes_keys={self.folder / 'keys'}", "nodes_only=true"]
        words = command(self.folder / "runs", *FIELDS, *nodes, *fields, recipe=recipe)
        return self._start([*self._on("lead"), *words])

    def node(self, name: str, lead: str = "127.0.0.1", more: Sequence[str] = ()) -> Run:
        where = [f"lead=tcp://{lead}:{self._port}", f"keys={self._node_keys}", f"name={name}"]
        return self._start([*self._on(name), *ROCSTAR, "node", *where, *more])

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
def test_a_node_scores_its_groups_with_a_teacher_of_its_own(here: Cluster, started: list[Run], tmp_path: Path) -> None:
    alone = Run(command(tmp_path / "alone", *FIELDS, f"teacher={TINY}", recipe=DISTILL))
    started.append(alone)
    ends_well(alone)
    lead = here.lead(f"teacher={TINY}", recipe=DISTILL)
    lead.until("rollout nodes may join")
    one = here.node("one")
    one.until("joined the run")
    ends_well(lead, one)
    assert numbers(here.folder / "runs" / "distill") == numbers(tmp_path / "alone" / "distill")


@pytest.mark.timeout(500)
def test_a_node_and_a_replica_of_another_node_that_are_killed_change_no_number(
    here: Cluster, wanted: list[dict[str, float]]
) -> None:
    """All groups that are left are made by the replica that replaces the killed one."""
    lead = here.lead()
    lead.until("rollout nodes may join")
    one, two = here.node("one"), here.node("two")
    one.until("joined the run")
    two.until("joined the run")
    here.until_under_way(1)
    one.process.kill()
    [replica] = [child for child in two.seen.values() if "EngineCor" in child.name()]
    replica.kill()
    ends_well(lead, two)
    assert one.end() == -9
    assert one.left() == []
    assert "node one was silent" in here.notes
    assert here.numbers == wanted


@pytest.mark.timeout(500)
def test_a_node_that_is_drained_and_one_that_is_interrupted_leave_at_once_and_change_no_number(
    here: Cluster, wanted: list[dict[str, float]]
) -> None:
    """A third node, which joins while the run goes on, takes their place."""
    lead = here.lead()
    lead.until("rollout nodes may join")
    ready = here.folder / "ready"
    one, two = here.node("one", more=[f"ready_file={ready}"]), here.node("two")
    one.until("joined the run")
    two.until("joined the run")
    assert ready.exists()
    here.until_under_way(1)
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 0, one.text()
    assert not ready.exists()
    assert "has left" in one.text()
    two.process.send_signal(signal.SIGINT)
    assert two.end() == 130, two.text()
    assert one.left() == two.left() == []
    ends_well(lead, here.node("three"))
    assert "node one leaves" in here.notes
    assert "node two leaves" in here.notes
    assert "was silent" not in here.notes
    assert here.numbers == wanted


@pytest.mark.timeout(500)
def test_a_lead_that_is_killed_and_started_again_finds_its_nodes(here: Cluster, wanted: list[dict[str, float]]) -> None:
    lead = here.lead()
    lead.until("rollout nodes may join")
    one = here.node("one")
    one.until("joined the run")
    here.until_under_way(2)
    lead.process.kill()
    lead.end()
    again = here.lead()
    ends_well(again, one)
    assert "resuming" in again.text()
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


@pytest.mark.campaign
@pytest.mark.timeout(500)
def test_a_learner_that_is_killed_costs_a_restart_of_the_lead_and_no_number(
    here: Cluster, wanted: list[dict[str, float]]
) -> None:
    lead = here.lead()
    lead.until("rollout nodes may join")
    one = here.node("one")
    one.until("joined the run")
    here.until_under_way(2)
    [learner, *_] = lead.named("algo.learner")
    learner.kill()
    assert lead.end() == 1, lead.text()
    assert lead.left() == []
    again = here.lead()
    ends_well(again, one)
    assert "resuming" in again.text()
    assert here.numbers == wanted


class Hosts:
    """Three hosts that nothing joins but cables: a lead's, and those of nodes "one" and "two". Each has a network,
    /dev/shm and a temporary folder of its own.
    """

    def __init__(self, names: list[str], folder: Path) -> None:
        self._names, self._folder = names, folder

    def on(self, host: str) -> list[str]:
        """The words before a command that is run there."""
        self.temporary(host).mkdir(exist_ok=True)
        own_folder = ["env", f"TMPDIR={self.temporary(host)}"]
        return ["nsenter", f"--net=/run/netns/{self._name(host)}", *OWN_MEMORY, *own_folder]

    def temporary(self, host: str) -> Path:
        return self._folder / f"{host}.tmp"

    def pull_cable(self, node: str) -> None:
        ip("-n", self._names[0], "link", "set", self._cable(node), "down")

    def plug_cable(self, node: str) -> None:
        ip("-n", self._names[0], "link", "set", self._cable(node), "up")

    def cut_half(self, node: str) -> None:
        """What the lead sends does not reach the node; what the node sends reaches the lead."""
        ip("-n", self._names[0], "route", "add", "blackhole", f"{self._address(node)}/32")

    def mend_half(self, node: str) -> None:
        ip("-n", self._names[0], "route", "del", "blackhole", f"{self._address(node)}/32")

    def shape(self, node: str, rate: str) -> None:
        for host, device in (("lead", self._cable(node)), (node, "cable")):
            words = ["tc", "-n", self._name(host), "qdisc", "add", "dev", device, "root", "tbf"]
            subprocess.run([*words, "rate", rate, "burst", "64kb", "latency", "200ms"], check=True)

    def lose(self, node: str, percent: int) -> None:
        """So many of a hundred packets to this node are lost, and as many from it."""
        rules = f"""
            table inet loss {{
                chain in {{ type filter hook input priority 0; numgen random mod 100 < {percent} drop; }}
                chain out {{ type filter hook output priority 0; numgen random mod 100 < {percent} drop; }}
            }}
        """
        subprocess.run(["ip", "netns", "exec", self._name(node), "nft", "-f", "-"], input=rules, text=True, check=True)

    def _name(self, host: str) -> str:
        return next(name for name in self._names if name.endswith(host))

    @staticmethod
    def _cable(node: str) -> str:
        return f"down{NODES.index(node)}"

    @staticmethod
    def _address(node: str) -> str:
        return f"10.77.{NODES.index(node)}.2"


@pytest.fixture
def three(hosts: list[str], tmp_path: Path, started: list[Run]) -> Cluster:
    there = Hosts(hosts, tmp_path)
    cluster = Cluster(tmp_path, started, "tcp://0.0.0.0:5700", there.on)
    cluster.hosts = there
    return cluster


def begin(cluster: Cluster, *fields: str) -> tuple[Run, Run, Run]:
    """A lead and two nodes on hosts of their own, in the middle of the second step."""
    lead = cluster.lead(*fields)
    lead.until("rollout nodes may join")
    one, two = cluster.node("one", "10.77.0.1"), cluster.node("two", "10.77.1.1")
    one.until("joined the run")
    two.until("joined the run")
    cluster.until_under_way(1)
    return lead, one, two


@pytest.mark.timeout(500)
def test_a_node_whose_cable_is_pulled_and_one_that_stands_still_are_fenced_and_come_back(
    three: Cluster, wanted: list[dict[str, float]]
) -> None:
    """Both at once: else the other node may have made all that is left."""
    lead, one, two = begin(three)
    three.hosts.pull_cable("one")
    os.killpg(two.process.pid, signal.SIGSTOP)
    lead.until("was silent")
    lead.until("was silent")
    three.hosts.plug_cable("one")
    os.killpg(two.process.pid, signal.SIGCONT)
    ends_well(lead, one, two)
    assert three.numbers == wanted


@pytest.mark.campaign
@pytest.mark.timeout(500)
def test_where_only_one_direction_is_cut_no_number_changes(three: Cluster, wanted: list[dict[str, float]]) -> None:
    lead, one, two = begin(three)
    for node in NODES:
        three.hosts.cut_half(node)
    one.until("the lead is silent")
    two.until("the lead is silent")
    for node in NODES:
        three.hosts.mend_half(node)
    ends_well(lead, one, two)
    assert three.numbers == wanted


@pytest.mark.campaign
@pytest.mark.timeout(500)
def test_over_slow_cables_that_lose_packets_no_number_changes(three: Cluster, wanted: list[dict[str, float]]) -> None:
    if shutil.which("tc") is None or shutil.which("nft") is None:
        pytest.skip("slow and lossy cables need tc and nft")
    for node in NODES:
        three.hosts.shape(node, "20mbit")
        three.hosts.lose(node, 3)
    ends_well(*begin(three, "nodes_deltas=true"))
    assert three.numbers == wanted, "also where deltas of the weights are pulled"


@pytest.mark.campaign
@pytest.mark.timeout(500)
def test_over_links_with_a_long_round_trip_no_number_changes(
    tmp_path: Path, started: list[Run], wanted: list[dict[str, float]]
) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("emulated links need root, ip and /dev/net/tun")
    with network(["lead", *NODES], rate_bits=1e8, round_trip_s=0.1) as on:
        far = Cluster(tmp_path, started, "tcp://0.0.0.0:5700", lambda host: [*on[host], *OWN_MEMORY])
        lead = far.lead()
        lead.until("rollout nodes may join")
        nodes = [far.node(name, address(0)) for name in NODES]
        ends_well(lead, *nodes)
    assert far.numbers == wanted


@pytest.mark.campaign
@pytest.mark.timeout(60 * KILLS + 300)
def test_random_kills_and_cuts_change_no_number(three: Cluster, wanted: list[dict[str, float]]) -> None:
    """In as many runs as they take; nothing is left on any host."""
    rng = random.Random(0)
    done = 0
    while done < KILLS:
        shutil.rmtree(three.folder / "runs", ignore_errors=True)
        lead = three.lead()
        nodes = {name: three.node(name, f"10.77.{NODES.index(name)}.1") for name in NODES}
        while lead.process.poll() is None and done < KILLS:
            time.sleep(rng.uniform(1, 12))
            if lead.process.poll() is not None:
                break
            done += 1
            fault, node = rng.choice(["kill the lead", "kill", "cut", "cut half", "stop"]), rng.choice(NODES)
            print(f"{done}: {fault} {node}", flush=True)
            match fault:
                case "kill the lead":
                    lead.process.kill()
                    lead.end()
                    lead = three.lead()
                case "kill":
                    nodes[node].process.kill()
                    nodes[node].end()
                    nodes[node] = three.node(node, f"10.77.{NODES.index(node)}.1")
                case "cut":
                    three.hosts.pull_cable(node)
                    time.sleep(rng.uniform(0.5, 12))
                    three.hosts.plug_cable(node)
                case "cut half":
                    three.hosts.cut_half(node)
                    time.sleep(rng.uniform(0.5, 12))
                    three.hosts.mend_half(node)
                case "stop":
                    os.killpg(nodes[node].process.pid, signal.SIGSTOP)
                    time.sleep(rng.uniform(0.5, 12))
                    os.killpg(nodes[node].process.pid, signal.SIGCONT)
        ends_well(lead)
        for run in nodes.values():  # one that was started last may have found no lead any more
            run.process.kill()
            run.end()
            assert run.left() == []
        assert three.numbers == wanted
    for host in ("lead", *NODES):
        with workspace(three.hosts.temporary(host)):  # whoever begins next there sweeps what a killed one left
            pass
        assert list(three.hosts.temporary(host).glob("rocstar-*")) == []
