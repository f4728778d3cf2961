"""Ranks on several hosts that share no file system: how they meet, and how files get from one host to another.

Invariants
- The first rank of the lead's host is rank 0, and the ranks of its host follow: what rank 0 writes is on that machine.
- Ranks of one host listen on loopback only. Those of several hosts listen at the given address, and on the interface
  that leads there.
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
MEET = timedelta(minutes=10)  # how long ranks wait for each other at first
_SIOCGIFADDR = 0x8915


def several() -> bool:
    """Returns whether the launcher started ranks on more than one host."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return here is not None and here != os.environ["WORLD_SIZE"]


def ranks_of_a_host() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"]) if several() else dist.get_world_size()


def first_of_its_host() -> bool:
    return dist.get_rank() % ranks_of_a_host() == 0


def meet() -> tuple[dist.Store, int]:
    """Returns the store through which the ranks find each other, and this process's rank.

    The store is a private file if all ranks are on one host, else it listens at the lead's LEARNER_AT alone.
    """
    if "LEARNER_STORE" in os.environ:
        listen_on("lo")
        return dist.FileStore(os.environ["LEARNER_STORE"], int(os.environ["WORLD_SIZE"])), int(os.environ["RANK"])
    host, _, port = os.environ["LEARNER_AT"].rpartition(":")
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    other = os.environ.get("LEARNER_HOST")  # not set on the lead's host
    if other is None and local == 0:
        # A TCPStore that listens by itself does so on every interface
        listener = socket.create_server((host, int(port)))
        served = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    else:
        served = {"is_master": False}
    everybody = dist.TCPStore(host, int(port), timeout=MEET, **served)
    store = dist.PrefixStore(os.environ["LEARNER_RUN"], everybody)
    number = 0 if other is None else _number(store, other, counts=local == 0)
    if number * ranks >= int(os.environ["WORLD_SIZE"]):
        raise RuntimeError("the learner has all of its hosts already. Fix: end this one, or raise learner_hosts")
    listen_on(interface_to(host))
    return store, number * ranks + local


def _number(store: dist.Store, name: str, *, counts: bool) -> int:
    """Returns the number of a host that is not the lead's, from 1. counts: this rank asks on behalf of its host."""
    if counts and store.add(f"known/{name}", 1) == 1:  # ranks that are started again are on the same host
        store.set(f"number/{name}", str(store.add("hosts", 1)))
    return int(store.get(f"number/{name}"))


def listen_on(interface: str) -> None:
    """Makes gloo and NCCL listen on this network interface, whatever is set for other programs of this machine."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


def interface_to(host: str) -> str:
    """Returns the network interface from which packets to a host leave.

    Gloo would take the interface that the machine's own name resolves to.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                address = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if address[20:24] == own:
                return name
    raise OSError(f"no network interface has the address from which {host} is reached")


def folder_of(path: Path) -> Path:
    """Returns where the ranks of this host keep the files that rank 0's host has in path."""
    if dist.get_rank() < ranks_of_a_host():
        return path
    return Path(tempfile.gettempdir()) / f"rocstar-{os.environ['LEARNER_RUN']}-{path.name}"


def collect(path: Path, group: dist.ProcessGroup) -> None:
    """Moves the files of every other host's folder to rank 0's."""
    here = folder_of(path)
    for rank, files in _listed(here, group, from_first=False):
        for name, size_bytes in files:
            if dist.get_rank() == rank:
                _send(here / name, size_bytes, 0, group)
            elif dist.get_rank() == 0:
                _receive(path / name, size_bytes, rank, group)
    forget(path)


def spread(path: Path, group: dist.ProcessGroup) -> None:
    """Copies the files of rank 0's folder to every other host's, where they stay until `forget`."""
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
    """Deletes the copies of rank 0's folder on other hosts."""
    if dist.get_rank() > 0 and first_of_its_host():
        shutil.rmtree(folder_of(path), ignore_errors=True)


def _listed(folder: Path, group: dist.ProcessGroup, *, from_first: bool) -> list[tuple[int, list[tuple[str, int]]]]:
    """Returns (rank, files with their sizes) for the first rank of each host: for rank 0 alone, or for all others."""
    tells = first_of_its_host() and (dist.get_rank() == 0) == from_first
    own = [(file.name, file.stat().st_size) for file in sorted(folder.iterdir())] if tells else None
    listed: list[list[tuple[str, int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(listed, own, group=group)
    return [(rank, files) for rank, files in enumerate(listed) if files is not None]


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
