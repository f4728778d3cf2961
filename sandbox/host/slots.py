"""The host's side of a jail: the jail of a tier (nsjail and its zygote), and a handle for each slot and session in it.

Invariants
- A slot runs at most one call. The id of a call never enters the jail, so no output can pose as another call's.
- A handle reports once that its slot has ended, with the call that it held. A jail that ends ends all its slots.
- A slot is killed if it does not announce the end of its call within the call's limit plus GRACE_S, if it then does not
  report within DEATH_S, or if it sends anything that is not in the protocol.
- Whoever made a handle closes it, once; `gone` tells when its index and its control group are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from struct import Struct

import msgspec

from sandbox import wire
from sandbox.host import nsjail
from sandbox.host.cgroup import Cgroup, Cgroups
from sandbox.host.verdict import OomWatch, Outputs, cell_result, make_result
from sandbox.inside.guest import FIRST_UID, LENGTH, REQUEST
from sandbox.inside.notebook import CELL_REPORT, COPY_STATE, CellReport
from sandbox.inside.slot import ENDED, READY, REPORT, SlotReport
from sandbox.inside.zygote import FORK
from sandbox.tiers import Tier

GRACE_S = 2.0  # a slot kills its call at the limit; after this much more the slot itself is broken
# Processes that share much memory take seconds to die; if we took that for our fault, code could hide its own
DEATH_S = 30.0
START_S = 10.0  # for nsjail, imports and the first slot
SLOT_BYTES = 32 << 20  # a slot's own memory, in addition to its call's
SLOT_PROCESSES = 4  # the slot, the init of the call, and for a session its init and the copy of its state
CREDENTIALS = Struct("iii")
# Memory of a session that its group does not count: what its init wrote before, page tables, namespaces
UNCHARGED_BYTES = 2 << 20
NO_REPORT = (struct.error, ValueError, IndexError, OverflowError, OSError)  # raised by bytes that are not a report
MAX_HANDLES = nsjail.ID_COUNT - FIRST_UID  # slots and sessions at once
SPARE_FDS = 256  # descriptors of the host, in addition to one for each slot


class SlotHandle:
    """One slot. `start` sends a call in; its `report` is called with the result, and `ended` when the slot is gone."""

    def __init__(self, home: TierJail, index: int, ended: Callable[[SlotHandle], None]) -> None:
        self.home, self.index, self._ended = home, index, ended
        self.call: wire.RunRequest | None = None
        self.ready: Callable[[], None] | None = None
        self.pid = 0
        self.group: Cgroup | None = None
        self.out_of_memory = False  # whether the kernel killed the slot itself
        self._dead = False
        self.deadline = home.loop.time() + START_S
        self._report: Callable[[wire.ToolResult], None] | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        home.loop.add_reader(self._socket, self._receive)
        with theirs:
            home.fork(index, self.is_session, theirs.fileno())

    is_session = False
    backup = False  # for a session: take a fork snapshot before the next cell
    _report_size = REPORT.size

    def start(self, call: wire.RunRequest, report: Callable[[wire.ToolResult], None]) -> None:
        """Sets the limits of a call and runs it; nothing else may be running."""
        assert self.call is None
        assert self.pid
        self.call, self._report = call, report
        self.deadline = self.home.loop.time() + call.limits.wall_s + GRACE_S
        limits = call.limits
        if self.group is not None:
            self.group.oom_struck()  # forgets a kill in an earlier call, which tells nothing about this one
            with contextlib.suppress(OSError):  # refused if it is below what the group uses; then the old limit holds
                memory_bytes = limits.memory_bytes + limits.disk_bytes + SLOT_BYTES
                self.group.limit(memory_bytes, limits.processes + SLOT_PROCESSES)
        source = _memfd(call.stdin + call.code)
        self._send(self._pack(call), [source])
        os.close(source)

    def _pack(self, call: wire.RunRequest) -> bytes:
        board = LENGTH.size + call.limits.output_bytes if call.display else 0
        seed = -1 if call.seed is None else call.seed
        limits = msgspec.structs.replace(call.limits, processes=self.home.processes(call.limits.processes))
        return REQUEST.pack(*msgspec.structs.astuple(limits), len(call.stdin), len(call.code), board, seed)

    def cancel(self) -> None:
        self._send(b"c", [])

    def kill(self) -> None:
        """Ends the slot, and with it what it runs. Its end is reported."""
        if self.pid and not self._dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets the slot end by itself; nothing more is reported."""
        self.home.slots.discard(self)
        self.home.loop.remove_reader(self._socket)
        self._socket.close()

    def gone(self) -> bool:
        """Returns whether nothing of a closed slot remains, as far as its group tells."""
        return self.group is None or self.group.remove()

    def _send(self, message: bytes, fds: list[int]) -> None:
        with contextlib.suppress(OSError):  # a dead slot is about to be noticed
            socket.send_fds(self._socket, [message], fds)

    def _receive(self) -> None:
        try:
            message, ancillary, _, _ = self._socket.recvmsg(self._report_size + 1, 128)
        except BlockingIOError:
            return
        except OSError:
            message, ancillary = b"", []
        fds = [fd for _, kind, data in ancillary if kind == socket.SCM_RIGHTS for fd in memoryview(data).cast("i")]
        try:
            self._heard(message, [data for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS], fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _heard(self, message: bytes, credentials: list[bytes], fds: list[int]) -> None:
        """Handles a message of the slot. One that no slot sends, or an empty one (the slot's end), ends the slot."""
        if message == READY:
            expected = self._became_ready(credentials)
        elif message == ENDED:
            expected = self._call_is_ending()
        else:
            expected = self._reported(message, fds)
        if not expected:
            self.kill()
            self._dead = True
            self.out_of_memory = self.group is not None and self.oom_struck()
            self._ended(self)

    def _became_ready(self, credentials: list[bytes]) -> bool:
        if self.pid or not credentials:
            return False
        pid, _, _ = CREDENTIALS.unpack(credentials[0])
        if not self._greet(pid):
            return False
        self.deadline = math.inf
        if self.ready is not None:
            self.ready()
        return True

    def _call_is_ending(self) -> bool:
        """Notes that all processes of the call are about to die, which may take a while."""
        if self.call is None:
            return False
        self.deadline = self.home.loop.time() + DEATH_S
        return True

    def _reported(self, message: bytes, fds: list[int]) -> bool:
        if not message or self.call is None:
            return False
        result = self._read(message, fds, self.call)
        if result is None:
            return False
        report = self._report
        assert report is not None
        self.call = self._report = None
        self.deadline = math.inf
        report(result)
        return True

    def _greet(self, pid: int) -> bool:
        """Gives the slot its control group; returns whether it has one."""
        groups = self.home.groups
        if groups is not None:
            kind = "session" if self.is_session else "slot"
            try:
                self.group = groups.add(f"{kind}-{self.home.tier.name}-{self.index}", pid)
            except ProcessLookupError:  # dead already
                return False
            except OSError as error:  # it must not run without limits
                self.home.reason = f"no control group for a slot: {error}"
                return False
        self.pid = pid
        return True

    def _read(self, message: bytes, fds: list[int], call: wire.RunRequest) -> wire.ToolResult | None:
        """Returns the result; None if the message is not a report."""
        try:
            return self._result(message, Outputs(fds), call)
        except NO_REPORT:
            return None

    def _result(self, message: bytes, outputs: Outputs, call: wire.RunRequest) -> wire.ToolResult:
        result = make_result(SlotReport(*REPORT.unpack(message)), call.limits, outputs, self.oom_struck)
        return msgspec.structs.replace(result, jailed=self.home.jailed)

    def oom_struck(self) -> bool:
        """Returns whether the kernel killed for memory in here since the last call."""
        return self.group.oom_struck() if self.group is not None else self.home.oom.struck()

    @property
    def memory_bytes(self) -> int:
        if self.group is None:
            return self.home.session_estimate_bytes
        return self.group.memory_bytes + UNCHARGED_BYTES


class SessionHandle(SlotHandle):
    """One session."""

    is_session = True
    _report_size = CELL_REPORT.size

    def _pack(self, call: wire.RunRequest) -> bytes:
        return super()._pack(call) + COPY_STATE.pack(self.backup)

    def _result(self, message: bytes, outputs: Outputs, call: wire.RunRequest) -> wire.ToolResult:
        return cell_result(CellReport(*CELL_REPORT.unpack(message)), call.limits, outputs, self.oom_struck)


class Indexes:
    """The numbers of slots. A number is used again when nothing of its slot remains."""

    def __init__(self) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = min(MAX_HANDLES, max(descriptors - SPARE_FDS, descriptors // 4))
        self.free = list(range(count - 1, -1, -1))
        self._leaving: list[SlotHandle] = []

    def release(self, slot: SlotHandle) -> None:
        if slot.gone():
            self.free.append(slot.index)
        else:
            self._leaving.append(slot)

    def look(self) -> None:
        """Releases closed slots of which nothing remains by now."""
        self._leaving, leaving = [], self._leaving
        for slot in leaving:
            self.release(slot)


class TierJail:
    """The jail of one tier, from `run` until it ends; `open_slot` makes slots and sessions.

    served: how often something in it became ready or answered. reason: why it was ended, in addition to its log.
    """

    session_estimate_bytes = 16 << 20  # for a session without a group of its own, which would tell

    def __init__(self, template: nsjail.JailTemplate, tier: Tier, oom: OomWatch) -> None:
        self.tier, self.oom = tier, oom
        self.groups = template.groups if isinstance(template.groups, Cgroups) else None
        self.jailed = template.tree is not None
        self.slots: set[SlotHandle] = set()
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self.loop.create_future()
        self.served = 0
        self.reason = ""
        self._missed_at = -1
        self._template = template
        self._zygote, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote.setblocking(False)
        self.loop.add_reader(self._zygote, self.stop)  # it sends nothing, so this is its end

    async def run(self) -> str:
        """Starts the jail and waits for its end, or for `stop`. Returns the log of nsjail and the zygote."""
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        with os.fdopen(os.memfd_create("nsjail-log"), "rb") as log:
            process = None
            with self._theirs as control:
                command = self._template.command(control.fileno(), proc, self.tier.preload)
                try:
                    process = await asyncio.create_subprocess_exec(
                        *command,
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=asyncio.subprocess.DEVNULL,
                        stderr=log,
                        pass_fds=[control.fileno(), proc],
                        start_new_session=True,
                    )
                except OSError as error:
                    self.give_up(
                        f"cannot run {command[0]}: {error.strerror}. Fix: repair it, or set SandboxConfig.nsjail"
                    )
                finally:
                    os.close(proc)
            try:
                await self.over
            finally:
                self.stop()
                self._zygote.close()  # the zygote, PID 1 of the jail, leaves at the end of its socket
                if process is not None:
                    await _ended(process)
            return os.pread(log.fileno(), 65536, 0).decode(errors="replace")

    def stop(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
            self.loop.remove_reader(self._zygote)

    def give_up(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.stop()

    def open_slot(self, index: int, *, session: bool, ended: Callable[[SlotHandle], None]) -> SlotHandle:
        """Forks a slot or a session; `ended` is told if it ends by itself."""
        slot = (SessionHandle if session else SlotHandle)(self, index, ended)
        self.slots.add(slot)
        return slot

    def processes(self, limit: int) -> int:
        """Returns a call's RLIMIT_NPROC. With a single id the kernel counts all that runs in the jail."""
        single = self._template.first_id is None
        return min(1 + len(self.slots) * (limit + SLOT_PROCESSES), wire.MAX_LIMIT) if single else limit

    def missed(self) -> bool:
        """Notes that something was not ready in time; returns whether to blame the jail, since nothing progresses."""
        again, self._missed_at = self._missed_at == self.served, self.served
        return again or self.served == 0

    def fork(self, index: int, session: bool, fd: int) -> None:
        try:
            socket.send_fds(self._zygote, [FORK.pack(index, session)], [fd])
        except OSError:  # it is dead, or takes nothing any more
            self.stop()


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
        offset += os.pwrite(fd, view[offset:], offset)  # pwrite, since the reader's offset has to stay at the start
    return fd
