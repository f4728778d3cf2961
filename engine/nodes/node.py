"""A rollout node's shell: a DEALER socket, and a fleet that makes the groups that the lead grants.

Invariants
- The groups that the lead grants are made by the same code as on one machine (`engine.stages.group.GroupMaker`); each
  turn's record goes to the lead when the turn has ended.
- Weights are pulled before any replica pauses for them. A version is reported as live when all replicas of the node
  have it and have passed the canary.
- A node that drains makes the groups that it has for `grace_s` seconds at most. What is not made then goes to others,
  which continue after the last turn that reached the lead.
- A pull that fails is tried again; meanwhile the node reports the version that it has, and gets no group that needs a
  newer one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import zmq

from engine import encoding
from engine.errors import first_error
from engine.fleet.fleet import Fleet
from engine.nodes import deltas
from engine.nodes.config import NodeConfig
from engine.nodes.grant_journal import GrantJournal
from engine.nodes.ledger import Key
from engine.nodes.messages import Announce, BadMessage, Build, FileInfo, Job, ToLead, ToNode, decode_to_node, encode
from engine.nodes.node_protocol import NodeProtocol
from engine.nodes.pulls import PullFailed, fetch
from engine.recording import files
from engine.recording.recording import SEGMENT_S
from engine.recording.segments import segment_of
from engine.run import journal_records
from engine.run.journal_records import Decided, Drawn, Record
from engine.stages.group import GroupMaker
from engine.telemetry.timeline import Events, Timeline
from engine.types import PublishedWeights
from sandbox.keys import HostKeys, trust
from sandbox.mailbox import Mailbox

BEAT_S = 1.0


class NodeRefused(RuntimeError):
    """The lead does not take this node; the message says why."""


class NodeDrained(RuntimeError):
    """The node has left the run, as it was told to by SIGTERM."""


class LeadGone(RuntimeError):
    """Nothing came from the lead for longer than the node is patient."""


class RolloutNode:
    """`await RolloutNode(...).run()` works for the lead until the run has ended.

    folder: where pulled weights lie, on a memory file system. tokens_sampled: returns the tokens that this node has
    sampled. timeline: its events are sent to the lead for the run's record; None sends nothing. gpus: those of the
    fleet (`engine.telemetry.gpus.gpu_ids`).
    """

    def __init__(
        self,
        config: NodeConfig,
        keys: HostKeys | None,
        *,
        build: Build,
        fleet: Fleet,
        maker: GroupMaker,
        folder: Path,
        tokens_sampled: Callable[[], int],
        note: Callable[[str], None],
        timeline: Timeline | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        self._timeline = timeline
        self._config, self._keys, self._fleet, self._maker, self._folder = config, keys, fleet, maker, folder
        self._tokens_sampled, self._note = tokens_sampled, note
        self._version = -1  # the one that is live on all replicas
        self._announced: Announce | None = None
        self._pulled: tuple[int, Path] | None = None  # the newest copy
        self._load = -1  # the version that the lead lets this node load
        self._news = asyncio.Event()
        self._files: list[Path] = []  # files of the weights that the replicas have loaded
        self._groups: dict[int, asyncio.Task[None]] = {}  # number of the work -> its task
        self._end_of_run: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drains = False
        self._grace: asyncio.TimerHandle | None = None
        self._mailbox = Mailbox(zmq.DEALER, self._receive)
        self._last_message_at = asyncio.get_running_loop().time()
        self.protocol = NodeProtocol(
            name=config.name,
            build=build,
            capacity_tokens=fleet.kv_tokens[0],
            replicas=len(fleet.live),
            make_session=lambda: secrets.token_bytes(16),
            post=self._post,
            events=self,
            gpus=gpus,
        )

    async def run(self) -> None:
        """Returns when the run has ended. Raises NodeDrained, NodeRefused, LeadGone, or what ends the fleet."""
        if self._keys is not None:
            trust(self._mailbox, self._keys)
        self._mailbox.connect(self._config.lead)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                loops = [
                    self._tasks.create_task(self._beat(), name="node-beat"),
                    self._tasks.create_task(self._keep_current(), name="node-weights"),
                    self._tasks.create_task(self._send_events(), name="node-record"),
                ]
                try:
                    await self._end_of_run
                except asyncio.CancelledError:  # by a signal, or because the fleet has ended
                    self.protocol.leave()  # so the lead need not wait until the node is silent
                    raise
                for task in [*loops, *self._groups.values()]:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        finally:
            if self._grace is not None:
                self._grace.cancel()
            self._show_ready(False)
            self._mailbox.close()

    def drain(self) -> None:
        """Makes the groups that it has, for `grace_s` seconds at most, and ends `run`, which raises NodeDrained."""
        if self._drains:
            return
        self._drains = True
        self._note(f"is told to leave; it has {len(self.protocol.held)} groups and {self._config.grace_s:g} s for them")
        self.protocol.drain()
        self._grace = asyncio.get_running_loop().call_later(self._config.grace_s, self.protocol.leave)
        self._tick()

    # The methods that the protocol calls (engine.nodes.node_protocol.NodeEvents)

    def start(self, key: Key, work: int, records: list[bytes]) -> None:
        name = f"group-{key.lease}-{key.attempt}"
        self._groups[work] = self._tasks.create_task(self._make(key, work, records), name=name)

    def stop(self, work: int) -> None:
        if work in self._groups:
            self._groups[work].cancel()

    def hold(self, on: bool) -> None:
        self._fleet.hold(on)
        self._show_ready(not on)

    def weights(self, announce: Announce) -> None:
        self._announced = announce
        self._news.set()

    def load(self, version: int) -> None:
        self._load = version
        self._news.set()

    def refused(self, reason: str) -> None:
        self._end(NodeRefused(f"the lead refuses this node: {reason}"))

    def drained(self) -> None:
        self._end(NodeDrained("was told to leave, and has left the run"))

    def bye(self) -> None:
        self._tick()  # acknowledges the order, for which the lead waits
        self._end(None)

    def note(self, line: str) -> None:
        self._note(line)

    def _show_ready(self, on: bool) -> None:
        if (file := self._config.ready_file) is not None:
            file.touch() if on else file.unlink(missing_ok=True)

    async def _make(self, key: Key, work: int, records: list[bytes]) -> None:
        def tell(record: Record) -> None:
            self.protocol.tell(key, work, encoding.encode(record), last=isinstance(record, Decided))

        try:
            known = [journal_records.decode(record) for record in records]
            drawn = known[0]
            assert isinstance(drawn, Drawn)
            await self._maker(drawn.prompt, key.lease, key.attempt, journal=GrantJournal(known, tell))
        finally:
            del self._groups[work]

    async def _keep_current(self) -> None:
        """Pulls and loads the newest announced weights."""
        while True:
            await self._news.wait()
            self._news.clear()
            announce = self._announced
            assert announce is not None
            if announce.version == self._version:
                continue  # announced again under a new session
            if self._pulled is None or self._pulled[0] != announce.version:
                await self._prefetch(announce)
            elif announce.at_once or self._load == announce.version:
                await self._update(announce, self._pulled[1])

    async def _prefetch(self, announce: Announce) -> None:
        """Pulls announced weights while the replicas sample."""
        try:
            path = await self._pull(announce)
        except (PullFailed, OSError) as error:
            self._note(f"weights {announce.version} could not be pulled, and the node tries again: {error}")
            await asyncio.sleep(BEAT_S)
        else:
            if self._pulled is not None and self._pulled[0] != self._version:
                self._pulled[1].unlink()  # replaced before it was loaded
            self._pulled = announce.version, path
            self._tick()
        self._news.set()

    async def _update(self, announce: Announce, path: Path) -> None:
        canary = np.frombuffer(announce.canary, np.float32)
        await self._fleet.update_weights(PublishedWeights(str(path), announce.version, canary, announce.canary_further))
        self._version = announce.version
        self._forget_older(path)
        self._tick()
        self._news.set()

    async def _pull(self, announce: Announce) -> Path:
        """Returns the file of these weights: a link to the lead's if this node can see that, else a pulled copy."""
        path = self._folder / f"pulled-{announce.version}-{secrets.token_hex(4)}.safetensors"
        with suppress(OSError):
            if os.stat(announce.path).st_ino == announce.inode:
                os.link(announce.path, path)
                if (path.stat().st_ino, path.stat().st_size) == (announce.inode, announce.file.size_bytes):
                    return path
                path.unlink()
        if announce.delta is not None and self._pulled is not None and self._pulled[0] == announce.base:
            try:
                return await self._pull_delta(announce, announce.delta, self._pulled[1], path)
            except deltas.NotTheSame as error:
                self._note(f"weights {announce.version} are pulled whole: {error}")
        await fetch(self._config.lead, self._keys, announce.file.name, announce.file, path)
        return path

    async def _pull_delta(self, announce: Announce, delta: FileInfo, old: Path, path: Path) -> Path:
        """Makes the file of these weights from a delta. Raises NotTheSame, and what `fetch` raises."""
        changes = path.with_suffix(".delta")
        try:
            await fetch(self._config.lead, self._keys, delta.name, delta, changes)
            await asyncio.to_thread(deltas.apply, old, changes, announce.file, path)
        finally:
            changes.unlink(missing_ok=True)
        return path

    def _forget_older(self, newest: Path) -> None:
        """Deletes older weights. The newest stay, for a replica that is replaced."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = [newest]

    async def _beat(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._tick()
            await asyncio.sleep(BEAT_S)
            if clock() - self._last_message_at > self._config.patience_s:
                self._end(LeadGone(f"the lead {self._config.lead} was silent for {self._config.patience_s:g} s"))

    async def _send_events(self) -> None:
        """Sends the events of the timeline every few seconds, for the run's record."""
        while self._timeline is not None:
            await asyncio.sleep(SEGMENT_S)
            events = self._timeline.drain()
            self.protocol.happened(await asyncio.to_thread(_packed, events))

    def _tick(self) -> None:
        self.protocol.tick(
            version=self._version,
            pulled=-1 if self._pulled is None else self._pulled[0],
            free_tokens=self._fleet.kv_tokens[1],
            tokens=self._tokens_sampled(),
        )

    def _post(self, message: ToLead) -> None:
        self._mailbox.send_frames(encode(message))

    def _receive(self, frames: list[bytes]) -> None:
        self._last_message_at = asyncio.get_running_loop().time()
        try:
            self.protocol.receive(decode_to_node(b"".join(frames)))
        except BadMessage as error:
            self._end(NodeRefused(f"the lead sent a message that is not of this protocol: {error}"))
        except Exception as error:  # this is a callback, whose exceptions would only be logged
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self._end_of_run.done():
            if error is None:
                self._end_of_run.set_result(None)
            else:
                self._end_of_run.set_exception(error)


def _packed(events: Events) -> bytes:
    return files.packed(segment_of(events, step=0))  # the lead knows the step


async def ask(config: NodeConfig, keys: HostKeys | None, question: ToLead) -> ToNode:
    """Returns the lead's answer. It asks each second for as long as the node is patient, then raises LeadGone.

    Raises NodeRefused for an answer that is not of this protocol.
    """
    answers: asyncio.Queue[list[bytes]] = asyncio.Queue()
    mailbox = Mailbox(zmq.DEALER, answers.put_nowait)
    try:
        if keys is not None:
            trust(mailbox, keys)
        mailbox.connect(config.lead)
        async with asyncio.timeout(config.patience_s):
            while True:
                mailbox.send_frames(encode(question))
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        return decode_to_node(b"".join(await answers.get()))
    except BadMessage as error:
        raise NodeRefused(
            f"{config.lead} does not answer in this protocol: {error}. Fix: the same sources on the lead and here"
        ) from None
    except TimeoutError:
        raise LeadGone(
            f"no lead answers at {config.lead} within {config.patience_s:g} s. "
            "Fix: check that it runs, and that its keys are those of this folder"
        ) from None
    finally:
        mailbox.close(0)


async def pull_checkpoint(config: NodeConfig, keys: HostKeys | None, job: Job, folder: Path) -> None:
    """Pulls the files of the lead's checkpoint into a folder. Raises PullFailed."""
    for info in job.files:
        if Path(info.name).name != info.name:
            raise PullFailed(f"the lead names a file outside of the checkpoint, {info.name!r}")
        await fetch(config.lead, keys, f"checkpoint/{info.name}", info, folder / info.name)
