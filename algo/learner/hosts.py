"""Ranks on several hosts that share no file system: who is rank 0, and how files get from one host to another.

Invariants
- The rank that has the node's socket is rank 0, and the ranks of its host follow, whichever host the launcher counts
  first: what rank 0 writes is on the node's machine.
- Every rank calls `collect` and `spread` with equal arguments; they work over the process group, in pieces.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PIECE_BYTES = 64 << 20
_SIOCGIFADDR = 0x8915


def several() -> bool:
    """Whether the launcher started ranks on more than one host."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return here is not None and here != os.environ["WORLD_SIZE"]


def ranks_of_a_host() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"]) if several() else dist.get_world_size()


def first_of_its_host() -> bool:
    return dist.get_rank() % ranks_of_a_host() == 0


def ordered(*, speaks: bool) -> tuple[dist.Store, int]:
    """The store of the group, and this process's rank. speaks: it has the node's socket."""
    host, ranks = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(minutes=10)
    )
    if speaks:
        store.set("rocstar/host", str(host))
    behind = (host - int(store.get("rocstar/host"))) % (int(os.environ["WORLD_SIZE"]) // ranks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_to(os.environ["MASTER_ADDR"]))
    return dist.PrefixStore("rocstar", store), behind * ranks + int(os.environ["LOCAL_RANK"])


def interface_to(host: str) -> str:
    """The network interface from which packets to this host leave. gloo would take the one that the own name means."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # without an address
            if found[20:24] == own:
                return name
    raise OSError(f"no network interface has the address from which {host} is reached")


def folder_of(path: Path) -> Path:
    """Where the ranks of this host keep what rank 0's host has in path."""
    if dist.get_rank() < ranks_of_a_host():
        return path
    return Path(tempfile.gettempdir()) / f"rocstar-{os.environ.get('TORCHELASTIC_RUN_ID', '0')}-{path.name}"


def collect(path: Path, group: dist.ProcessGroup) -> None:
    """The files of every other host's folder are moved to rank 0's."""
    here = folder_of(path)
    for rank, files in _listed(here, group, from_first=False):
        for name, size_bytes in files:
            if dist.get_rank() == rank:
                _send(here / name, size_bytes, 0, group)
            elif dist.get_rank() == 0:
                _receive(path / name, size_bytes, rank, group)
    forget(path)


def spread(path: Path, group: dist.ProcessGroup) -> None:
    """The files of rank 0's folder are copied to every other host's, until `forget`."""
    here = folder_of(path)
    firsts = range(ranks_of_a_host(), dist.get_world_size(), ranks_of_a_host())
    [(_, files)] = _listed(path, group, from_first=True)
    if dist.get_rank() in firsts:
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir(parents=True)
    for name, size_bytes in files:
        for first in firsts:
            if dist.get_rank() == 0:
                _send(path / name, size_bytes, first, group)
            elif dist.get_rank() == first:
                _receive(here / name, size_bytes, 0, group)
    dist.barrier(group)


def forget(path: Path) -> None:
    """What other hosts have of rank 0's folder goes."""
    if dist.get_rank() > 0 and first_of_its_host():
        shutil.rmtree(folder_of(path), ignore_errors=True)


def _listed(folder: Path, group: dist.ProcessGroup, *, from_first: bool) -> list[tuple[int, list[tuple[str, int]]]]:
    """(rank, files with their sizes) of the first rank of each host: of rank 0's alone, or of all others."""
    tells = first_of_its_host() and (dist.get_rank() == 0) == from_first
    own = [(file.name, file.stat().st_size) for file in sorted(folder.iterdir())] if tells else None
    found: list[list[tuple[str, int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=group)
    return [(rank, files) for rank, files in enumerate(found) if files is not None]


def _send(file: Path, size_bytes: int, to: int, group: dist.ProcessGroup) -> None:
    with file.open("rb") as content:
        for offset in range(0, size_bytes, PIECE_BYTES):
            piece = bytearray(content.read(min(PIECE_BYTES, size_bytes - offset)))
            dist.send(torch.frombuffer(piece, dtype=torch.uint8), to, group=group)


def _receive(file: Path, size_bytes: int, sender: int, group: dist.ProcessGroup) -> None:
    with file.open("wb") as content:
        for offset in range(0, size_bytes, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, size_bytes - offset), dtype=torch.uint8)
            dist.recv(piece, sender, group=group)
            content.write(piece.numpy().data)
