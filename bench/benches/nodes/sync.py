"""Sends weights to nodes over emulated links: the lead's own socket and server of files, the nodes' own pull.

python -m bench.benches.nodes.sync lead KEYS FOLDER ADDRESS      # publishes FOLDER/weights until its input ends
python -m bench.benches.nodes.sync node KEYS FOLDER ADDRESS BYTES  # pulls once for each line of its input
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.benches.nodes.network import address, network
from bench.benches.nodes.parts import a_lead
from engine.nodes.messages import FileInfo
from engine.nodes.pulls import fetch
from engine.types import PublishedWeights
from sandbox import keys
from sandbox.keys import load_host

PORT = 5700


@dataclass(frozen=True, kw_only=True)
class Link:
    """The links between hosts. rate_bits: per second, of each host's link; the lead's is shared by its nodes."""

    rate_bits: float = 1e9
    round_trip_s: float = 0.02

    def own_s(self, size_bytes: int, nodes: int) -> float:
        """Returns the time that the bytes need by themselves: over the lead's link for every node."""
        return nodes * size_bytes * 8 / self.rate_bits + self.round_trip_s


def measured(folder: Path, link: Link, *, nodes: int, size_bytes: int) -> float:
    """Returns the seconds from the question of the nodes until all of them have the file."""
    keys.make(folder / "keys")
    (folder / "weights").write_bytes(np.random.default_rng(0).bytes(size_bytes))
    lead_address = f"tcp://{address(0)}:{PORT}"
    hosts = ["lead", *(f"node{number}" for number in range(nodes))]
    module = [sys.executable, "-m", "bench.benches.nodes.sync"]
    started: list[subprocess.Popen[str]] = []
    with network(hosts, rate_bits=link.rate_bits, round_trip_s=link.round_trip_s) as on:
        try:
            for number, host in enumerate(hosts):
                (folder / host).mkdir()
                role = ["node"] if number else ["lead"]
                arguments = [*role, str(folder / "keys"), str(folder if not number else folder / host), lead_address]
                process = subprocess.Popen(
                    [*on[host], *module, *arguments, str(size_bytes)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                started.append(process)
                assert process.stdout is not None
                if "ready" not in process.stdout.readline():
                    raise RuntimeError(f"the {host} of the bench did not start; see above")
            return _pull(started[1:])
        finally:
            for process in started:
                process.kill()
                process.communicate()


def _pull(nodes: list[subprocess.Popen[str]]) -> float:
    began = time.monotonic()
    for node in nodes:
        assert node.stdin is not None
        node.stdin.write("go\n")
        node.stdin.flush()
    for node in nodes:
        assert node.stdout is not None
        node.stdout.readline()
    return time.monotonic() - began


async def _lead(keys_folder: Path, folder: Path, at: str) -> None:
    async with a_lead(at.replace(address(0), "0.0.0.0"), keys_folder, folder) as lead:
        lead.publish(PublishedWeights(str(folder / "weights"), 1, np.zeros(1, np.float32)))
        print("ready", flush=True)
        await asyncio.Event().wait()


async def _node(keys_folder: Path, folder: Path, at: str, size_bytes: int) -> None:
    host = load_host(keys_folder)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    info = FileInfo(name="weights-1", size_bytes=size_bytes)
    while await loop.run_in_executor(None, sys.stdin.readline):
        await fetch(at, host, info.name, info, folder / "pulled")
        print("done", flush=True)


if __name__ == "__main__":
    import uvloop

    role, keys_folder, folder, at, size_bytes = sys.argv[1:]
    if role == "lead":
        uvloop.run(_lead(Path(keys_folder), Path(folder), at))
    else:
        uvloop.run(_node(Path(keys_folder), Path(folder), at, int(size_bytes)))
