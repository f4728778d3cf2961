"""What the learner publishes: files that replicas map, memory that they pull; names, dtypes, and who may read when."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from algo import contracts
from algo.learner.state.publish import Publisher, full_state, named_weights
from algo.weights import layout as layouts
from algo.weights import transport
from algo.weights.layout import Layout
from algo.weights.transport import Gloo, Shm
from engine.atomic_files import atomic_path
from engine.learner.process import LAUNCHER
from tests.contracts.test_contracts import example
from tests.support.algo_node import on_ranks
from tests.support.listeners import Watch
from tests.support.paths import ROOT


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7, bias=False))


SHAPES = {"a": (3, 5), "b": (), "c": (4,), "d": (2, 2, 2)}


def test_bytes_lie_one_after_the_other_and_buckets_cut_between_weights(monkeypatch):
    monkeypatch.setattr(layouts, "BUCKET_BYTES", 20)
    layout = Layout(SHAPES, torch.bfloat16)
    spans = [*layout.spans()]
    assert spans == [("a", 0, 30), ("b", 30, 32), ("c", 32, 40), ("d", 40, 56)]
    assert layout.size_bytes == 56
    assert [[name for name, _, _ in bucket] for bucket in layout.buckets()] == [["a"], ["b", "c", "d"]]
    views = layout.views(torch.zeros(56, dtype=torch.uint8))
    assert {name: tuple(view.shape) for name, view in views.items()} == SHAPES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_file_holds_the_weights_under_their_names_in_the_dtype_asked_for(tmp_path, dtype):
    scorer = Scorer()
    publisher = Publisher(scorer, tmp_path, "shm", dtype)
    for version in range(4):
        with torch.no_grad():
            scorer.model[0].weight.add_(1.0)
        path = publisher.publish(version)
        expected = {name: weight.to(getattr(torch, dtype)) for name, weight in named_weights(scorer)}
        found = load_file(path)
        assert found.keys() == expected.keys() == {"0.weight", "0.bias", "1.weight"}
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["weights-2.safetensors", "weights-3.safetensors"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_any_length_become_whole_a_hundred_times(tmp_path, ranks):
    """With functional collectives, two at a time, one of two ranks mostly died of a corrupt heap before the end."""
    command = on_ranks(ranks, "tests.support.algo_publish", tmp_path, "100" if ranks == 2 else "2")
    subprocess.run(command, cwd=ROOT, timeout=200, check=True)


def test_ranks_of_two_hosts_meet_at_one_address_and_listen_nowhere_else(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        at = f"127.0.0.1:{probe.getsockname()[1]}"
    meeting = ["--hosts=2", f"--at={at}", "--run=run"]
    lead = on_ranks(2, "tests.support.algo_publish", tmp_path, "2")
    lead[len(LAUNCHER) : len(LAUNCHER)] = meeting
    other = [*lead[: len(LAUNCHER)], "--host=other", *lead[len(LAUNCHER) :]]
    with (
        subprocess.Popen(other, cwd=ROOT) as second,
        subprocess.Popen(lead, cwd=ROOT) as first,
        Watch(first.pid, "first") as here,
        Watch(second.pid, "second") as there,
    ):
        assert (first.wait(150), second.wait(150)) == (0, 0)
    assert {each.address for each in here.seen | there.seen} == {"127.0.0.1"}
    assert [each for each in here.seen if str(each.port) == at.rpartition(":")[2]]


def test_a_rank_can_leave_while_gloo_lets_go_of_what_it_gathered(tmp_path):
    """With Python's own end it died of SIGABRT, now and then; here always."""
    command = [sys.executable, "-m", "tests.support.algo_leave", tmp_path / "store"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, timeout=60, check=True)


def test_all_weights_at_once_are_in_the_dtype_asked_for():
    scorer = Scorer()
    expected = {name: weight.bfloat16() for name, weight in named_weights(scorer)}
    found = full_state(scorer, torch.bfloat16)
    assert all(torch.equal(found.pop(name), weight) for name, weight in expected.items())
    assert found == {}


def test_the_constants_that_a_checkpoint_holds_are_kept():
    """Apertus has some in each layer; without them its saved checkpoint said other things."""
    scorer = Scorer()
    scorer.model.register_buffer("eps", torch.tensor(0.25))
    scorer.model.register_buffer("frequencies", torch.ones(3), persistent=False)
    weights = dict(named_weights(scorer))
    found = full_state(scorer, torch.bfloat16)
    assert found.keys() - weights.keys() == {"eps"}
    assert torch.equal(found["eps"], torch.tensor(0.25, dtype=torch.bfloat16))


def test_a_version_that_somebody_links_is_not_overwritten(tmp_path):
    """As an evaluation beside training does."""
    scorer = Scorer()
    publisher = Publisher(scorer, tmp_path, "shm", "float32")
    kept = tmp_path / "kept"
    kept.hardlink_to(publisher.publish(0))
    before = {name: weight.clone() for name, weight in load_file(kept).items()}  # what load_file gives is the file
    for version in range(1, 5):
        with torch.no_grad():
            scorer.model[0].weight.add_(1.0)
        publisher.publish(version)
    assert all(torch.equal(weight, before[name]) for name, weight in load_file(kept).items())


def test_what_is_overwritten_loses_its_name_first_and_gets_another_when_it_is_whole(tmp_path):
    subject = Shm(tmp_path, Layout(SHAPES, torch.float32))
    for version in range(2):
        with subject.writing(version) as views:
            views["a"].fill_(version)
    kept = (tmp_path / "weights-0.safetensors").stat().st_ino
    with subject.writing(2) as views:
        views["a"].fill_(2)
        assert [file.name for file in tmp_path.glob("*.safetensors")] == ["weights-1.safetensors"]
        assert load_file(subject.address(1))["a"].eq(1).all(), "the version that is live"
    assert load_file(subject.address(2))["a"].eq(2).all()
    assert (tmp_path / "weights-2.safetensors").stat().st_ino == kept, "the same memory"


def test_an_adapters_file_is_made_anew_and_tells_its_settings(tmp_path):
    subject = Shm(tmp_path, Layout(SHAPES, torch.float32), peft='{"r": 4}')
    for version in range(3):
        with subject.writing(version) as views:
            views["a"].fill_(version)
        (tmp_path / f"weights-{version}.peft").mkdir()
        if version == 0:
            old = load_file(subject.address(0))["a"]  # what load_file gives is the file
    assert old.eq(0).all()
    assert sorted(found.name for found in tmp_path.glob("*.peft")) == ["weights-1.peft", "weights-2.peft"]
    with safe_open(subject.address(2), "pt") as opened:
        assert opened.metadata()["peft"] == '{"r": 4}'


def test_no_room_is_an_error(tmp_path):
    with pytest.raises(OSError, match=r"large|space"):
        Shm(tmp_path, Layout({"a": (1 << 50,)}, torch.float32)).writing(0).__enter__()


def asked(address, **wanted):
    """What the learner answers a replica that asks: buckets of (name, dtype, shape)."""
    folder = Path(address.removeprefix("gloo://"))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / layouts.SOCKET))
        connection.sendall(json.dumps({"asks": True, "members": 2, **wanted}).encode() + b"\n")
        with connection.makefile("rb") as answer:
            return folder, json.load(answer)


def pull(address, version, reader, take=1):
    """What a replica does, as far as `take` buckets: the bytes it received."""
    folder, buckets = asked(address, group=reader, version=version)
    store = layouts.meeting(folder, reader, 2)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=5)
    group = dist.ProcessGroupGloo(store, 1, 2, options)
    found = []
    for bucket in buckets[:take]:
        found.append(torch.empty(sum(4 * torch.Size(shape).numel() for _, _, shape in bucket), dtype=torch.uint8))
        group.recv([found[-1]], 0, 0).wait()
    if take == len(buckets):
        store.set("done", "")
    return torch.cat(found).view(torch.float32)


def test_pulls_are_whole_versions_and_one_that_breaks_off_holds_nobody_up(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(layouts, "BUCKET_BYTES", 20)
    monkeypatch.setattr(layouts, "PULL_S", 2.0)
    monkeypatch.setattr(transport, "PULL_S", 2.0)
    subject = Gloo(Layout(SHAPES, torch.float32), tmp_path)
    early: list[torch.Tensor] = []
    with subject.writing(1) as views:
        waiting = threading.Thread(target=lambda: early.append(pull(subject.address(1), 1, "early", take=3)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "while weights are written nobody gets any"
        for number, view in enumerate(views.values()):
            view.fill_(number)
    waiting.join()
    expected = torch.tensor([0.0] * 15 + [1] + [2] * 4 + [3] * 8)
    assert torch.equal(early[0], expected)
    pull(subject.address(1), 1, "dies", take=1)
    assert torch.equal(pull(subject.address(1), 1, "late", take=3), expected)
    with pytest.raises((RuntimeError, dist.DistError)):
        pull(subject.address(1), 0, "stale")
    with subject.writing(2) as views:
        views["a"].fill_(5)
    assert pull(subject.address(2), 2, "next", take=3)[0] == 5
    said = capfd.readouterr().err
    assert "'dies'" in said, said
    assert "refused: the current version is 1" in said


def test_transports(tmp_path):
    layout, readers = Layout(SHAPES, torch.float32), itertools.count()

    def pulled(address, version):
        return layout.views(pull(address, version, f"reader-{next(readers)}").view(torch.uint8))

    here = example(layouts.Transport)(layout)
    contracts.check_transport(here, lambda address, version: here.views)
    contracts.check_transport(Shm(tmp_path, layout), lambda address, version: load_file(address))
    contracts.check_transport(Gloo(layout, tmp_path), pulled)
    stale = {name: view.clone() for name, view in here.views.items()}
    with pytest.raises(AssertionError, match="a of version 0 is"):
        contracts.check_transport(here, lambda address, version: stale)


class Hanging(Gloo):
    """The first replica dies while it joins: what joins it waits for good (NCCL does), but here it comes at last."""

    joining, comes, finished = threading.Event(), threading.Event(), threading.Event()
    sent = 0

    @contextmanager
    def _joined(self, store, members):
        self.joining.set()
        self.comes.wait(30)
        yield self._count
        self.finished.set()

    def _count(self, memory):
        self.sent += len(memory)


def test_a_replica_that_never_joins_holds_nobody_up_and_one_that_joins_late_gets_no_other_version(
    monkeypatch, capfd, tmp_path
):
    monkeypatch.setattr(layouts, "PULL_S", 2.0)
    monkeypatch.setattr(transport, "PULL_S", 2.0)
    layout = Layout(SHAPES, torch.float32)
    subject = Hanging(layout, tmp_path)
    with subject.writing(1):
        pass
    asked(subject.address(1), group="dead", version=1)
    assert subject.joining.wait(30)
    with subject.writing(2):
        pass
    subject.comes.set()
    asked(subject.address(2), group="next", version=2)
    assert subject.finished.wait(30)
    assert subject.sent == layout.size_bytes, "to the second one alone"
    for thread in threading.enumerate():
        if thread.name == "pull-1":
            thread.join(30)
    assert "refused: the current version is 2" in capfd.readouterr().err


def test_what_waits_for_a_replica_that_died_is_ended_once(monkeypatch):
    ends, came = [], threading.Event()

    def end():
        ends.append(None)
        came.set()

    with layouts.ended(end) as late:
        assert ends == []
    assert (len(ends), late.is_set()) == (1, False)
    came.clear()
    monkeypatch.setattr(layouts, "PULL_S", 0.01)
    with layouts.ended(end) as late:
        assert came.wait(30), "as NCCL waits until its group is destroyed"
    assert (len(ends), late.is_set()) == (2, True)


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path):
    saved = tmp_path / "saved"
    code = "import os, signal, sys; from pathlib import Path; from engine.atomic_files import atomic_path\n"
    code += "with atomic_path(Path(sys.argv[1])) as new: new.mkdir(); os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code, saved], cwd=ROOT).returncode == -signal.SIGKILL
    assert not saved.exists()
    for text in ("first", "second"):
        with atomic_path(saved) as unfinished:
            unfinished.mkdir()
            (unfinished / "text").write_text(text)
    assert list(tmp_path.iterdir()) == [saved]
    assert (saved / "text").read_text() == "second"
