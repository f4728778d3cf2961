"""The lead's shell: a ROUTER socket, the journal and the lead's own replicas around `LeadProtocol`.

Invariants
- A record that comes from a node is in the run's journal before the group is made of it: a lead that is killed and
  started again goes on from what its nodes had told it.
- Without keys only this machine can connect; with keys only nodes whose public key is in the folder. Who is turned away
  is named in the run's notes.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from engine.errors import first_error
from engine.nodes.build import build_of, name_of
from engine.nodes.config import LeadConfig
from engine.nodes.grant_journal import GrantJournal, group_of
from engine.nodes.lead_protocol import LeadProtocol
from engine.nodes.ledger import Key, Ledger
from engine.nodes.messages import Announce, BadMessage, FileInfo, Job, Pull, ToNode, decode_to_lead, encode
from engine.nodes.pulls import FileServer, info_of
from engine.recording.recording import Recording
from engine.run import journal_records
from engine.run.journal import Journal
from engine.run.journal_records import Decided, Drawn, Ended, Grown
from engine.types import Group, Prompt, PublishedWeights
from sandbox.keys import guard, load_node
from sandbox.mailbox import Mailbox

BEAT_S = 1.0
BYE_BEATS = 30  # tenths of a beat, for nodes to hear that the run has ended
REFUSALS = 100  # noted of strangers; after so many they are only counted


_BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ListenFailed(RuntimeError):
    """The lead cannot listen on its address."""


class MakesGroup(Protocol):
    """`engine.stages.group.MakesGroups` on the lead's own replicas."""

    def __call__(self, prompt: Prompt, lease: int, refills: int, *, journal: Journal) -> Awaitable[Group]: ...


class Lead:
    """`async with Lead(...) as lead`, then `attempt` in place of a local one (`engine.stages.group.groups`).

    checkpoint: the folder whose files nodes pull. folder: on the file system of the published weights, where the newest
    stay linked as long as nodes may pull them. min_version: of a lease, the oldest weights that its tokens may be of.
    kv_tokens: (room, free) of the lead's own replicas. note: a line for the user. recording: gets what happens on the
    nodes, and which of them made a group.
    """

    def __init__(
        self,
        config: LeadConfig,
        *,
        checkpoint: Path,
        folder: Path,
        journal: Journal,
        group_tokens: int,
        min_version: Callable[[int], int],
        kv_tokens: Callable[[], tuple[int, int]],
        version: Callable[[], int],
        note: Callable[[str], None],
    ) -> None:
        self.makes_here: MakesGroup | None = None
        self.recording: Recording | None = None
        self.refused = 0  # connections and messages
        self._ended = False
        self._config, self._checkpoint, self._folder = config, checkpoint, folder
        self._journal, self._group_tokens, self._min_version = journal, group_tokens, min_version
        self._kv_tokens, self._version, self._note = kv_tokens, version, note
        self._files = FileServer()
        self._weights: tuple[str, Path] | None = None  # (name, link) of what nodes pull
        self._made: dict[Key, asyncio.Future[Group]] = {}
        self._sizes: Counter[Key] = Counter()  # tokens of the groups that are made
        self._here: dict[Key, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            stack.callback(self._files.close)
            stack.callback(self._forget_weights)
            self.protocol = LeadProtocol(Ledger(group_tokens=self._group_tokens), await self._job(), self._post, self)
            if not self._config.nodes_only:
                self.protocol.join_here(capacity_tokens=self._kv_tokens()[0])
            self._listen(stack)
            self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for task in (
                self._tasks.create_task(self._beat(), name="lead-beat"),
                self._tasks.create_task(self._fail(), name="lead-failure"),
            ):
                stack.callback(task.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        try:
            await self._stack.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures

    def publish(self, weights: PublishedWeights) -> None:
        """Nodes are told of them, and pull them. Never waits; the learner's file may go as soon as this returns."""
        self._forget_weights()
        name = f"weights-{weights.version}"
        link = self._folder / f"nodes-{name}.safetensors"
        os.link(weights.path, link)
        self._weights = name, link
        self._files.offer(name, link)
        found = link.stat()
        self.protocol.announce(
            Announce(
                version=weights.version,
                file=FileInfo(name=name, size_bytes=found.st_size),
                canary=np.ascontiguousarray(weights.canary, np.float32).tobytes(),
                path=str(link),
                inode=found.st_ino,
            )
        )

    def beat_here(self) -> None:
        """The lead's own replicas have changed: their weights, or the room that they have."""
        if not self._config.nodes_only:
            self.protocol.beat_here(version=self._version(), free_tokens=self._kv_tokens()[1])

    async def attempt(self, prompt: Prompt, lease: int, refills: int) -> Group:
        """The group of this prompt, made by whoever has the room. Waits until somebody has made it."""
        key = Key(lease, refills)
        known = [Drawn(lease=lease, attempt=refills, position=0, prompt=prompt), *self._journal.records(*key)]
        self._made[key] = asyncio.get_running_loop().create_future()
        try:
            self.protocol.want(
                key,
                min_version=self._min_version(lease),
                records=[journal_records.encode(record) for record in known],
            )
            return await self._made[key]
        finally:
            del self._made[key]
            self._sizes.pop(key, None)
            self.protocol.withdraw(key)

    async def bye(self) -> None:
        """The run has ended, and so do its nodes. Waits a moment for them to hear it."""
        self.protocol.bye()
        for _ in range(BYE_BEATS):
            if self.protocol.unheard:
                await asyncio.sleep(BEAT_S / 10)

    # What the protocol calls (engine.nodes.lead_protocol.LeadEvents)

    def record(self, key: Key, record: bytes) -> int | None:
        try:
            decoded = journal_records.decode(record)
        except msgspec.DecodeError as error:
            raise BadMessage(str(error)) from None
        if (decoded.lease, decoded.attempt) != key or isinstance(decoded, Drawn):
            raise BadMessage(f"a {type(decoded).__name__} of lease {decoded.lease} under that of {key.lease}")
        self._journal.write(decoded)
        match decoded:
            case Grown():
                self._sizes[key] += len(decoded.piece.token_ids_T)
            case Ended():
                self._sizes[key] += len(decoded.trajectory.token_ids_T)
        return self._sizes.pop(key, 0) if isinstance(decoded, Decided) else None

    def group(self, key: Key, records: list[bytes], name: str) -> None:
        if self.recording is not None:
            self.recording.nodes[key.lease] = name
        future = self._made[key]
        if not future.done():
            future.set_result(group_of([journal_records.decode(record) for record in records]))

    def happened(self, name: str, epoch: float, segment: bytes) -> None:
        if self.recording is not None:
            self.recording.happened_on(name, epoch, segment)

    def start_here(self, key: Key, epoch: int, records: list[bytes]) -> None:
        if self._ended:
            return  # what is cancelled makes room for what is cancelled next
        task = self._tasks.create_task(self._make_here(key, epoch, records), name=f"group-{key.lease}-{key.attempt}")
        self._here[key] = task

    def stop_here(self, key: Key) -> None:
        if key in self._here:
            self._here[key].cancel()

    def note(self, line: str) -> None:
        self._note(line)

    async def _make_here(self, key: Key, epoch: int, records: list[bytes]) -> None:
        decoded = [journal_records.decode(record) for record in records]
        drawn = decoded[0]
        assert isinstance(drawn, Drawn)
        assert self.makes_here is not None, "the stage that makes groups has not been asked for"
        journal = GrantJournal(decoded, lambda record: self.protocol.here(key, epoch, journal_records.encode(record)))
        try:
            await self.makes_here(drawn.prompt, key.lease, key.attempt, journal=journal)
        except Exception:
            self._ended = True
            raise
        finally:
            del self._here[key]

    async def _job(self) -> Job:
        files = [path for path in sorted(self._checkpoint.iterdir()) if path.is_file()]
        for path in files:
            self._files.offer(f"checkpoint/{path.name}", path)
        infos = await asyncio.to_thread(lambda: [info_of(path) for path in files])
        build = await asyncio.to_thread(build_of, self._config.recipe)
        return Job(build=build, recipe=name_of(self._config.recipe), options=list(self._config.options), files=infos)

    def _listen(self, stack: AsyncExitStack) -> None:
        self._mailbox = Mailbox(zmq.ROUTER, self._receive)
        stack.callback(self._mailbox.close)
        if self._config.keys is not None:
            gate = guard(self._mailbox, load_node(self._config.keys), self._turned_away)
            stack.callback(gate.close, 0)
        try:
            self._mailbox.socket.bind(self._config.listen)
        except zmq.ZMQError as error:
            raise ListenFailed(f"cannot listen on nodes={self._config.listen}: {error}. Fix: another port") from None
        self._watch_handshakes(stack)

    def _watch_handshakes(self, stack: AsyncExitStack) -> None:
        """Connections that end before they have shown a key: of another protocol, or for another lead."""
        monitor = self._mailbox.socket.get_monitor_socket(_BROKEN_OFF)
        loop, file = asyncio.get_running_loop(), int(monitor.getsockopt(zmq.FD))

        def read() -> None:
            while int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
                self._refuse(f"a connection is turned away at its handshake ({zmq.Event(event).name})")

        def close() -> None:
            loop.remove_reader(file)
            self._mailbox.socket.disable_monitor()
            monitor.close(0)

        loop.add_reader(file, read)
        loop.call_soon(read)  # the descriptor is edge-triggered
        stack.callback(close)

    def _receive(self, frames: list[bytes]) -> None:
        address, *rest = frames
        try:
            message = decode_to_lead(b"".join(rest))
        except BadMessage as error:
            self._refuse(f"a message of {sum(map(len, rest))} bytes is none of this protocol: {error}")
            return
        try:
            if isinstance(message, Pull):
                self._post(address, self._files.answer(message))
            else:
                self.protocol.receive(address, message)
        except Exception as error:  # in a callback, where it would only be logged
            self._ended = True
            if not self._failure.done():
                self._failure.set_exception(error)

    def _post(self, address: bytes, message: ToNode) -> None:
        self._mailbox.send_frames(address, encode(message))

    def _turned_away(self, address: str) -> None:
        self._refuse(f"a connection from {address} without a key of this run is turned away")

    def _refuse(self, line: str) -> None:
        self.refused += 1
        if self.refused <= REFUSALS:
            self._note(line)

    async def _fail(self) -> None:
        """Ends the run for what a callback has raised."""
        await self._failure

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.beat_here()
            self.protocol.tick()

    def _forget_weights(self) -> None:
        if self._weights is not None:
            name, link = self._weights
            self._weights = None
            self._files.withdraw(name)
            link.unlink()
