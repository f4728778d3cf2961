"""Lead and node over real TCP with real keys; the replicas are scripted."""

from __future__ import annotations

import asyncio
import errno
import filecmp
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.atomic_files import CannotWrite
from engine.encoding import frame
from engine.nodes import pulls
from engine.nodes.config import LeadConfig, NodeConfig
from engine.nodes.door import Door
from engine.nodes.lead import Lead
from engine.nodes.messages import (
    CHUNK_BYTES,
    Announce,
    Ask,
    Chunk,
    FileInfo,
    Gone,
    Happened,
    Hello,
    Job,
    NodeBeat,
    Numbered,
    Pull,
    Record,
    ToLead,
    decode_to_node,
    encode,
)
from engine.nodes.node import LeadGone, NodeRefused, RolloutNode, ask, pull_checkpoint
from engine.nodes.pulls import FileServer, PullFailed, fetch
from engine.ports import Reward
from engine.recording.policy import RecordConfig
from engine.recording.reader import RecordedRun
from engine.recording.recording import Recording
from engine.run.journal import Journal
from engine.stages.group import GroupConfig, GroupMaker
from engine.telemetry.timeline import Timeline
from engine.types import UNCOMPARED, PublishedWeights
from sandbox import keys
from sandbox.keys import load_host
from tests.support.fakes import a_prompt
from tests.support.node import ANSWER, END, Setup, call
from tests.support.paths import ROOT
from tests.support.sandbox_processes import until

TURNS = ([call("6 * 7") + END], [ANSWER])
RECIPE = ROOT / "recipes" / "quickstart.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Run:
    """A lead that listens, with a journal in memory and no replicas of its own."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder, self.notes = folder, list[str]()
        self.keys, self.checkpoint = folder / "keys", folder / "checkpoint"
        keys.make(self.keys)
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text("{}")
        (self.checkpoint / "model.safetensors").write_bytes(os.urandom(3 * CHUNK_BYTES + 5))
        self.address = f"tcp://{host}:{free_port()}"
        self.journal = Journal(folder / "journal")
        self._config = config = LeadConfig(
            listen=self.address, keys=self.keys, recipe=RECIPE, options=("steps=3",), nodes_only=True
        )
        self.door = Door(config, checkpoint=self.checkpoint, note=self.notes.append)
        self.lead = self._lead()

    def _lead(self, recording: Recording | None = None) -> Lead:
        return Lead(
            self._config,
            self.door,
            folder=self.folder,
            journal=self.journal,
            group_tokens=100,
            min_version=lambda lease: 0,
            kv_tokens=lambda: (0, 0),
            version=lambda: 0,
            rolling=False,
            timeline=Timeline(),
            note=self.notes.append,
            recording=recording,
        )

    def recorded_by(self, recording: Recording) -> None:
        """Before the lead begins."""
        self.lead = self._lead(recording)

    @property
    def node_keys(self) -> keys.HostKeys:
        return load_host(self.keys)

    def config(self, **fields: object) -> NodeConfig:
        return NodeConfig(**{"lead": self.address, "keys": self.keys, "name": "one", "patience_s": 30.0, **fields})

    def publish(self, version: int, further: Sequence[Sequence[int]] = ()) -> None:
        path = self.folder / f"weights-{version}.safetensors"
        path.write_bytes(os.urandom(2 * CHUNK_BYTES + version))
        canary = np.float32([-1.0, UNCOMPARED, -2.0])
        self.lead.publish(PublishedWeights(str(path), version, canary, further))
        path.unlink()  # the learner writes its file again as soon as it likes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


async def always_right(trajectory: object) -> float:
    return 1.0


async def node_of(
    run: Run, scripted: Setup, *, reward: Reward = always_right, recorded: bool = False, **fields: object
) -> RolloutNode:
    """Returns a node of this run with scripted replicas. fields: those of its NodeConfig that differ."""
    config = run.config(**fields)
    job = await ask(config, run.node_keys, Ask())
    assert isinstance(job, Job)
    maker = GroupMaker(
        rollouts=scripted.rollouts, reward=reward, config=GroupConfig(samples=2), timeline=scripted.timeline
    )
    folder = run.folder / f"node-{len(list(run.folder.glob('node-*')))}"
    folder.mkdir()
    return RolloutNode(
        config,
        run.node_keys,
        build=job.build,
        fleet=scripted.fleet,
        maker=maker,
        folder=folder,
        tokens_sampled=lambda: scripted.rollouts.tokens_sampled,
        note=run.notes.append,
        timeline=scripted.timeline if recorded else None,
    )


@asynccontextmanager
async def a_node(run: Run, scripted: Setup, *, recorded: bool = False, **fields: object) -> AsyncIterator[RolloutNode]:
    node = await node_of(run, scripted, recorded=recorded, **fields)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(node.run())
        yield node
        task.cancel()


async def test_a_node_gets_the_sequences_that_the_learner_added_to_the_canary(run: Run) -> None:
    async with run.door, run.lead, Setup(*TURNS) as scripted:
        run.publish(1, further=[[4, 5, 6], [7, 8]])
        async with a_node(run, scripted):
            await asyncio.wait_for(run.lead.make_group(a_prompt(text="What is 6 * 7?"), 0, 0), 30)
        weights = scripted.fleet.weights
    assert weights is not None
    assert weights.further == [[4, 5, 6], [7, 8]]
    assert weights.canary.tolist() == [-1.0, UNCOMPARED, -2.0]


async def test_a_node_makes_the_group_that_the_lead_asks_for(run: Run) -> None:
    async with run.door, run.lead, Setup(*TURNS) as scripted:
        run.publish(1)
        async with a_node(run, scripted):
            group = await asyncio.wait_for(run.lead.make_group(a_prompt(text="What is 6 * 7?"), 0, 0), 30)
    assert [member.sample for member in group.trajectories] == [0, 1]
    assert [member.reward for member in group.trajectories] == [1.0, 1.0]
    assert all(len(member.turns) == 2 for member in group.trajectories)
    assert group.prompt == a_prompt(text="What is 6 * 7?")
    sizes = [len(member.token_ids_T) for member in group.trajectories]
    assert run.lead.protocol.ledger.expected_tokens == sum(sizes)
    [replica] = scripted.replicas.made
    [(_, version)] = replica.weights
    assert version == 1


async def test_what_happens_on_a_node_is_in_the_runs_record(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.nodes.node.SEGMENT_S", 0.01)
    here = Timeline()
    recording = Recording(run.folder, RecordConfig(), here, step=3, tokenizer=None, note=run.notes.append)
    run.recorded_by(recording)
    async with run.door, run.lead, Setup(*TURNS) as scripted, recording:
        run.publish(1)
        async with a_node(run, scripted, recorded=True):
            await asyncio.wait_for(run.lead.make_group(a_prompt(text="What is 6 * 7?"), 0, 0), 30)
            async with asyncio.timeout(30):
                while not {"trajectories", "reward"} <= tracks_of(run.folder, "one"):  # noqa: ASYNC110  a file
                    await asyncio.sleep(0.01)
    assert recording.nodes == {0: "one"}
    assert tracks_of(run.folder, "") == set()


def tracks_of(folder: Path, node: str) -> set[str]:
    """What the record of step 3 has spans of, on this machine."""
    segments = RecordedRun(folder).timeline(3, 3)
    return {span.track for segment in segments if segment.node == node for span in segment.spans}


async def test_a_new_version_is_on_the_node_whatever_the_learner_does_with_its_file(run: Run) -> None:
    async with run.door, run.lead, Setup(*TURNS) as scripted:
        run.publish(1)
        async with a_node(run, scripted):
            await until(lambda: bool(scripted.replicas.made[0].weights))
            run.publish(2)
            await until(lambda: len(scripted.replicas.made[0].weights) == 2)
            path, version = scripted.replicas.made[0].weights[-1]
            assert version == 2
            assert os.stat(path).st_size == 2 * CHUNK_BYTES + 2
            [member] = run.lead.protocol.nodes
            await until(lambda: member.version == 2)


async def test_where_the_file_cannot_be_seen_its_bytes_are_pulled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = pulls.fetch

    async def fetching(*arguments: object) -> None:
        seen.append(arguments[2])
        await real(*arguments)

    monkeypatch.setattr("engine.nodes.node.fetch", fetching)
    monkeypatch.setattr("engine.nodes.node.os.link", lambda *names: (_ for _ in ()).throw(OSError("another disk")))
    async with run.door, run.lead, Setup(*TURNS) as scripted:
        monkeypatch.setattr("engine.nodes.lead.os.link", shutil.copy)
        run.publish(1)
        async with a_node(run, scripted):
            await until(lambda: bool(scripted.replicas.made[0].weights))
            path, _ = scripted.replicas.made[0].weights[-1]
            assert filecmp.cmp(path, run.folder / "nodes-weights-1.safetensors", shallow=False)
    assert seen == ["weights-1"]


async def test_where_deltas_are_wanted_a_node_pulls_what_has_changed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And all of it where it has no older version, or where the older one is not what it was."""
    pulled = []
    real = pulls.fetch

    async def fetching(*arguments: object) -> None:
        pulled.append(arguments[2])
        await real(*arguments)

    monkeypatch.setattr("engine.nodes.node.fetch", fetching)
    monkeypatch.setattr("engine.nodes.node.os.link", lambda *names: (_ for _ in ()).throw(OSError("another disk")))
    monkeypatch.setattr("engine.nodes.lead.os.link", shutil.copy)
    run.lead._config = replace(run.lead._config, deltas=True)
    content = bytearray(os.urandom(2 * CHUNK_BYTES))
    async with run.door, run.lead, Setup(*TURNS) as scripted, a_node(run, scripted) as node:
        for version in (1, 2, 3):
            content[version] ^= 1
            path = run.folder / f"weights-{version}.safetensors"
            path.write_bytes(content)
            if version == 3:
                assert node._pulled is not None
                node._pulled[1].write_bytes(os.urandom(2 * CHUNK_BYTES))
            run.lead.publish(PublishedWeights(str(path), version, np.zeros(3, np.float32)))
            await until(lambda: len(scripted.replicas.made[0].weights) == version)  # noqa: B023
            found, _ = scripted.replicas.made[0].weights[-1]
            assert Path(found).read_bytes() == content  # noqa: ASYNC240
    assert pulled == ["weights-1", "nodes-delta-2", "nodes-delta-3", "weights-3"]
    assert any("pulled whole" in note for note in run.notes)
    assert [path.name for path in run.folder.iterdir() if "delta" in path.name] == []


async def test_a_delta_that_cannot_be_written_costs_the_whole_and_not_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.nodes.lead.deltas.write", full)
    run.lead._config = replace(run.lead._config, deltas=True)
    async with run.door, run.lead, Setup(*TURNS) as scripted, a_node(run, scripted):
        for version in (1, 2):
            run.publish(version)
            await until(lambda: len(scripted.replicas.made[0].weights) == version)  # noqa: B023
    assert any("weights 2 are announced whole" in note and "No space" in note for note in run.notes)


async def test_a_pull_that_fails_is_tried_again_and_the_node_keeps_the_version_that_it_has(run: Run) -> None:
    async with run.door, run.lead, Setup(*TURNS) as scripted:
        run.publish(1)
        async with a_node(run, scripted):
            await until(lambda: [member.version for member in run.lead.protocol.nodes] == [1])
            lost = FileInfo(name="weights-2", size_bytes=1000)
            run.lead.protocol.announce(Announce(version=2, file=lost, canary=b"", path="", inode=0, at_once=True))
            await until(lambda: sum("weights 2" in note for note in run.notes) > 1)
            [member] = run.lead.protocol.nodes
            assert member.version == 1
            run.publish(3)
            await until(lambda: member.version == 3)
    assert [version for _, version in scripted.replicas.made[0].weights] == [1, 3]


async def test_the_checkpoint_comes_from_the_lead_byte_by_byte(run: Run, tmp_path: Path) -> None:
    async with run.door, run.lead:
        job = await ask(run.config(), run.node_keys, Ask())
        assert isinstance(job, Job)
        assert job.recipe == "recipes/quickstart.py"
        assert job.options == ["steps=3"]
        there = tmp_path / "there"
        there.mkdir()
        await pull_checkpoint(run.config(), run.node_keys, job, there)
    names = sorted(path.name for path in run.checkpoint.iterdir())
    assert sorted(path.name for path in there.iterdir()) == names
    for name in names:
        assert (there / name).read_bytes() == (run.checkpoint / name).read_bytes()


async def test_a_pull_that_fails_leaves_nothing(run: Run, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    size = 3 * CHUNK_BYTES + 5
    wrong = FileInfo(name="model.safetensors", size_bytes=size, sha256="0" * 64)
    long = FileInfo(name="model.safetensors", size_bytes=size + 1)
    async with run.door, run.lead:
        for name, info in (("checkpoint/gone", long), ("checkpoint/model.safetensors", wrong)):
            with pytest.raises(PullFailed, match=name):
                await fetch(run.address, run.node_keys, name, info, there / "file")
        with pytest.raises(PullFailed, match="model"):
            await fetch(run.address, run.node_keys, "checkpoint/model.safetensors", long, there / "file")
    assert list(there.iterdir()) == []


async def test_a_pull_from_a_silent_lead_says_for_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "SILENCE_S", 0.1)
    info = FileInfo(name="weights-1", size_bytes=1)
    with pytest.raises(PullFailed, match=r"weights-1: .*silent for 0\.1 s"):
        await fetch(f"tcp://127.0.0.1:{free_port()}", None, "weights-1", info, tmp_path / "file")


async def test_a_stranger_is_turned_away_and_named(run: Run, tmp_path: Path) -> None:
    """With keys of another run, with old keys, without keys, with another protocol."""
    strange = tmp_path / "strange"
    keys.make(strange)
    (strange / "node.pub").unlink()
    shutil.copy(run.keys / "node.pub", strange)  # it knows the lead, but the lead does not know it
    impatient = run.config(patience_s=1.0)
    async with run.door, run.lead:
        with pytest.raises(LeadGone):
            await ask(impatient, load_host(strange), Ask())
        await until(lambda: any("127.0.0.1" in note for note in run.notes))
        known = run.node_keys
        (run.keys / "host.pub").rename(run.keys / "taken-away.pub")
        count = run.door.refused
        with pytest.raises(LeadGone):
            await ask(impatient, known, Ask())
        await until(lambda: run.door.refused > count)
        (run.keys / "taken-away.pub").rename(run.keys / "host.pub")
        count = len(run.notes)
        with pytest.raises(LeadGone):
            await ask(impatient, None, Ask())
        await until(lambda: len(run.notes) > count)
        with socket.create_connection(("127.0.0.1", int(run.address.rpartition(":")[2]))) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))  # libzmq says nothing of what never shakes hands
        assert run.lead.protocol.nodes == []
        assert isinstance(await ask(run.config(), known, Ask()), Job), "who has the keys is served all the same"


async def test_one_that_comes_again_and_again_leaves_the_notes_to_others(run: Run, tmp_path: Path) -> None:
    other, unknown = tmp_path / "other-lead", tmp_path / "unknown"
    for folder in (other, unknown):
        keys.make(folder)
    (unknown / "node.pub").unlink()
    shutil.copy(run.keys / "node.pub", unknown)
    context = zmq.Context()
    async with run.door, run.lead:
        peers = [context.socket(zmq.DEALER) for _ in range(10)]
        for peer in peers:
            peer.setsockopt(zmq.RECONNECT_IVL, 1)
            trust_of(peer, load_host(other))
            peer.connect(run.address)
        await until(lambda: run.door.refused >= 200)
        assert 0 < len(run.notes) < 10, run.notes
        assert any("(100 times" in note for note in run.notes), run.notes
        with pytest.raises(LeadGone):
            await ask(run.config(patience_s=1.0), load_host(unknown), Ask())
        assert any("127.0.0.1" in note for note in run.notes), "another kind is named"
        for peer in peers:
            peer.close(0)
    context.term()


def trust_of(socket: zmq.Socket[bytes], own: keys.HostKeys) -> None:
    socket.setsockopt(zmq.CURVE_SERVERKEY, own.node_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own.secret))


async def test_a_lead_can_listen_on_ipv6(tmp_path: Path) -> None:
    run = Run(tmp_path, "[::1]")
    async with run.door, run.lead:
        assert isinstance(await ask(run.config(), run.node_keys, Ask()), Job)
        there = tmp_path / "there"
        await fetch(run.address, run.node_keys, "checkpoint/config.json", FileInfo(name="x", size_bytes=2), there)
    assert there.read_text() == "{}"


ANY = st.integers(-(2**63), 2**64 - 1)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["checkpoint/config.json", "checkpoint/none"]), ANY, ANY | st.integers(0, 4))
def test_whatever_part_of_a_file_is_asked_for_there_is_an_answer(name: str, offset: int, size: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"{}")
        file.flush()
        server = FileServer()
        server.offer("checkpoint/config.json", Path(file.name))
        try:
            answer = server.answer(Pull(name=name, offset=offset, size_bytes=size))
            there = name == "checkpoint/config.json" and offset in (0, 1) and 0 < size <= CHUNK_BYTES
            assert isinstance(answer, Chunk if there else Gone)
        finally:
            server.close()


def record(n: int) -> bytes:
    return encode(Record(lease=n, attempt=n, epoch=n, record=b""))


async def test_no_number_in_a_message_ends_the_lead(run: Run) -> None:
    large = (2**63 - 1, 2**64 - 1, -(2**63), -1)
    async with run.door, run.lead:
        session = bytes(16)
        hello = Hello(session=session, name="\x1b[2J", build=run.door.job.build, capacity_tokens=1, replicas=1)
        messages: list[ToLead] = [structs.replace(hello, capacity_tokens=n, replicas=n, kept=[(n, n)]) for n in large]
        messages += [structs.replace(hello, session=bytes([n])) for n in range(3)]
        for n in large:
            messages += [
                Pull(name="checkpoint/config.json", offset=n, size_bytes=1),
                Pull(name="checkpoint/config.json", offset=0, size_bytes=n),
                NodeBeat(session=session, ack=n, version=n, pulled=n, free_tokens=n, tokens=n),
                Happened(session=session, segment=bytes(n & 7)),
                Happened(session=session, segment=frame(zlib.compress(b"\x91" * 100_000))),
                Numbered(session=session, seq=n, ack=n, body=b""),
                Numbered(
                    session=bytes([1]), seq=1, ack=0, body=encode(Record(lease=n, attempt=n, epoch=n, record=b""))
                ),
            ]
        context = zmq.asyncio.Context()
        peer = context.socket(zmq.DEALER)
        trust_of(peer, run.node_keys)
        peer.connect(run.address)
        for message in [*messages, Ask()]:
            await peer.send(encode(message))
        async with asyncio.timeout(30):
            while not isinstance(decode_to_node(await peer.recv()), Job):
                pass
        peer.close(0)
        context.term()


async def test_garbage_from_who_has_the_keys_is_named_and_has_no_effect(run: Run) -> None:
    async with run.door, run.lead, Setup(*TURNS) as scripted:
        context = zmq.Context()
        peer = context.socket(zmq.DEALER)
        trust_of(peer, run.node_keys)
        peer.connect(run.address)
        for garbage in (b"", b"\xc1", os.urandom(1000), b"\x91" * 100_000, encode(["Hello", 1])):
            peer.send(garbage)
        await until(lambda: run.door.refused == 5)
        peer.close(0)
        context.term()
        run.publish(1)
        async with a_node(run, scripted):
            await asyncio.wait_for(run.lead.make_group(a_prompt(text="What is 6 * 7?"), 0, 0), 30)


async def test_a_node_that_is_not_served_says_so(run: Run) -> None:
    with pytest.raises(LeadGone, match=run.address):
        await ask(run.config(patience_s=0.3), run.node_keys, Ask())


async def test_a_lead_of_another_protocol_is_a_refusal(run: Run) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as lead:
        lead.bind(run.address)

        async def answer() -> None:
            address, _ = await lead.recv_multipart()
            await lead.send_multipart([address, b"garbage"])

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer())
            with pytest.raises(NodeRefused, match=run.address):
                await ask(run.config(keys=None), None, Ask())


async def test_a_node_of_another_build_is_refused(run: Run) -> None:
    async with run.door, run.lead, Setup(*TURNS) as scripted:
        job = await ask(run.config(), run.node_keys, Ask())
        assert isinstance(job, Job)
        other = type(job.build)(protocol=job.build.protocol, code="other", versions=job.build.versions)
        node = RolloutNode(
            run.config(),
            run.node_keys,
            build=other,
            fleet=scripted.fleet,
            maker=None,  # type: ignore[arg-type]
            folder=run.folder,
            tokens_sampled=lambda: 0,
            note=run.notes.append,
        )
        with pytest.raises(NodeRefused, match="code"):
            await asyncio.wait_for(node.run(), 20)
        assert any("one" in note and "code" in note for note in run.notes)


def test_a_lead_without_keys_listens_to_this_machine_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nodes_keys"):
        LeadConfig(listen="tcp://0.0.0.0:5700", keys=None, recipe=RECIPE, options=())
    LeadConfig(listen="tcp://127.0.0.1:5700", keys=None, recipe=RECIPE, options=())
    for wrong in ("0.0.0.0:5700", "tcp://0.0.0.0", "tcp://:5700", "ipc:///x:5"):
        with pytest.raises(ValueError, match="tcp://HOST:PORT"):
            LeadConfig(listen=wrong, keys=tmp_path, recipe=RECIPE, options=())


async def test_a_disk_that_is_full_ends_the_run_with_its_name(run: Run) -> None:
    """Else the journal would lack a record of a group that is trained."""

    def full(record: object) -> None:
        raise CannotWrite("cannot write to the journal")

    async def lead() -> None:
        async with run.door, run.lead, Setup(*TURNS) as scripted:
            run.publish(1)
            async with a_node(run, scripted):
                await asyncio.wait_for(run.lead.make_group(a_prompt(text="What is 6 * 7?"), 0, 0), 10)

    run.journal.write = full  # type: ignore[method-assign]
    with pytest.raises(CannotWrite):
        await lead()
