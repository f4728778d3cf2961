"""The sockets of processes to which somebody else could connect or send, as the kernel lists them below /proc.

These are listening TCP sockets, UDP sockets without a peer, and UNIX sockets that other users of the machine can reach:
abstract ones, and those whose file and folders let others in.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import psutil

TCP_LISTENS, UDP_WITHOUT_PEER, UNIX_LISTENS = "0A", "07", 1 << 16
LOOK_S = 0.05
ROLES = {  # by what the command line holds, the first match wins
    "EngineCor": "engine",  # as the kernel cuts its title
    "engine.learner.launch": "learner launcher",
    "algo.learner": "learner rank",
    "sandbox.host": "sandbox host",
    "sandbox.inside": "jail",
}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Listener:
    """owner: the role of the first process that holds it. address: an IP address, or the name of a UNIX socket."""

    owner: str
    kind: Literal["tcp", "udp", "unix"]
    address: str
    port: int = 0

    @property
    def on_loopback(self) -> bool:
        return self.kind != "unix" and ipaddress.ip_address(self.address).is_loopback


def listeners(pid: int, name: str) -> set[Listener]:
    """Those of a process, whose role has this name, and of all below it that are in its network namespace."""
    found: dict[str, Listener] = {}
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        root = psutil.Process(pid)
        namespace = Path(f"/proc/{pid}/ns/net").readlink()
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                if Path(f"/proc/{process.pid}/ns/net").readlink() == namespace:
                    role = name if process.pid == pid else _role(process)
                    if role is not None:
                        found = dict(_of(process.pid, role)) | found
    return set(found.values())


def _role(process: psutil.Process) -> str | None:
    """None for one that is ending: its memory, and with it the command line, goes before its descriptors."""
    words = process.cmdline()
    command = " ".join(words) or process.name()
    role = next((role for mark, role in ROLES.items() if mark in command), command)
    return role if words or role != command else None


def _of(pid: int, owner: str) -> Iterator[tuple[str, Listener]]:
    """By the number of the socket."""
    targets = (_target(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    own = {target[8:-1] for target in targets if target.startswith("socket:[")}
    for kind, state in (("tcp", TCP_LISTENS), ("udp", UDP_WITHOUT_PEER)):
        for version in ("", "6"):
            for words in _rows(pid, kind + version):
                if words[3] == state and words[9] in own:
                    address, port = words[1].split(":")
                    yield words[9], Listener(owner=owner, kind=kind, address=_address(address), port=int(port, 16))
    for words in _rows(pid, "unix"):
        if words[6] not in own or len(words) < 8:
            continue  # without a name nobody finds it
        takes = int(words[3], 16) & UNIX_LISTENS or int(words[4], 16) == socket.SOCK_DGRAM
        if takes and (words[7].startswith("@") or _open_to_others(Path(words[7]))):
            yield words[6], Listener(owner=owner, kind="unix", address=words[7])


def _rows(pid: int, table: str) -> list[list[str]]:
    path = Path(f"/proc/{pid}/net/{table}")
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # closed meanwhile
        return ""


def _address(text: str) -> str:
    """Words of four bytes in the machine's order, little-endian."""
    packed = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _open_to_others(path: Path) -> bool:
    """Whether another user may connect: that takes write permission, and search permission of all folders above."""
    try:
        return bool(path.stat().st_mode & 0o002) and all(parent.stat().st_mode & 0o001 for parent in path.parents)
    except OSError:
        return False  # its name is gone


class Watch(threading.Thread):
    """`with Watch(pid, name) as watch: ...`; then `watch.seen` has every listener that was there when it looked."""

    def __init__(self, pid: int, name: str) -> None:
        super().__init__(name="listeners", daemon=True)
        self.seen: set[Listener] = set()
        self.first = threading.Event()  # there is one
        self._pid, self._name, self._over = pid, name, threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        self.seen |= listeners(self._pid, self._name)
        if self.seen:
            self.first.set()
