"""Where the lead listens: a ROUTER socket with its keys, the files that may be pulled, and the answer to `Ask`.

It opens before the run's parts do, because the learner's ranks on other hosts come through it.

Invariants
- Without keys only this machine can connect; with keys only nodes whose public key is in the folder. The run's notes
  name who is turned away: each kind of refusal once, and again when it has come ten times as often. So one that comes
  again and again leaves room for the others.
- Messages are dropped until a receiver is attached. Nodes repeat those that need an answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
from msgspec import structs
from zmq.utils.monitor import parse_monitor_message

from engine.nodes.build import build_of
from engine.nodes.config import LeadConfig
from engine.nodes.messages import (
    Ask,
    BadMessage,
    Happened,
    Hello,
    Job,
    Leave,
    NodeBeat,
    Numbered,
    Pull,
    ToNode,
    decode_to_lead,
    encode,
)
from engine.nodes.pulls import FileServer, info_of
from engine.recipe import name_of
from sandbox.keys import guard, load_node
from sandbox.mailbox import Mailbox

REFUSALS = 100  # after so many notes about refusals, new kinds are only counted
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ListenFailed(RuntimeError):
    """The lead cannot listen on its address."""


Receiver = Callable[[bytes, Hello | NodeBeat | Leave | Happened | Numbered], None]


class Door:
    """`async with Door(...) as door`. checkpoint: the folder whose files nodes pull. note: gets lines for the user."""

    def __init__(self, config: LeadConfig, *, checkpoint: Path, note: Callable[[str], None]) -> None:
        self.files = FileServer()
        self.refused = 0  # connections and messages
        self._receiver: Receiver = lambda address, message: None
        self._failed: Callable[[Exception], None] = _raise
        self._taken: Callable[[], dict[str, str]] = lambda: self.job.taken
        self._config, self._checkpoint, self._note = config, checkpoint, note
        self._times: Counter[str] = Counter()  # how often each refusal has come
        self._lines = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.files.close)
            self.job = await self._job()
            self._listen(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def post(self, address: bytes, message: ToNode) -> None:
        self._mailbox.send_frames(address, encode(message))

    async def _job(self) -> Job:
        files = [path for path in sorted(self._checkpoint.iterdir()) if path.is_file()]
        for path in files:
            self.files.offer(f"checkpoint/{path.name}", path)
        infos = await asyncio.to_thread(lambda: [info_of(path) for path in files])
        build = await asyncio.to_thread(build_of, self._config.recipe)
        return Job(
            build=build,
            recipe=name_of(self._config.recipe),
            options=list(self._config.options),
            files=infos,
            learner=self._config.learner,
            taken=dict.fromkeys(self._config.gpus, "the lead"),
        )

    def _listen(self, stack: AsyncExitStack) -> None:
        self._mailbox = Mailbox(zmq.ROUTER, self._receive)
        stack.callback(self._mailbox.close)
        if self._config.keys is not None:
            gate = guard(self._mailbox, load_node(self._config.keys), self._turned_away)
            stack.callback(gate.close, 0)
        try:
            self._mailbox.bind(self._config.listen)
        except zmq.ZMQError as error:
            raise ListenFailed(f"cannot listen on nodes={self._config.listen}: {error}. Fix: another port") from None
        self._watch_handshakes(stack)

    def _watch_handshakes(self, stack: AsyncExitStack) -> None:
        """Counts connections that end before they show a key: those of another protocol, or for another lead."""
        monitor = self._mailbox.socket.get_monitor_socket(_HANDSHAKE_FAILED)
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

    def attach(
        self, receiver: Receiver, failed: Callable[[Exception], None], taken: Callable[[], dict[str, str]]
    ) -> None:
        """Sends messages to `receiver` from now on, and what it raises to `failed`. taken: as in `Job`."""
        self._receiver, self._failed, self._taken = receiver, failed, taken

    def _receive(self, frames: list[bytes]) -> None:
        address, *rest = frames
        try:
            message = decode_to_lead(b"".join(rest))
        except BadMessage as error:
            self._refuse(f"a message is not of this protocol: {error}")
            return
        try:
            match message:
                case Pull():
                    self.post(address, self.files.answer(message))
                case Ask():
                    self.post(address, structs.replace(self.job, taken=self._taken()))
                case _:
                    self._receiver(address, message)
        except Exception as error:  # this is a callback, whose exceptions would only be logged
            self._failed(error)

    def _turned_away(self, address: str) -> None:
        self._refuse(f"a connection from {address} without a key of this run is turned away")

    def _refuse(self, line: str) -> None:
        self.refused += 1
        if line not in self._times and self._lines >= REFUSALS:
            return
        self._times[line] += 1
        times = self._times[line]
        if times == 10 ** (len(str(times)) - 1):
            self._lines += 1
            self._note(line if times == 1 else f"{line} ({times:,} times so far)")


def _raise(error: Exception) -> None:
    raise error
