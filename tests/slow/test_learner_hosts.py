"""The learner's ranks on two hosts that share neither files nor memory train as two ranks of one host: real parts."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.benches.nodes.network import address, network
from sandbox import keys
from tests.support.paths import ROCSTAR
from tests.support.runs import Run, command, numbers

FIELDS = ["eval_problems=8", "prompts_per_step=8", "group_size=4", "steps=4", "eval_every=4", "checkpoint_every=2"]
FIELDS += ["replicas=1", "slots=2"]
AT = f"{address(0)}:29400"


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    runs = tmp_path_factory.mktemp("undisturbed")
    run = Run(command(runs, *FIELDS, "learner_ranks=2"))
    assert run.end(240) == 0, run.text()
    return numbers(runs / "quickstart")


class Hosts:
    def __init__(self, folder: Path, on: dict[str, list[str]], started: list[Run]) -> None:
        self.folder, self._on, self._started = folder, on, started
        keys.make(folder / "keys")
        self._other_keys = folder / "other-keys"
        self._other_keys.mkdir()
        for name in ("host.key", "node.pub"):
            shutil.copy(folder / "keys" / name, self._other_keys)
        (folder / "tmp").mkdir()

    def lead(self, *fields: str) -> Run:
        nodes = ["nodes=tcp://0.0.0.0:5700", f"nodes_keys={self.folder / 'keys'}"]
        learner = ["learner_hosts=2", f"learner_at={AT}"]
        return self._start([*self._words("lead"), *command(self.folder / "runs", *FIELDS, *nodes, *learner, *fields)])

    def other(self) -> Run:
        where = [f"lead=tcp://{address(0)}:5700", f"keys={self._other_keys}", "learner=true"]
        environment = ["env", f"TMPDIR={self.folder / 'tmp'}"]
        return self._start([*self._words("other"), *environment, *ROCSTAR, "node", *where])

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "quickstart"

    def _words(self, host: str) -> list[str]:
        """Its own /dev/shm, and of the other host's files nothing that it may not have: see the test of checkpoints."""
        own_memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
        hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {self.folder}/runs && exec "$@"', "sh"]
        (self.folder / "runs").mkdir(exist_ok=True)
        return [*self._on[host], *own_memory, *(hidden if host == "other" else [])]

    def _start(self, words: list[str]) -> Run:
        run = Run(words)
        self._started.append(run)
        return run


@pytest.fixture
def hosts(tmp_path: Path, started: list[Run]) -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("emulated links need root, ip and /dev/net/tun")
    with network(["lead", "other"], rate_bits=1e9, round_trip_s=0.001) as on:
        yield Hosts(tmp_path, on, started)


@pytest.mark.timeout(500)
def test_replicas_of_the_weights_on_two_hosts_train_as_on_one(hosts: Hosts, wanted: list[dict[str, float]]) -> None:
    lead, other = hosts.lead("learner.sharding=hybrid"), hosts.other()
    assert lead.end(240) == 0, lead.text()
    assert other.end() == 0, other.text()
    assert lead.left() == other.left() == []
    found = numbers(hosts.run_folder)  # the gradient's norm is summed in another order
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    assert found[1]["learner/loss"] == pytest.approx(wanted[1]["learner/loss"], rel=1e-4)
    assert found[1]["learner/grad_norm"] == pytest.approx(wanted[1]["learner/grad_norm"], rel=1e-4)
    assert list((hosts.folder / "tmp").glob("rocstar-*")) == []


@pytest.mark.timeout(500)
def test_ranks_on_two_hosts_train_as_ranks_on_one_also_when_one_was_killed(
    hosts: Hosts, wanted: list[dict[str, float]]
) -> None:
    """A rank that is killed costs a restart from the last checkpoint."""
    lead, other = hosts.lead(), hosts.other()
    lead.until("rollout nodes may join")
    other.until("ranks of the learner meet")
    lead.until("step   3")
    [rank, *_] = [child for child in psutil_children(other) if child.cmdline()[2:3] == ["algo.learner"]]
    rank.send_signal(signal.SIGKILL)
    assert lead.end(240) == 1, lead.text()
    again = hosts.lead()
    assert again.end(240) == 0, again.text()
    assert other.end() == 0, other.text()
    assert "resuming" in again.text()
    assert again.left() == other.left() == []
    assert numbers(hosts.run_folder) == wanted
    assert list((hosts.folder / "tmp").glob("rocstar-*")) == []


def psutil_children(run: Run) -> list:
    import psutil

    return psutil.Process(run.process.pid).children(recursive=True)
