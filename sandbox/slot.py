"""A slot: runs one call at a time, each in a fresh PID namespace and on a fresh tmpfs. Standard library only.

Invariants
- The verdict is what the kernel says (wait status, rusage, own clock); no byte that guest code can write takes part.
- When the report leaves, every process of the call is dead. The file system of a call is never seen by another.
- A slot ends when its host is gone (end of file on the control socket) and on any error of its own: there is never a
  half-made jail.

Control messages: host -> slot: `Request` with one descriptor, or one byte (cancel); slot -> host: READY, then for each
request a `Report` with the descriptors of stdout and stderr.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from typing import NamedTuple

from . import guest, linux

READY = b"ready"


class Report(NamedTuple):
    """What the kernel said about a call. `ended`: 0 by itself, 1 wall limit, 2 cancelled."""

    ended: int
    status: int
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int


REPORT = struct.Struct("qqddq")


class Slot:
    def __init__(self, control: socket.socket, uid: int | None) -> None:
        self._control = control
        self._uid = uid
        self._filter = guest.make_filter()
        self._self = os.pidfd_open(os.getpid())
        self._home: tuple[int, ...] | None = None  # size and state of the mounted file system

    def serve(self) -> None:
        """Consume requests, one at a time, until the host closes the control socket."""
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
        self._control.send(READY)
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, guest.REQUEST.size, 1)
            if not message:
                return
            if descriptors:  # else: the cancellation of a call that has just ended
                self._call(guest.Request(*guest.REQUEST.unpack(message)), descriptors[0])

    def _call(self, request: guest.Request, source: int) -> None:
        out, err = os.memfd_create("stdout"), os.memfd_create("stderr")
        self._mount_home(request.disk_bytes)
        linux.unshare(linux.CLONE_NEWPID)
        init = linux.spawn_init()
        started = time.monotonic()
        child = linux.fork()
        if child == 0:
            try:
                guest.start(request, self._uid, source, out, err, self._filter)
            finally:
                os._exit(255)
        ended = self._watch(child, request.wall_s)
        wall = time.monotonic() - started
        os.kill(init, signal.SIGKILL)  # takes the whole namespace down
        _, status, usage = os.wait4(child, 0)
        os.waitpid(init, 0)  # returns only when every process of the namespace is gone
        linux.setns(self._self, linux.CLONE_NEWPID)  # or the next unshare would be refused
        report = Report(ended, status, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
        socket.send_fds(self._control, [REPORT.pack(*report)], [out, err])
        for fd in (source, out, err):
            os.close(fd)
        if self._home != _home_state(request.disk_bytes):
            linux.unmount(guest.HOME)  # after the reply: it may wait for an RCU grace period
            self._home = None

    def _mount_home(self, disk_bytes: int) -> None:
        """A fresh tmpfs for the call, or the one that no call has touched yet."""
        if self._home is not None:
            if self._home[0] == disk_bytes:
                return
            linux.unmount(guest.HOME)
        owner = self._uid or 0
        options = f"size={disk_bytes},nr_inodes=4096,mode=0700,uid={owner},gid={owner}"
        linux.mount("tmpfs", guest.HOME, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOATIME, options)
        self._home = _home_state(disk_bytes)

    def _watch(self, child: int, wall_s: float) -> int:
        """Wait for the end of `child`, the wall limit, a cancellation or the end of the host, whichever comes first."""
        pidfd = os.pidfd_open(child)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(wall_s * 1000)}
        os.close(pidfd)
        if pidfd in ready:
            return 0
        return 2 if ready else 1


def _home_state(disk_bytes: int) -> tuple[int, ...]:
    """What every change in a call's file system alters: a new ctime (which no process can set) or a used inode."""
    root, used = os.stat(guest.HOME), os.statvfs(guest.HOME)
    return disk_bytes, root.st_ctime_ns, root.st_mtime_ns, root.st_nlink, used.f_ffree, used.f_bfree
