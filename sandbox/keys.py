"""Keys with which a node and its hosts know each other (ZeroMQ CURVE). `rocstar keys FOLDER` makes them.

Invariants
- A node talks only to hosts whose public key is in its folder as `host*.pub`, which is read at each handshake; a host
  talks only to the node of `node.pub`. Everything between them is encrypted.
- Nothing is overwritten. Secret keys that others may read are refused.

The node needs node.key, node.pub and the host*.pub; a host needs host.key and node.pub. Hosts may share one pair.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from sandbox.mailbox import Mailbox

ZAP = "inproc://zeromq.zap.01"  # libzmq asks here whether a peer may connect; https://rfc.zeromq.org/spec/27
KEY_BYTES = 40  # in Z85


class KeysUnusable(ValueError):
    """A key file is missing or wrong; the message names it and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKeys:
    secret: bytes
    folder: Path

    def admits(self, public: bytes) -> bool:
        """Returns whether a host with this public key (32 bytes) may connect."""
        text = z85.encode(public)
        for path in self.folder.glob("host*.pub"):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                if path.read_bytes().strip() == text:
                    return True
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class HostKeys:
    secret: bytes
    node_public: bytes


def make(folder: Path) -> None:
    """Makes the keys of a node and of its hosts. The rights of an existing folder stay as they are.

    Raises FileExistsError if any of the files exists, PermissionError for a folder that others can write to.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o022:
        raise PermissionError(
            f"others can write to {folder}, and so could let in hosts of theirs. Fix: name a new folder"
        )
    names = ("node.key", "node.pub", "host.key", "host.pub")
    if taken := [str(folder / name) for name in names if (folder / name).exists()]:
        raise FileExistsError(f"{taken[0]} exists. Fix: remove it, or name another folder")
    for name in ("node", "host"):
        public, secret = zmq.curve_keypair()
        for kind, key in (("pub", public), ("key", secret)):
            file = folder / f"{name}.{kind}"
            file.touch(mode=0o600, exist_ok=False)
            file.write_bytes(key + b"\n")


def load_node(folder: Path) -> NodeKeys:
    keys = NodeKeys(secret=_read(folder / "node.key"), folder=folder)
    if not [_read(path) for path in folder.glob("host*.pub")]:
        raise KeysUnusable(f"no {folder / 'host*.pub'}: no host could connect. Fix: see `rocstar keys --help`")
    return keys


def load_host(folder: Path) -> HostKeys:
    return HostKeys(secret=_read(folder / "host.key"), node_public=_read(folder / "node.pub"))


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
        shared = path.stat().st_mode & 0o077
    except OSError as error:
        raise KeysUnusable(
            f"cannot read {path}: {error.strerror}. "
            "Fix: make keys with `rocstar keys FOLDER` on the node and copy what a host needs"
        ) from error
    try:
        z85.decode(key)
    except (ValueError, KeyError):
        key = b""
    if len(key) != KEY_BYTES:
        raise KeysUnusable(f"{path} is not a key file. Fix: make keys with `rocstar keys FOLDER`")
    if path.suffix == ".key" and shared:
        raise KeysUnusable(f"{path} can be read by others. Fix: `chmod 600 {path}`")
    return key


def guard(mailbox: Mailbox, keys: NodeKeys, turned_away: Callable[[str], None] = lambda address: None) -> Mailbox:
    """Lets only admitted hosts connect to what `mailbox` binds from now on, until the returned gate is closed.

    turned_away: is called with the address of each host that is not admitted.
    """

    def judge(frames: list[bytes]) -> None:
        peer, empty, version, request, _domain, address, _identity, mechanism, *credentials = frames
        admitted = mechanism == b"CURVE" and len(credentials) == 1 and keys.admits(credentials[0])
        answer = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        if not admitted:
            turned_away(address.decode(errors="replace"))
        gate.send_frames(peer, empty, version, request, *answer, b"", b"")

    gate = Mailbox(zmq.ROUTER, judge, mailbox.context)
    gate.socket.bind(ZAP)
    mailbox.socket.setsockopt(zmq.CURVE_SERVER, 1)
    mailbox.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    mailbox.socket.setsockopt(zmq.ZAP_DOMAIN, b"rocstar")
    mailbox.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the gate nobody is admitted, instead of everybody
    return gate


def trust(mailbox: Mailbox, keys: HostKeys) -> None:
    """Lets `mailbox` connect from now on only to the node of these keys."""
    mailbox.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.node_public)
    mailbox.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    mailbox.socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(keys.secret))
