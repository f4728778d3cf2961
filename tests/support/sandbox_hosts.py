"""Hosts for tests: one that speaks the protocol and runs nothing, and real ones as processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import zmq

from sandbox import ToolResult, wire
from sandbox.mailbox import Mailbox
from tests.support.paths import ROCSTAR, ROOT

Reply = Callable[[wire.RunRequest], ToolResult | None]


def echo(call: wire.RunRequest) -> ToolResult:
    return ToolResult(outcome="ok", stdout=call.code.decode(), session_state="kept" if call.step else None)


class FakeHost:
    """Answers each call with `reply`, at once; None: not at all. Says it is alive when it hears a ping."""

    def __init__(
        self,
        address: str,
        *,
        slots: int = 2,
        tiers: tuple[str, ...] = ("bare",),
        reply: Reply = echo,
        level: str = "full",
    ) -> None:
        self.calls: list[wire.RunRequest] = []
        self.stopped: list[int] = []
        self.ended: list[bytes] = []
        self.pings = self.largest_batch = self.held = self.most_held = 0
        self.reply = reply
        self.mute = False
        self.mailbox = Mailbox(zmq.DEALER, self._receive)
        self.mailbox.socket.connect(address)
        self.mailbox.send(wire.Hello(slots, level, list(tiers)))

    def _receive(self, frames: list[bytes]) -> None:
        match wire.decode_to_host(frames[0]):
            case wire.Ping():
                self.pings += 1
                if not self.mute:
                    self.mailbox.send(wire.Alive())
            case wire.Run(calls):
                self.calls += calls
                self.largest_batch = max(self.largest_batch, len(calls))
                self.held += len(calls)
                self.most_held = max(self.most_held, self.held)
                self.answer([(call.id, self.reply(call)) for call in calls])
            case wire.CancelCalls(ids):
                self.stopped += ids
            case wire.EndSessions(sessions):
                self.ended += sessions

    def answer(self, answers: list[tuple[int, ToolResult | None]]) -> None:
        results = [wire.CallResult(number, result) for number, result in answers if result is not None]
        self.held -= len(results)
        if results:
            self.mailbox.send(wire.Results(results))

    def close(self) -> None:
        self.mailbox.close()


@asynccontextmanager
async def host_process(address: str, *options: str, root: Path = ROOT) -> AsyncIterator[asyncio.subprocess.Process]:
    """`rocstar sandbox-host connect=address ...` from `root`, killed at the end if it is still there."""
    words = [*ROCSTAR, "sandbox-host", f"connect={address}", *options]
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, cwd=root, stdin=null, stderr=pipe, start_new_session=True)
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
