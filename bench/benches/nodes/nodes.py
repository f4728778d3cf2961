"""What does leading nodes cost, and how long do weights take to reach them?

    rocstar bench nodes [rounds=3] [groups=200] [nodes=1,2,4] [megabytes=250]

lead: the real lead with its journal, sockets and keys, and scripted nodes in a process of their own that make groups
the moment that they are granted. CPU is that of the whole process, ZeroMQ's thread included; the floor is a bare ROUTER
with the same keys that takes the same bytes and drops them. A quickstart group is 16 rollouts of 2 turns of 15 tokens,
a math8k group 32 of 4 of 780.

sync: from the question until all nodes have the weights, over links of 1 Gbit/s and a round trip of 20 ms that are
emulated between network namespaces, against the time that the bytes need by themselves on the lead's link. The switch
of the emulated links runs in Python on the same cores.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import uvloop
import zmq

from bench.benches.nodes import sync
from bench.benches.nodes.network import NoNetwork
from bench.benches.nodes.parts import SHAPES, Shape, a_lead, a_prompt
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import Kind, microseconds, milliseconds, ratio, seconds
from bench.measuring.terminal import say
from engine.types import PublishedWeights
from sandbox import keys
from sandbox.keys import guard, load_node
from sandbox.mailbox import Mailbox
from sandbox.require import at_least, require_fields

NODES = 4  # nodes that the lead serves
PER_NODE = 16  # groups


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "loads of the lead, and updates of the nodes"] = 3
    groups: Annotated[int, "long groups of a load; 20 times as many short ones"] = 200
    nodes: Annotated[tuple[int, ...], "nodes to which weights are sent; 0: none"] = (1, 2, 4)
    megabytes: Annotated[int, "size of the weights"] = 250

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "groups", "megabytes")


METRICS = {
    "group_s": milliseconds("CPU of a group", "of the lead", form=".2f", kind=Kind.CPU),
    "record_s": microseconds("of a record", "a turn of a rollout, or a group's decision", form=".0f"),
    "token_s": microseconds("of a token", "of the lead, per sampled token", form=".3f"),
    "over_floor": ratio("/ floor", "CPU of the lead over that of a bare socket that takes the same bytes"),
    "sync_s": seconds("sync", "until all nodes have the weights"),
    "over_own": ratio("/ own time", "sync over the time that the bytes need by themselves on the lead's link"),
}


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def clients(role: str, folder: Path, address: str, shape: Shape, number: int) -> subprocess.Popen[bytes]:
    arguments = [role, str(folder / "keys"), address, shape.name, str(number)]
    return subprocess.Popen([sys.executable, "-m", "bench.benches.nodes.clients", *arguments])


async def lead_cpu_s(shape: Shape, groups: int, folder: Path) -> float:
    """Returns the lead's CPU seconds for `groups` groups, from the first grant to the last group."""
    address = free_address()
    async with a_lead(address, folder / "keys", folder) as lead:
        (folder / "weights").write_bytes(b"0")
        lead.publish(PublishedWeights(str(folder / "weights"), 0, np.zeros(1, np.float32)))
        nodes = clients("nodes", folder, address, shape, NODES)
        try:
            while len(lead.protocol.nodes) < NODES:  # noqa: ASYNC110  a node that joins tells nobody
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
    """Returns the CPU seconds of a ROUTER that takes the same bytes."""
    missing, done = groups * shape.records, asyncio.Event()
    began = time.process_time()

    def receive(frames: list[bytes]) -> None:
        nonlocal missing
        missing -= 1
        if not missing:
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


def lead_load(shape: Shape, groups: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys.make(folder / "keys")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lead_s = runner.run(lead_cpu_s(shape, groups, folder))
            floor_s = runner.run(floor_cpu_s(shape, groups, folder))
    group_s = lead_s / groups
    return {
        "group_s": group_s,
        "record_s": group_s / shape.records,
        "token_s": group_s / shape.group_tokens,
        "over_floor": lead_s / floor_s,
    }


def sync_of(nodes: int, size_bytes: int) -> dict[str, float]:
    """Raises NoNetwork where links cannot be emulated."""
    link = sync.Link()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        sync_s = sync.measured(Path(name), link, nodes=nodes, size_bytes=size_bytes)
    return {"sync_s": sync_s, "over_own": sync_s / link.own_s(size_bytes, nodes)}


def measure(options: Options, keep: Keep) -> None:
    nodes = [count for count in options.nodes if count]
    for number in range(options.rounds):
        figures = {}
        for shape in SHAPES.values():
            say(f"round {number + 1} of {options.rounds}: the lead with groups like {shape.name}")
            groups = options.groups if shape.group_tokens > 10_000 else 20 * options.groups
            figures[f"lead/{shape.name}"] = lead_load(shape, groups)
        for count in nodes:
            say(f"round {number + 1} of {options.rounds}: {options.megabytes} MB to {count} nodes")
            try:
                figures[f"sync/{count}"] = sync_of(count, options.megabytes * 1_000_000)
            except NoNetwork as error:
                say(f"weights are not sent: {error}")
                nodes = []
                break
        keep(figures)


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("over_floor", "group_s", "sync_s", "over_own"),
    quick={"rounds": "1", "groups": "10", "nodes": "2", "megabytes": "20"},
)
