"""A sandbox host: one process between the node (ZeroMQ) and the slots of one jail. `python -m sandbox.host --help`

Invariants
- Every call received is answered once: with the kernel's verdict, or as "lost" when its slot died under it. Those that
  are open when the host itself ends are the client's to repeat.
- A slot holds at most one call; the id of a call never enters the jail, so no output can pose as another call's.
- A dead slot is replaced. A host lives as long as its jail: it ends when the jail does, and ends the jail when a slot
  does not report within its limit plus GRACE_S. The client then starts another.
- When the node is gone (end of file on stdin, or its death) the host ends, and the jail with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import socket
import stat
import sys
from collections import deque

import msgspec
import uvloop
import zmq

from . import jail, linux, wire
from .guest import REQUEST
from .mailbox import Mailbox
from .slot import READY, REPORT, Report
from .verdict import OomWatch, make_result
from .zygote import INDEX

GRACE_S = 2.0  # a slot has killed its call at the limit; this much later something is wrong with the slot itself
START_S = 10.0  # for nsjail, imports and all slots
ALIVE_S = 1.0


class SlotLink:
    """The host's end of one slot: sends a call in, takes the report out.

    `call` is what the slot runs; until the slot is ready, what its predecessor was running when it died.
    """

    def __init__(self, host: Host, index: int, call: wire.Call | None = None) -> None:
        self._host, self.index, self.call = host, index, call
        self.ready = False
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time() + START_S
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)
        with theirs:
            host.fork_slot(index, theirs.fileno())

    @property
    def idle(self) -> bool:
        return self.ready and self.call is None

    def start(self, call: wire.Call) -> None:
        self.call = call
        self.deadline = self._loop.time() + call.limits.wall_s + GRACE_S
        source = _memfd(call.stdin + call.code)
        self._send(REQUEST.pack(*msgspec.structs.astuple(call.limits), len(call.stdin), len(call.code)), [source])
        os.close(source)

    def cancel(self) -> None:
        self._send(b"c", [])

    def _send(self, message: bytes, fds: list[int]) -> None:
        with contextlib.suppress(OSError):  # a dead slot is about to be noticed
            socket.send_fds(self._socket, [message], fds)

    def _receive(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, REPORT.size, 2)
        except OSError:
            message, fds = b"", []
        if not message:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._host.slot_died(self)
            return
        self.deadline = math.inf
        call, self.call = self.call, None
        if message == READY:
            self.ready = True
            self._host.slot_ready(call)
        else:
            assert call is not None
            self._host.answer(call, make_result(Report(*REPORT.unpack(message)), call.limits, fds, self._host.oom))
            for fd in fds:
                os.close(fd)
        self._host.fill()


class Host:
    """Serves one jail to one node, from `serve` until `leave`."""

    def __init__(self, address: str, slots: int) -> None:
        self.oom = OomWatch()
        self._slots = slots
        self._links: list[SlotLink] = []
        self._queue: deque[wire.Call] = deque()
        self._results: list[wire.CallResult] = []
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._zygote, self._jails_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mailbox = Mailbox(zmq.DEALER, self._from_client)
        self._mailbox.socket.connect(address)

    async def serve(self, staged: jail.Jail | jail.JailUnavailable) -> bool:
        """Answer calls until the node leaves or the jail ends. False when there is none, and the node is told why."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self.leave)
        for source in (0, self._zygote):  # the node and the zygote send nothing: this is their end
            self._loop.add_reader(source, self.leave)
        try:
            if isinstance(staged, jail.JailUnavailable):
                raise staged
            await self._run_jail(staged)
            return True
        except jail.JailUnavailable as error:
            self._mailbox.send(wire.Refused(str(error)))
            return False
        finally:
            self._mailbox.close()

    async def _run_jail(self, staged: jail.Jail) -> None:
        """Start the jail, serve while it lives, end it. JailUnavailable when not every slot comes up."""
        with os.fdopen(os.memfd_create("nsjail-log"), "rb") as log:
            with self._jails_end as control:
                command, null = staged.command(control.fileno()), asyncio.subprocess.DEVNULL
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=null, stdout=null, stderr=log, pass_fds=[control.fileno()]
                )
            try:
                self._links = [SlotLink(self, index) for index in range(self._slots)]
                await asyncio.wait((self._ready, self._over), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
                if self._ready.done():
                    self._mailbox.send(wire.Hello(self._slots, staged.level))
                    self._beat()
                    await self._over
                elif not self._over.done():
                    reason = f"the jail did not start within {START_S:g} s; preload less or free the CPU"
                    raise jail.JailUnavailable(reason)
            finally:
                self.leave()
                self._zygote.close()  # the zygote, PID 1 of the jail, leaves at the end of its socket
                await _ended(process)
            if not self._ready.done():
                raise jail.JailUnavailable(jail.explain(os.pread(log.fileno(), 65536, 0).decode(errors="replace")))

    def leave(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
            for source in (0, self._zygote):
                self._loop.remove_reader(source)

    def _beat(self) -> None:
        """Say that this process is alive, and see that the slots are."""
        self._mailbox.send(wire.Alive())
        if any(link.deadline < self._loop.time() for link in self._links):
            self.leave()
        self._loop.call_later(ALIVE_S, self._beat)

    def fork_slot(self, index: int, fd: int) -> None:
        with contextlib.suppress(OSError):  # a dead zygote is about to be noticed
            socket.send_fds(self._zygote, [INDEX.pack(index)], [fd])

    def slot_ready(self, lost: wire.Call | None) -> None:
        if lost is not None:
            self.answer(lost, wire.ToolResult(outcome="lost"))
        if not self._ready.done() and all(link.ready for link in self._links):
            self._ready.set_result(None)

    def slot_died(self, link: SlotLink) -> None:
        """Replace it. Its call is lost when the successor is ready; if the whole jail is dying it is the client's."""
        if link.ready:
            self._links[link.index] = SlotLink(self, link.index, link.call)
        else:
            self.leave()  # a replacement would fail the same way

    def fill(self) -> None:
        """Give queued calls to idle slots."""
        for link in self._links:
            if self._queue and link.idle:
                link.start(self._queue.popleft())

    def answer(self, call: wire.Call, result: wire.ToolResult) -> None:
        if not self._results:
            self._loop.call_soon(self._flush)
        self._results.append(wire.CallResult(call.id, result))

    def _flush(self) -> None:
        """Send what this tick of the loop produced."""
        results, self._results = self._results, []
        for first in range(0, len(results), wire.BATCH):
            self._mailbox.send(wire.Results(results[first : first + wire.BATCH]))

    def _from_client(self, frames: list[bytes]) -> None:
        message = wire.decode_to_host(frames[0])
        if isinstance(message, wire.Run):
            self._queue.extend(message.calls)
            self.fill()
            return
        for call in [call for call in self._queue if call.id in message.ids]:
            self._queue.remove(call)
            self.answer(call, wire.ToolResult(outcome="killed"))
        for link in self._links:
            if link.call is not None and link.call.id in message.ids:
                link.cancel()


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("call")
    view, offset = memoryview(data), 0
    while offset < len(data):
        offset += os.pwrite(fd, view[offset:], offset)  # pwrite: the reader's offset stays at the start
    return fd


async def serve(options: argparse.Namespace) -> bool:
    staged: jail.Jail | jail.JailUnavailable
    try:
        staged = jail.build(options.nsjail, tuple(options.preload))  # before ZeroMQ: namespaces want a single thread
    except jail.JailUnavailable as error:
        staged = error
    return await Host(options.connect, options.slots).serve(staged)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sandbox.host", description="Serve sandboxed calls to a node.")
    parser.add_argument("--connect", required=True, help="the node's ZeroMQ address")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--nsjail", help="path of the nsjail executable")
    parser.add_argument("--preload", nargs="*", default=[], help="modules imported once, for all calls")
    options = parser.parse_args()
    if not stat.S_ISFIFO(os.fstat(0).st_mode) and not stat.S_ISSOCK(os.fstat(0).st_mode):
        parser.error("its standard input must be a pipe that the node holds: start it through sandbox.Sandbox")
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    sys.exit(0 if uvloop.run(serve(options)) else 1)


if __name__ == "__main__":
    main()
