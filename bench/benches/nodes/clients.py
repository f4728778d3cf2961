"""Nodes that sample nothing: they speak the real protocol over the real sockets, and send records as fast as they can.

python -m bench.benches.nodes.clients nodes KEYS ADDRESS SHAPE NODES     # until the lead says bye
python -m bench.benches.nodes.clients flood KEYS ADDRESS SHAPE GROUPS    # the same bytes to a bare socket
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import zmq

from bench.benches.nodes.parts import RECIPE, SHAPES, Shape, a_prompt, records_of
from engine import encoding
from engine.nodes.build import build_of
from engine.nodes.ledger import Key
from engine.nodes.messages import Announce, Build, Numbered, ToLead, decode_to_node, encode
from engine.nodes.messages import Record as Told
from engine.nodes.node_protocol import NodeProtocol
from engine.run import journal_records
from engine.run.journal_records import Decided, Drawn
from sandbox.keys import HostKeys, load_host, trust
from sandbox.mailbox import Mailbox

GROUPS_AT_ONCE = 16
BEAT_S = 1.0


class ScriptedNode:
    """A node whose groups are made the moment that they are granted."""

    def __init__(self, name: str, build: Build, keys: HostKeys, lead: str, shape: Shape) -> None:
        self.over = asyncio.Event()
        self._shape, self._version, self._free = shape, -1, GROUPS_AT_ONCE * shape.group_tokens
        self._told: dict[int, Iterator[tuple[bytes, bool]]] = {}
        self._mailbox = Mailbox(zmq.DEALER, self._receive)
        trust(self._mailbox, keys)
        self._mailbox.socket.connect(lead)
        self.protocol = NodeProtocol(
            name=name,
            build=build,
            capacity_tokens=self._free,
            replicas=1,
            make_session=lambda: secrets.token_bytes(16),
            post=self._post,
            events=self,
        )

    async def beat(self) -> None:
        while not self.over.is_set():
            self.protocol.tick(version=self._version, pulled=self._version, free_tokens=self._free, tokens=0)
            await asyncio.sleep(BEAT_S)
        self._mailbox.close()

    def start(self, key: Key, work: int, records: list[bytes]) -> None:
        drawn = journal_records.decode(records[0])
        assert isinstance(drawn, Drawn)
        self._told[work] = (
            (encoding.encode(record), isinstance(record, Decided)) for record in records_of(drawn, self._shape)
        )
        asyncio.get_running_loop().call_soon(self._tell, key, work)

    def _tell(self, key: Key, work: int) -> None:
        """Sends a record in each round of the loop, so that the groups of a node grow together."""
        if work not in self._told:
            return
        record, last = next(self._told[work])
        self.protocol.tell(key, work, record, last=last)
        if last:
            del self._told[work]
        else:
            asyncio.get_running_loop().call_soon(self._tell, key, work)

    def stop(self, work: int) -> None:
        self._told.pop(work, None)

    def hold(self, on: bool) -> None: ...

    def weights(self, announce: Announce) -> None:
        self._version = announce.version
        self.protocol.tick(version=self._version, pulled=self._version, free_tokens=self._free, tokens=0)

    def load(self, version: int) -> None: ...

    def refused(self, reason: str) -> None:
        raise SystemExit(reason)

    def bye(self) -> None:
        self.over.set()

    def drained(self) -> None: ...

    def note(self, line: str) -> None: ...

    def _post(self, message: ToLead) -> None:
        self._mailbox.send_frames(encode(message))

    def _receive(self, frames: list[bytes]) -> None:
        self.protocol.receive(decode_to_node(b"".join(frames)))


async def _nodes(keys: HostKeys, lead: str, shape: Shape, count: int) -> None:
    build = build_of(RECIPE)
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            node = ScriptedNode(f"node{number}", build, keys, lead, shape)
            tasks.create_task(node.beat(), name=f"node-{number}")


async def _flood(keys: HostKeys, address: str, shape: Shape, groups: int) -> None:
    mailbox = Mailbox(zmq.DEALER, lambda frames: None)
    trust(mailbox, keys)
    mailbox.socket.connect(address)
    for number in range(groups):
        drawn = Drawn(lease=number, attempt=0, position=0, prompt=a_prompt(number))
        for seq, record in enumerate(records_of(drawn, shape)):
            told = Told(lease=number, attempt=0, epoch=1, record=encoding.encode(record))
            mailbox.send_frames(encode(Numbered(session=bytes(16), seq=seq, ack=0, body=encode(told))))
        await asyncio.sleep(0)
    mailbox.close(60_000)


if __name__ == "__main__":
    import uvloop

    role, folder, at, shape_name, number = sys.argv[1:]
    run = {"nodes": _nodes, "flood": _flood}[role]
    uvloop.run(run(load_host(Path(folder)), at, SHAPES[shape_name], int(number)))
