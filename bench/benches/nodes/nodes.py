"""What leading nodes costs, and how long weights take to reach them.

    python -m bench nodes [--quick] [--groups 200] [--nodes 1,2,4] [--rounds 3] [--megabytes 100]

lead: the real lead with its journal, sockets and keys, and scripted nodes in a process of their own that make groups
the moment that they are granted. CPU seconds of the whole process, ZeroMQ's thread included, per group, per record and
per token; groups_per_s is what one core of that is good for. over_floor: against a bare ROUTER with the same keys that
takes the same bytes and drops them. A quickstart group is 16 rollouts of 2 turns of 15 tokens; math8k 32 of 4 of 780.

sync: seconds from the question until all nodes have the weights, over links of 1 Gbit/s and a round trip of 20 ms that
are emulated between network namespaces, against the time that the bytes need by themselves on the lead's link.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq

from bench.benches.nodes import sync
from bench.benches.nodes.network import NoNetwork
from bench.benches.nodes.parts import SHAPES, Shape, a_lead, a_prompt
from bench.measuring.report import at_least, environment, fill, finish, interruptible, say, several
from engine.types import PublishedWeights
from sandbox import keys
from sandbox.keys import guard, load_node
from sandbox.mailbox import Mailbox

NODES = 4  # that the lead serves
PER_NODE = 16  # groups


@dataclass(frozen=True, kw_only=True)
class LeadLoad:
    """CPU seconds of a lead, and of a bare socket, for so many groups."""

    shape: Shape
    groups: int
    lead_s: float
    floor_s: float

    @property
    def group_s(self) -> float:
        return self.lead_s / self.groups


@dataclass(frozen=True, kw_only=True)
class Sync:
    nodes: int
    size_bytes: int
    seconds: float
    own_s: float


Round = list[LeadLoad | Sync]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def clients(role: str, folder: Path, address: str, shape: Shape, number: int) -> subprocess.Popen[bytes]:
    words = [role, str(folder / "keys"), address, shape.name, str(number)]
    return subprocess.Popen([sys.executable, "-m", "bench.benches.nodes.clients", *words])


async def lead_cpu_s(shape: Shape, groups: int, folder: Path) -> float:
    """Of `groups` groups, from the first grant to the last group."""
    address = free_address()
    async with a_lead(address, folder / "keys", folder) as lead:
        (folder / "weights").write_bytes(b"0")
        lead.publish(PublishedWeights(str(folder / "weights"), 0, np.zeros(1, np.float32)))
        nodes = clients("nodes", folder, address, shape, NODES)
        try:
            while len(lead.protocol.nodes) < NODES:  # noqa: ASYNC110  whoever joins tells nobody
                await asyncio.sleep(0.05)
            began = time.process_time()
            limit = asyncio.Semaphore(NODES * PER_NODE)

            async def make(number: int) -> None:
                async with limit:
                    await lead.make_group(a_prompt(number), number, 0)

            async with asyncio.TaskGroup() as tasks:
                for number in range(groups):
                    tasks.create_task(make(number), name=f"group-{number}")
            used_s = time.process_time() - began
            await lead.bye()
        finally:
            nodes.kill()
            nodes.wait()
    return used_s


async def floor_cpu_s(shape: Shape, groups: int, folder: Path) -> float:
    """Of a ROUTER that takes the same bytes."""
    left, done = groups * shape.records, asyncio.Event()
    began = time.process_time()

    def receive(frames: list[bytes]) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    mailbox = Mailbox(zmq.ROUTER, receive)
    gate = guard(mailbox, load_node(folder / "keys"), lambda address: None)
    address = free_address()
    mailbox.socket.bind(address)
    flood = clients("flood", folder, address, shape, groups)
    try:
        await done.wait()
        return time.process_time() - began
    finally:
        flood.kill()
        flood.wait()
        gate.close(0)
        mailbox.close(0)


def lead_load(shape: Shape, groups: int) -> LeadLoad:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys.make(folder / "keys")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lead_s = runner.run(lead_cpu_s(shape, groups, folder))
            floor_s = runner.run(floor_cpu_s(shape, groups, folder))
    return LeadLoad(shape=shape, groups=groups, lead_s=lead_s, floor_s=floor_s)


def measure(options: argparse.Namespace, rounds: list[Round]) -> None:
    link = sync.Link()
    size_bytes = options.megabytes * 1_000_000
    for number in range(options.rounds):
        found: Round = []
        for shape in SHAPES.values():
            say(f"round {number + 1}: the lead with groups like {shape.name}")
            groups = options.groups if shape.group_tokens > 10_000 else 20 * options.groups
            found.append(lead_load(shape, groups))
        for nodes in options.nodes:
            say(f"round {number + 1}: {options.megabytes} MB to {nodes} nodes")
            try:
                with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                    seconds = sync.measured(Path(name), link, nodes=nodes, size_bytes=size_bytes, rounds=1)
            except NoNetwork as error:
                say(f"weights are not sent: {error}")
                options.nodes = []
                break
            own_s = link.own_s(size_bytes, nodes)
            found.append(Sync(nodes=nodes, size_bytes=size_bytes, seconds=seconds[0], own_s=own_s))
        rounds.append(found)


def show(options: argparse.Namespace, machine: dict[str, Any], rounds: Sequence[Round]) -> None:
    loads = [each for found in rounds for each in found if isinstance(each, LeadLoad)]
    syncs = [each for found in rounds for each in found if isinstance(each, Sync)]
    metrics: dict[str, float] = {}
    rows = []
    for shape in SHAPES.values():
        of = [load for load in loads if load.shape == shape]
        group_s = statistics.median(load.group_s for load in of)
        floor = statistics.median(load.lead_s / load.floor_s for load in of)
        metrics |= {
            f"lead_ms_per_group_{shape.name}": 1e3 * group_s,
            f"lead_us_per_record_{shape.name}": 1e6 * group_s / shape.records,
            f"lead_us_per_token_{shape.name}": 1e6 * group_s / shape.group_tokens,
            f"lead_over_floor_{shape.name}": floor,
        }
        numbers = [
            f"{1e3 * group_s:.2f}",
            f"{1e6 * group_s / shape.records:.0f}",
            f"{1e6 * group_s / shape.group_tokens:.2f}",
            f"{1 / group_s:.0f}",
            f"{shape.group_tokens / group_s:,.0f}",
            f"{floor:.1f}",
        ]
        rows.append([f"lead, {shape.name}", *numbers, ""])
    for nodes in options.nodes:
        of_nodes = [each for each in syncs if each.nodes == nodes]
        seconds = statistics.median(each.seconds for each in of_nodes)
        ratio = statistics.median(each.seconds / each.own_s for each in of_nodes)
        metrics |= {f"sync_s_{nodes}": seconds, f"sync_over_own_{nodes}": ratio}
        rows.append([f"sync, {nodes} nodes, {options.megabytes} MB", *[""] * 6, f"{seconds:.2f} s, {ratio:.2f} x"])
    header = ["", "ms / group", "us / record", "us / token", "groups/s/core", "tokens/s/core", "over floor", "sync"]
    title = "the lead's CPU, and weights over a link of 1 Gbit/s and 20 ms; medians"
    finish("nodes", title, header, rows, config=vars(options), metrics=metrics, environment=machine)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench nodes", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few groups, one round, two nodes, 20 MB")
    parser.add_argument("--groups", type=at_least(1), help="long ones; 20 times as many short ones")
    parser.add_argument("--nodes", type=several(at_least(1)), help="to which weights are sent; 0 for none")
    parser.add_argument("--rounds", type=at_least(1))
    parser.add_argument("--megabytes", type=at_least(1), help="of weights")
    options = parser.parse_args(given)
    fill(options, groups=(10, 200), nodes=([2], [1, 2, 4]), rounds=(1, 3), megabytes=(20, 250))
    return options


def main() -> None:
    options, machine = arguments(), environment()
    rounds: list[Round] = []
    interruptible(lambda: measure(options, rounds), lambda: show(options, machine, rounds), rounds)
