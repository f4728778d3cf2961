"""A slot: runs one call at a time, each in a fresh PID namespace and on a fresh tmpfs. Standard library only.

Invariants
- The verdict is what the kernel reports (wait status, rusage, own clock); no byte that guest code can write takes part.
- When the report leaves, every process of the call is dead. No other call ever sees the file system of a call.
- A slot ends when its host is gone (end of file on the control socket) and on any error of its own: there is never a
  half-made jail.

Control messages: host -> slot: `Request` with one descriptor, or one byte (cancel). slot -> host: READY, then for each
request ENDED when all of it is about to die, if it took longer than LONG_S, and a `SlotReport` with the descriptors of
stdout, stderr and, if asked for, the display.

`_call` is the plain form of what _native.c does if it is built.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import time
from array import array
from enum import IntEnum
from struct import Struct
from typing import NamedTuple, NoReturn

from sandbox.inside import guest, linux
from sandbox.inside import main_program as program
from sandbox.inside.native import Native, NativeSlot

READY, ENDED = b"ready", b"ended"
LONG_S = 1.0  # a call that ran for less has not made much that takes long to die
LONGEST_MS = (1 << 31) - 1  # bound of one poll: an int, 24 days


class EndedBy(IntEnum):
    """What ended a call; the numbers are the same in _native.c."""

    ITSELF = 0
    WALL_LIMIT = 1
    CANCELLED = 2


class SlotReport(NamedTuple):
    """What the kernel reports about a call. ended: an EndedBy."""

    ended: int
    status: int
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int


REPORT = Struct("qqddq")


def enter_namespaces() -> None:
    """Enters the namespaces that a slot or a session keeps for its life."""
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)


def mount_home(uid: int | None, disk_bytes: int) -> None:
    owner = uid or 0
    options = f"size={disk_bytes},nr_inodes=4096,mode=0700,uid={owner},gid={owner}"
    linux.mount("tmpfs", guest.HOME, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOATIME, options)


class Slot:
    def __init__(self, control: socket.socket, identity: guest.Identity, native: Native | None) -> None:
        self._control = control
        self._identity = identity
        self._native = native
        self._self = os.pidfd_open(os.getpid())
        self._home: tuple[int, ...] | None = None  # size and state of the mounted file system

    def serve(self) -> None:
        """Consumes requests, one at a time, until the host closes the control socket."""
        self.enter()
        self._control.send(READY)
        if self._native is not None:
            self._serve_natively(self._native)
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, guest.REQUEST.size, 1)
            if not message:
                return
            if descriptors:  # otherwise it cancels a call that has just ended
                self._call(guest.SlotRequest(*guest.REQUEST.unpack(message)), descriptors[0])

    def _serve_natively(self, library: Native) -> NoReturn:
        """Serves by the native part. Before a call's code each page written to costs, so little happens here."""
        uid, image, policy, _ = self._identity
        uid = -1 if uid is None else uid
        slot = NativeSlot(self._control.fileno(), self._self, uid, image, guest.HOME.encode(), policy.address)
        by_reference, served = ctypes.byref(slot), array("q", bytes(40))
        address = ctypes.c_void_p(served.buffer_info()[0])
        main_program, serve, leave = guest.main_program, library.serve, os._exit
        serve(by_reference, address)
        try:
            stdin_bytes, code_bytes, display_bytes, seed, board = served
            main_program(stdin_bytes, code_bytes, seed, guest.Board(board, display_bytes).show if board else None)
        finally:
            leave(255)

    def enter(self) -> None:
        enter_namespaces()

    def _call(self, request: guest.SlotRequest, source: int) -> None:
        outputs = [os.memfd_create("stdout"), os.memfd_create("stderr")]
        if request.display_bytes:
            outputs.append(os.memfd_create("display"))
            os.ftruncate(outputs[2], request.display_bytes)
        report = self._execute(request, source, outputs)
        socket.send_fds(self._control, [REPORT.pack(*report)], outputs)
        for fd in (source, *outputs):
            os.close(fd)
        if self._home is not None and self._home != _home_state(request.disk_bytes):
            linux.unmount(guest.HOME)  # after the reply, since it may wait for an RCU grace period
            self._home = None

    def _execute(self, request: guest.SlotRequest, source: int, outputs: list[int]) -> SlotReport:
        self._mount_home(request.disk_bytes)
        linux.unshare(linux.CLONE_NEWPID)
        init = linux.spawn_init()
        started = time.monotonic()
        child = linux.fork()
        if child == 0:
            try:
                self._run(request, source, outputs)
            finally:
                os._exit(255)
        ended = self._ended(child, request.wall_s)
        wall = time.monotonic() - started
        os.kill(init, signal.SIGKILL)  # takes the whole namespace down
        if wall > LONG_S:
            self._control.send(ENDED)
        status, cpu_s, peak = _reap(child)
        linux.setns(self._self, linux.CLONE_NEWPID)  # otherwise the next unshare would be refused
        return SlotReport(ended, status, wall, cpu_s, peak)

    def _run(self, request: guest.SlotRequest, source: int, outputs: list[int]) -> NoReturn:
        """Runs the call, in its child."""
        show = None
        if request.display_bytes:
            board = mmap.mmap(outputs[2], 0)
            show = guest.Board(linux.address_of(board), request.display_bytes).show
        guest.drop_privileges(request, self._identity, source, outputs[0], outputs[1])
        guest.main_program(request.stdin_bytes, request.code_bytes, request.seed, show)

    def _mount_home(self, disk_bytes: int) -> None:
        """Mounts a fresh tmpfs for the call, or keeps the one that no call has touched yet."""
        if self._home is not None:
            if self._home[0] == disk_bytes:
                return
            linux.unmount(guest.HOME)
        mount_home(self._identity.uid, disk_bytes)
        self._home = _home_state(disk_bytes)

    def _ended(self, child: int, wall_s: float) -> EndedBy:
        """Returns what ended the call. At the wall limit the call may still write out what it has printed."""
        ended = self._watch(child, wall_s)
        if ended == EndedBy.WALL_LIMIT:
            os.kill(child, program.LAST_WORDS)
            self._watch(child, program.LAST_WORDS_S)
        return ended

    def _watch(self, child: int, wall_s: float) -> EndedBy:
        """Waits for the end of `child`, the wall limit, a cancellation or the end of the host; returns which it was."""
        pidfd = os.pidfd_open(child)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(min(wall_s * 1000, LONGEST_MS))}
        os.close(pidfd)
        if pidfd in ready:
            return EndedBy.ITSELF
        return EndedBy.CANCELLED if ready else EndedBy.WALL_LIMIT


def _reap(child: int) -> tuple[int, float, int]:
    """Waits until every child is gone, guest code's too; returns status, CPU s and peak bytes of `child`."""
    usage_of_child = (0, 0.0, 0)
    while True:
        try:
            pid, status, usage = os.wait4(-1, linux.WALL)
        except ChildProcessError:
            return usage_of_child
        if pid == child:
            usage_of_child = (status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _home_state(disk_bytes: int) -> tuple[int, ...]:
    """Returns what every change in a call's file system alters.

    That is a new ctime (which no process can set) or a used inode, and everything else that can be set, since before
    Linux 6.13 a ctime changes only every few ms. Attributes cannot be set.
    """
    root, used = os.stat(guest.HOME), os.statvfs(guest.HOME)
    times = root.st_ctime_ns, root.st_mtime_ns, root.st_atime_ns
    owner = root.st_mode, root.st_uid, root.st_gid, root.st_nlink
    return disk_bytes, *times, *owner, used.f_ffree, used.f_bfree
