"""A sandbox host: one process between the node (ZeroMQ) and the slots of one jail. `python -m sandbox.host --help`

Invariants
- Every call received is answered once: with the kernel's verdict, or as "lost" when its slot or the jail died under it.
- A slot holds at most one call; the id of a call never enters the jail, so no output can pose as another call's.
- A dead slot is replaced, a dead jail restarted. A slot that does not report within its limit plus GRACE_S is killed
  with its jail.
- When the node is gone (end of file on stdin, or its death) the host ends, and the jail with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable

from . import jail, linux, wire
from .guest import REQUEST, Request
from .slot import READY, REPORT, Report
from .verdict import OomWatch, file_bytes, make_result
from .zygote import INDEX

GRACE_S = 2.0  # a slot has killed its call at the limit; this much later something is wrong with the slot itself
START_S = 10.0  # for nsjail, imports and the first slot
ALIVE_S = 1.0
Jailed = asyncio.subprocess.Process


class SlotLink:
    """The host's end of one slot: sends a call in, takes the report out."""

    def __init__(self, host: Host, index: int) -> None:
        self.host, self.index = host, index
        self.call: wire.Call | None = None
        self.ready = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)
        with theirs:
            host.send_to_zygote(index, theirs.fileno())

    def start(self, call: wire.Call) -> None:
        limits = call.limits
        request = Request(
            limits.wall_s,
            limits.cpu_s,
            limits.memory_bytes,
            file_bytes(limits),
            limits.processes,
            limits.disk_bytes,
            len(call.code),
        )
        self.call = call
        fds = [_memfd(call.code), *([_memfd(call.stdin)] if call.stdin else [])]
        try:
            socket.send_fds(self._socket, [REQUEST.pack(*request)], fds)
        except OSError:
            self._loop.call_soon(self._dead)
        finally:
            for fd in fds:
                os.close(fd)
        self._timer = self._loop.call_later(limits.wall_s + GRACE_S, self.host.kill_jail)

    def cancel(self) -> None:
        with contextlib.suppress(OSError):  # a dead slot is about to be noticed
            self._socket.send(b"c")

    def close(self) -> wire.Call | None:
        """Forget the slot; the call it held, if any."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        call, self.call = self.call, None
        self._disarm()
        return call

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _receive(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, REPORT.size, 2)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            self._dead()
        elif message == READY:
            self.ready = True
            self.host.slot_ready(self)
        else:
            call, self.call = self.call, None
            assert call is not None
            self._disarm()
            result = make_result(Report(*REPORT.unpack(message)), call.limits, fds[0], fds[1], self.host.oom)
            for fd in fds:
                os.close(fd)
            self.host.answer(call.id, result)
            self.host.slot_free(self)

    def _dead(self) -> None:
        if self._socket.fileno() >= 0:
            self.host.slot_died(self, self.close())


class Host:
    def __init__(self, staged: jail.Jail, slots: int, address: str) -> None:
        from .mailbox import Mailbox, zmq  # after the namespaces, which want a single thread

        self._jail, self._slots = staged, slots
        self.oom = OomWatch()
        self._queue: deque[wire.Call] = deque()
        self._links: list[SlotLink] = []
        self._free: deque[SlotLink] = deque()
        self._results: list[wire.CallResult] = []
        self._all_ready: asyncio.Future[bool]  # False: a slot died before it was ready
        self._zygote: socket.socket | None = None
        self._process: Jailed | None = None
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(zmq.DEALER, self._from_client)
        self._mailbox.socket.connect(address)

    async def serve(self) -> None:
        """Start the jail and answer calls until the node leaves; restart the jail whenever it ends."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._stopping.set)
        self._loop.add_reader(0, self._node_spoke)
        try:
            async with asyncio.TaskGroup() as group:
                stop = group.create_task(self._stopping.wait(), name="host-stop")
                jails = group.create_task(self._run_jails(), name="host-jails")
                beat = group.create_task(self._beat(), name="host-beat")
                await asyncio.wait((stop, jails), return_when=asyncio.FIRST_COMPLETED)
                for task in (stop, jails, beat):
                    task.cancel()
        finally:
            self._loop.remove_reader(0)
            self._mailbox.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._mailbox.send(wire.encode(wire.Alive()))

    async def _run_jails(self) -> None:
        """Keep one jail running. The first that cannot start ends the host, with the reason sent to the client."""
        greeted = False
        while True:
            try:
                async with self._jail_started() as process:
                    if not greeted:
                        self._mailbox.send(wire.encode(wire.Hello(self._slots, self._jail.level)))
                        greeted = True
                    await process.wait()
            except jail.JailUnavailable as error:
                self._mailbox.send(wire.encode(wire.Refused(str(error))))
                return

    @contextlib.asynccontextmanager
    async def _jail_started(self) -> AsyncIterator[Jailed]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, os.fdopen(os.memfd_create("nsjail-log"), "w+b") as log:
            ours.setblocking(False)
            with theirs:
                command = self._jail.command(theirs.fileno())
                null = asyncio.subprocess.DEVNULL
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=null, stdout=null, stderr=log, pass_fds=[theirs.fileno()]
                )
            try:
                await self._started(ours, process, log.fileno())
                yield process
            finally:
                self._jail_ended()
                ours.close()  # the zygote, PID 1 of the jail, leaves at the end of its socket
                await _ended(process)

    async def _started(self, control: socket.socket, process: Jailed, log: int) -> None:
        """Wait for the zygote, then for all slots. A jail that ends before that is explained by its log."""
        message = b""
        self._all_ready = self._loop.create_future()
        try:
            async with asyncio.timeout(START_S):
                with contextlib.suppress(ConnectionError):
                    message = await self._loop.sock_recv(control, 4096)
                if message == READY:
                    self._zygote, self._process = control, process
                    self._links = [SlotLink(self, index) for index in range(self._slots)]
                    if await self._all_ready:
                        return
        except TimeoutError:
            reason = f"the jail did not start within {START_S:g} s; preload less or free the CPU"
            raise jail.JailUnavailable(reason) from None
        control.close()
        await _ended(process)
        raise jail.JailUnavailable(message.decode() or jail.explain(os.pread(log, 65536, 0).decode(errors="replace")))

    def send_to_zygote(self, index: int, fd: int) -> None:
        assert self._zygote is not None
        with contextlib.suppress(OSError):  # a dead zygote is about to be noticed
            socket.send_fds(self._zygote, [INDEX.pack(index)], [fd])

    def kill_jail(self) -> None:
        """Last resort: a slot does not answer."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _jail_ended(self) -> None:
        self._zygote = self._process = None
        self._free.clear()
        for link in self._links:
            if (call := link.close()) is not None:
                self.answer(call.id, wire.ToolResult(outcome="lost"))
        self._links = []

    def slot_died(self, link: SlotLink, call: wire.Call | None) -> None:
        if call is not None:
            self.answer(call.id, wire.ToolResult(outcome="lost"))
        if link in self._free:
            self._free.remove(link)
        if not link.ready:  # its replacement would fail the same way
            if self._all_ready.done():
                self.kill_jail()
            else:
                self._all_ready.set_result(False)
        elif self._zygote is not None:
            self._links[link.index] = SlotLink(self, link.index)

    def slot_ready(self, link: SlotLink) -> None:
        if all(link.ready for link in self._links) and not self._all_ready.done():
            self._all_ready.set_result(True)
        self.slot_free(link)

    def slot_free(self, link: SlotLink) -> None:
        if self._queue:
            link.start(self._queue.popleft())
        else:
            self._free.append(link)

    def answer(self, call: int, result: wire.ToolResult) -> None:
        if not self._results:
            self._loop.call_soon(self._flush)
        self._results.append(wire.CallResult(call, result))

    def _flush(self) -> None:
        """Send what this tick of the loop produced."""
        results, self._results = self._results, []
        for first in range(0, len(results), wire.BATCH):
            self._mailbox.send(wire.encode(wire.Results(results[first : first + wire.BATCH])))

    def _from_client(self, frames: list[bytes]) -> None:
        message = wire.decode_to_host(frames[0])
        if isinstance(message, wire.Run):
            self._queue.extend(message.calls)
            while self._queue and self._free:
                self._free.popleft().start(self._queue.popleft())
        else:
            self._cancel(frozenset(message.ids))

    def _cancel(self, ids: frozenset[int]) -> None:
        for call in [call for call in self._queue if call.id in ids]:
            self._queue.remove(call)
            self.answer(call.id, wire.ToolResult(outcome="killed"))
        for link in self._links:
            if link.call is not None and link.call.id in ids:
                link.cancel()

    def _node_spoke(self) -> None:
        if not os.read(0, 4096):
            self._loop.remove_reader(0)
            self._stopping.set()


async def _ended(process: Jailed) -> None:
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


async def _refuse(address: str, reason: str) -> None:
    from .mailbox import Mailbox, zmq

    mailbox = Mailbox(zmq.DEALER, lambda _: None)
    mailbox.socket.connect(address)
    mailbox.send(wire.encode(wire.Refused(reason)))
    mailbox.close()


async def _serve(staged: jail.Jail, slots: int, address: str) -> None:
    await Host(staged, slots, address).serve()


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sandbox.host", description="Serve sandboxed calls to a node.")
    parser.add_argument("--connect", required=True, help="the node's ZeroMQ address")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--preload", default="", help="modules imported once, separated by commas")
    parser.add_argument("--nsjail", default=None, help="path of the nsjail executable")
    options = parser.parse_args(arguments)
    linux.die_with_parent(signal.SIGTERM)
    preload = tuple(name for name in options.preload.split(",") if name)
    try:
        staged = jail.build(options.nsjail, preload)
    except jail.JailUnavailable as error:
        asyncio.run(_refuse(options.connect, str(error)))
        sys.exit(1)
    import uvloop

    uvloop.run(_serve(staged, options.slots, options.connect))


if __name__ == "__main__":
    main()
