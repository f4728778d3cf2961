"""Keys: their files, and who may connect to a node over real TCP."""

from __future__ import annotations

import doctest
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from sandbox import SandboxConfig, config, keys, wire
from sandbox.keys import KeysUnusable
from sandbox.mailbox import Mailbox
from tests.support.paths import ROCSTAR, ROOT
from tests.support.sandbox_processes import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.make(tmp_path / "keys")
    return tmp_path / "keys"


def test_files_are_private_and_never_overwritten(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) == {"node.key", "node.pub", "host.key", "host.pub"}
    assert len(set(files.values())) == 4
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    with pytest.raises(FileExistsError, match=r"node\.key exists\. Fix: remove it"):
        keys.make(folder)
    (folder / "node.key").unlink()
    with pytest.raises(FileExistsError, match=r"node\.pub exists"):
        keys.make(folder)
    assert not (folder / "node.key").exists()
    assert {path.name: path.read_bytes() for path in folder.iterdir()}.items() <= files.items()


@pytest.mark.parametrize(("mode", "refused"), [(0o755, False), (0o775, True), (0o1777, True)])
def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path, mode: int, refused: bool) -> None:
    """Others may go on using it; but who can write to it could let hosts in by a host.pub of their own."""
    tmp_path.chmod(mode)
    if refused:
        with pytest.raises(PermissionError, match=r"others can write to .*\. Fix: name a new folder"):
            keys.make(tmp_path)
    else:
        keys.make(tmp_path)
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert tmp_path.stat().st_mode & 0o7777 == mode
    assert len(list(tmp_path.iterdir())) == (0 if refused else 4)


def test_the_command(tmp_path: Path) -> None:
    words = [*ROCSTAR, "keys", str(tmp_path / "new")]
    done = [subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60) for _ in range(2)]
    assert [run.returncode for run in done] == [0, 1]
    assert "keys made" in done[0].stdout
    assert (
        done[1].stderr
        == f"rocstar keys: {tmp_path / 'new' / 'node.key'} exists. Fix: remove it, or name another folder\n"
    )
    assert keys.load_host(tmp_path / "new").secret


def test_what_is_wrong_with_a_file_is_said_with_its_name(folder: Path) -> None:
    keys.load_node(folder)
    keys.load_host(folder)
    (folder / "host.key").chmod(0o640)
    with pytest.raises(KeysUnusable, match=r"host\.key can be read by others\. Fix: `chmod 600 "):
        keys.load_host(folder)
    for text in ("", "x" * 39, "é" * 20, '"' * 40):
        (folder / "node.pub").write_text(text)
        (folder / "host.key").chmod(0o600)
        with pytest.raises(KeysUnusable, match=r"node\.pub is not a key file"):
            keys.load_host(folder)
    (folder / "node.pub").unlink()
    with pytest.raises(KeysUnusable, match=r"cannot read .*node\.pub: No such file"):
        keys.load_host(folder)
    (folder / "host.pub").unlink()
    with pytest.raises(KeysUnusable, match=r"no .*host\*\.pub: no host could connect"):
        keys.load_node(folder)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.0.2.1:*", "tcp://eth0:5555"])
def test_nobody_listens_beyond_this_machine_without_keys(address: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"SandboxConfig\.keys must be set to listen on .*rocstar keys"):
        SandboxConfig(listen=address)
    SandboxConfig(listen=address, keys=folder)
    with pytest.raises(ValueError, match=r"SandboxConfig\.keys must be a Path, got 'keys'"):
        SandboxConfig(listen=address, keys="keys")  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://localhost:5555", "tcp://[::1]:5555"])
def test_on_this_machine_keys_are_optional(address: str) -> None:
    SandboxConfig(listen=address)


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(config) == (0, 1)


def test_a_host_without_keys_stays_on_its_machine() -> None:
    words = [*ROCSTAR, "sandbox-host", "connect=tcp://192.0.2.1:5555"]
    done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "keys must be set to connect to tcp://192.0.2.1:5555" in done.stderr


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:5555", "error: connect must be like tcp://node:5555, got '127.0.0.1:5555'\n"),
        ("tcp://127.0.0.1:http", "sandbox.host: Invalid argument (addr='tcp://127.0.0.1:http')\n"),
    ],
)
def test_an_address_that_cannot_be_is_said(address: str, said: str) -> None:
    words = [*ROCSTAR, "sandbox-host", f"connect={address}"]
    done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.endswith(said)
    assert "Traceback" not in done.stderr


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[tuple[str, list[object]]]:
    """The address of a guarded ROUTER and what it has received."""
    received: list[object] = []
    mailbox = Mailbox(zmq.ROUTER, lambda frames: received.append(wire.decode_to_client(frames[1])))
    gate = keys.guard(mailbox, keys.load_node(folder))
    mailbox.socket.bind("tcp://127.0.0.1:*")
    try:
        yield mailbox.socket.getsockopt_string(zmq.LAST_ENDPOINT), received
    finally:
        gate.close()
        mailbox.close()


async def say(address: str, word: str, host: keys.HostKeys | None) -> Mailbox:
    mailbox = Mailbox(zmq.DEALER, lambda frames: None)
    if host is not None:
        keys.trust(mailbox, host)
    mailbox.socket.connect(address)
    mailbox.send(wire.Refused(word))
    return mailbox


async def test_only_a_host_with_a_known_key_is_heard(folder: Path, tmp_path: Path) -> None:
    keys.make(tmp_path / "other")
    known, other = keys.load_host(folder), keys.load_host(tmp_path / "other")
    strangers = {
        "no key": None,
        "unknown key, right node": keys.HostKeys(secret=other.secret, node_public=known.node_public),
        "known key, wrong node": keys.HostKeys(secret=known.secret, node_public=other.node_public),
    }
    async with node(folder) as (address, received):
        mailboxes = [await say(address, word, key) for word, key in strangers.items()]
        for i in range(20):  # handshakes later than theirs
            mailboxes.append(await say(address, f"known {i}", known))
            await until(lambda i=i: len(received) == i + 1)
        assert received == [wire.Refused(f"known {i}") for i in range(20)]
        (folder / "host2.pub").write_bytes((tmp_path / "other" / "host.pub").read_bytes())
        mailboxes.append(await say(address, "added", strangers["unknown key, right node"]))
        await until(lambda: len(received) > 20)
        assert received[20:] == [wire.Refused("added")]
        for mailbox in mailboxes:
            mailbox.close(linger_ms=0)


async def test_without_its_gate_a_guarded_node_hears_nobody(folder: Path) -> None:
    received: list[object] = []
    mailbox = Mailbox(zmq.ROUTER, received.append)
    keys.guard(mailbox, keys.load_node(folder)).close()
    mailbox.socket.bind("tcp://127.0.0.1:*")
    address = mailbox.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    host = Mailbox(zmq.DEALER, lambda frames: None)
    keys.trust(host, keys.load_host(folder))
    # A gate that is just closing may leave a handshake without an answer, for which ZeroMQ would wait 30 s.
    host.socket.setsockopt(zmq.HANDSHAKE_IVL, 1000)
    monitor = host.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED)
    host.socket.connect(address)
    host.send(wire.Refused("hello"))
    assert monitor.poll(5000)
    host.socket.disable_monitor()
    monitor.close()
    assert received == []
    host.close(linger_ms=0)
    mailbox.close()
