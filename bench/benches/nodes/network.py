"""Emulates hosts on one machine with links of a given rate and delay: network namespaces, and a switch in user space
that holds a TUN device of each, for kernels that have no netem.

    python -m bench.benches.nodes.network NAME ...        # the switch, started by `network`

A packet leaves its host's link when the packets before it have left at the link's rate, and arrives after half of the
round trip. Packets are large (MTU), so that Python can switch a gigabit per second.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MTU = 32_000
QUEUE_BYTES = 8 << 20  # a link's queue; a packet that meets a full one is lost
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


class NoNetwork(RuntimeError):
    """Hosts cannot be emulated here; the message says what is missing."""


@contextmanager
def network(hosts: Sequence[str], *, rate_bits: float, round_trip_s: float) -> Iterator[dict[str, list[str]]]:
    """Yields {host: the arguments before a command that runs there}. The i-th host has the address `address(i)`.

    rate_bits: per second, of each host's link in either direction. It needs root, ip and nsenter, and raises NoNetwork
    where they are missing.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        raise NoNetwork("emulated links need root, ip and nsenter. Fix: run as root, with iproute2 installed")
    names = [f"rocstar-{os.getpid()}-{host}" for host in hosts]
    switch = None
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        arguments = [sys.executable, "-m", "bench.benches.nodes.network", str(rate_bits), str(round_trip_s), *names]
        switch = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        assert switch.stdout is not None
        if not switch.stdout.readline():
            raise RuntimeError("the switch of the emulated network did not start; see above")
        yield {host: ["nsenter", f"--net=/run/netns/{name}"] for host, name in zip(hosts, names, strict=True)}
    finally:
        if switch is not None:
            switch.kill()
            switch.communicate()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class _Link:
    """One direction of a host's cable."""

    def __init__(self, rate_bits: float) -> None:
        self._bytes_per_s = rate_bits / 8
        self._free = 0.0  # when the last packet has left

    def leaves(self, size: int, now: float) -> float | None:
        """Returns when a packet that comes now has left; None: it is lost."""
        start = max(now, self._free)
        if (start - now) * self._bytes_per_s > QUEUE_BYTES:
            return None
        self._free = start + size / self._bytes_per_s
        return self._free


class Switch:
    """Passes packets on between hosts. files: TUN devices by the last byte of their host's address."""

    def __init__(self, files: dict[int, int], *, rate_bits: float, round_trip_s: float) -> None:
        self._files, self._delay_s = files, round_trip_s / 2
        self._up = {last: _Link(rate_bits) for last in files}
        self._down = {last: _Link(rate_bits) for last in files}
        self._loop = asyncio.get_running_loop()
        for last, file in files.items():
            self._loop.add_reader(file, self._read, last, file)

    def _read(self, source: int, file: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(file, MTU + 100)
            except BlockingIOError:
                return
            target = packet[19] if packet[0] >> 4 == 4 else None
            if target in self._files:
                self._pass_on(source, target, packet)

    def _pass_on(self, source: int, target: int, packet: bytes) -> None:
        now = time.monotonic()
        departed = self._up[source].leaves(len(packet), now)
        arrived = None if departed is None else self._down[target].leaves(len(packet), departed)
        if arrived is not None:
            self._loop.call_later(arrived + self._delay_s - now, self._write, target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        with suppress(OSError):  # the packet is lost where the queue is full or the host is gone
            os.write(self._files[target], packet)


def _open(name: str, number: int) -> int:
    """Opens a TUN device in a namespace and brings it up with the host's address."""
    with Path(f"/run/netns/{name}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"cable", _IFF_TUN | _IFF_NO_PI))
    _ip("address", "add", f"{address(number)}/24", "dev", "cable")
    _ip("link", "set", "dev", "cable", "mtu", str(MTU), "txqueuelen", "1000", "up")
    return file


async def _serve(rate_bits: float, round_trip_s: float, names: Sequence[str]) -> None:
    files = {number + 1: _open(name, number) for number, name in enumerate(names)}
    Switch(files, rate_bits=rate_bits, round_trip_s=round_trip_s)
    print("up", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
