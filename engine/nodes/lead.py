"""The lead's shell around `LeadProtocol`: its door, the journal and the lead's own replicas.

Invariants
- A node's record is in the run's journal before a group is made from it, so a lead that is killed and started again
  goes on from what its nodes had sent.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from engine import encoding
from engine.errors import first_error
from engine.nodes import deltas
from engine.nodes.config import LeadConfig
from engine.nodes.door import Door
from engine.nodes.grant_journal import GrantJournal, NotOfAGroup
from engine.nodes.lead_protocol import LeadProtocol
from engine.nodes.ledger import KEPT_BEATS, Key, Ledger
from engine.nodes.messages import Announce, BadMessage, FileInfo
from engine.nodes.node_book import NodeBook
from engine.recording.recording import Recording
from engine.run import journal_records
from engine.run.journal import Journal
from engine.run.journal_records import Decided, Drawn, Ended, Grown
from engine.stages.group import GroupMaker
from engine.telemetry.timeline import Timeline
from engine.types import Group, Prompt, PublishedWeights

BEAT_S = 1.0
BYE_BEATS = 30  # tenths of a beat, for nodes to hear that the run has ended


@dataclass(kw_only=True)
class Published:
    """A version of the weights as nodes pull it. names: the offered files by name, the whole one first."""

    version: int
    names: dict[str, Path]

    @property
    def link(self) -> Path:
        return next(iter(self.names.values()))


class Lead:
    """`async with Lead(...) as lead`, then `lead.make_group` makes the groups (`engine.stages.group.groups`).

    folder: a folder on the file system of the published weights, which stay linked there as long as nodes may pull
    them. min_version: returns the oldest version that may sample for a lease. kv_tokens: returns (room, free) of the
    lead's own replicas. rolling: whether nodes load new weights in turns, while others still sample under older ones.
    note: gets lines for the user. recording: gets what happens on the nodes, and which of them made a group.
    """

    def __init__(
        self,
        config: LeadConfig,
        door: Door,
        *,
        folder: Path,
        journal: Journal,
        group_tokens: int,
        min_version: Callable[[int], int],
        kv_tokens: Callable[[], tuple[int, int]],
        version: Callable[[], int],
        rolling: bool,
        timeline: Timeline,
        note: Callable[[str], None],
        recording: Recording | None = None,
    ) -> None:
        self._maker_here: GroupMaker | None = None
        self._recording = recording
        self._ended = False
        self._config, self._door, self._folder = config, door, folder
        self._journal, self._group_tokens, self._min_version = journal, group_tokens, min_version
        self._kv_tokens, self._version, self._rolling, self._note = kv_tokens, version, rolling, note
        self._book = NodeBook(timeline)
        self._files = door.files
        self._weights: Published | None = None  # the newest, which nodes pull
        self._made: dict[Key, asyncio.Future[Group]] = {}
        self._known: dict[Key, GrantJournal] = {}  # journals of the groups under way
        self._sizes: Counter[Key] = Counter()  # tokens of the groups under way
        self._here: dict[Key, asyncio.Task[None]] = {}  # the groups of the lead's own replicas

    async def __aenter__(self) -> Self:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            stack.callback(self._forget_weights)
            self.protocol = LeadProtocol(
                Ledger(group_tokens=self._group_tokens),
                self._door.job,
                self._door.post,
                self,
                gather=KEPT_BEATS if any(self._journal.held) else 0,
            )
            if not self._config.nodes_only:
                self.protocol.join_here(capacity_tokens=self._kv_tokens()[0])
            self._door.attach(self.protocol.receive, self._failed, lambda: self.protocol.taken)
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
        """Announces weights for nodes to pull, without waiting. Then the learner's file may be deleted."""
        name = f"weights-{weights.version}"
        link = self._folder / f"nodes-{name}.safetensors"
        os.link(weights.path, link)
        self._files.offer(name, link)
        before, self._weights = self._weights, Published(version=weights.version, names={name: link})
        if not self._config.deltas or before is None:
            self._forget(before)
            self._announce(weights, self._weights)
            return
        self._tasks.create_task(self._publish_delta(weights, self._weights, before), name=f"delta-{weights.version}")

    async def _publish_delta(self, weights: PublishedWeights, now: Published, before: Published) -> None:
        """Announces weights once it is known what has changed."""
        path = self._folder / f"nodes-delta-{now.version}"
        try:
            digest = await asyncio.to_thread(deltas.write, before.link, now.link, path)
        except OSError as error:  # a full file system, most likely
            self._note(f"weights {now.version} are announced whole, as their delta cannot be written: {error}")
            path.unlink(missing_ok=True)
            digest = None
        finally:
            self._forget(before)
        if now is not self._weights:
            path.unlink(missing_ok=True)  # newer weights are there already
            return
        if digest is not None:
            now.names[path.name] = path
            self._files.offer(path.name, path)
        self._announce(weights, now, delta=None if digest is None else path, digest=digest or "", base=before.version)

    def _announce(
        self, weights: PublishedWeights, now: Published, *, delta: Path | None = None, digest: str = "", base: int = -1
    ) -> None:
        stat = now.link.stat()
        self.protocol.announce(
            Announce(
                version=weights.version,
                file=FileInfo(name=next(iter(now.names)), size_bytes=stat.st_size, sha256=digest),
                canary=np.ascontiguousarray(weights.canary, np.float32).tobytes(),
                path=str(now.link),
                inode=stat.st_ino,
                at_once=not self._rolling,
                delta=None if delta is None else FileInfo(name=delta.name, size_bytes=delta.stat().st_size),
                base=base,
                canary_further=[list(ids) for ids in weights.further],
            )
        )

    def beat_here(self) -> None:
        """Tells the protocol which weights the lead's own replicas have, and how much room."""
        if not self._config.nodes_only:
            self.protocol.beat_here(version=self._version(), free_tokens=self._kv_tokens()[1])

    def make_here_with(self, maker: GroupMaker) -> None:
        """Sets the maker of groups for the lead's own replicas."""
        self._maker_here = maker

    async def make_group(self, prompt: Prompt, lease: int, refills: int) -> Group:
        """Returns the group of this prompt. Waits until a node with room, or the lead's own replicas, have made it."""
        key = Key(lease, refills)
        known = [Drawn(lease=lease, attempt=refills, position=0, prompt=prompt), *self._journal.records(*key)]
        self._made[key] = asyncio.get_running_loop().create_future()
        self._known[key] = GrantJournal(known)
        try:
            self.protocol.want(
                key,
                min_version=self._min_version(lease),
                records=[encoding.encode(record) for record in known],
            )
            return await self._made[key]
        finally:
            del self._made[key], self._known[key]
            self._sizes.pop(key, None)
            self._book.given_up(key)
            self.protocol.withdraw(key)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of each node since the last call."""
        return self._book.metrics(self.protocol.nodes, version=self._version())

    async def bye(self) -> None:
        """Tells the nodes that the run has ended, and waits a moment for them to acknowledge it."""
        self.protocol.bye()
        for _ in range(BYE_BEATS):
            if self.protocol.unheard:
                await asyncio.sleep(BEAT_S / 10)

    # The methods that the protocol calls (engine.nodes.lead_protocol.LeadEvents)

    def record(self, key: Key, record: bytes) -> int | None:
        try:
            decoded = journal_records.decode(record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec lets the last two through
            raise BadMessage(str(error)) from None
        if (decoded.lease, decoded.attempt) != key or isinstance(decoded, Drawn):
            raise BadMessage(f"a {type(decoded).__name__} of lease {decoded.lease} under lease {key.lease}")
        try:
            self._known[key].check(decoded)
        except NotOfAGroup as error:
            raise BadMessage(str(error)) from None
        self._known[key].take(decoded)
        self._journal.write(decoded)
        match decoded:
            case Grown():
                self._sizes[key] += len(decoded.piece.token_ids_T)
            case Ended():
                self._sizes[key] += len(decoded.trajectory.token_ids_T)
        return self._sizes.pop(key, 0) if isinstance(decoded, Decided) else None

    def granted(self, key: Key, node: str) -> None:
        self._book.granted(key, node)

    def group(self, key: Key, name: str) -> None:
        self._book.made(key)
        if self._recording is not None:
            self._recording.nodes[key.lease] = name
        future = self._made[key]
        if not future.done():
            group = self._known[key].decided(*key)
            assert group is not None, key
            future.set_result(group)

    def happened(self, name: str, segment: bytes) -> None:
        if self._recording is not None:
            self._recording.happened_on(name, segment)

    def start_here(self, key: Key, epoch: int, records: list[bytes]) -> None:
        if self._ended:
            return  # the end cancels each group, which makes room for the next one
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
        assert self._maker_here is not None, "the stage that makes groups has not been asked for"
        journal = GrantJournal(decoded, lambda record: self.protocol.here(key, epoch, encoding.encode(record)))
        try:
            await self._maker_here(drawn.prompt, key.lease, key.attempt, journal=journal)
        except Exception:
            self._ended = True
            raise
        finally:
            del self._here[key]

    def _failed(self, error: Exception) -> None:
        self._ended = True
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _fail(self) -> None:
        """Ends the run with the exception that a callback has raised."""
        await self._failure

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.beat_here()
            self.protocol.tick()

    def _forget_weights(self) -> None:
        self._forget(self._weights)
        self._weights = None

    def _forget(self, published: Published | None) -> None:
        """Withdraws weights that nobody may pull any more, and deletes their files."""
        for name, path in published.names.items() if published is not None else ():
            self._files.withdraw(name)
            path.unlink()
