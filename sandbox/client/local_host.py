"""The host process on the node's own machine: starts it, watches it, replaces it, and ends it with its owner.

Invariants
- There is at most one host process at a time. When `LocalHost.run` ends, however it ends, the process and everything
  below it are gone. They are gone too when this process is killed, since the host's stdin then ends.
- A host that ends or falls silent is replaced, even one that is killed while it starts. `LocalHost.run` ends with
  SandboxUnavailable if a host reports that it cannot serve, if the first one ends by itself before it serves, and if
  none serves within start_s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from sandbox.config import SandboxConfig, SandboxUnavailable
from sandbox.mailbox import Mailbox
from sandbox.tiers import write_tier

Process = asyncio.subprocess.Process
LAST_MESSAGES_S = 1.0  # between the end of a host and the arrival of its last messages
STOP_S = 5.0  # the host ends its jail in milliseconds; after this it is killed, which also ends the jail


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Peer:
    """A host that has joined: where to write to it, and what it offers. `left` is done when the host was given up."""

    name: str
    mailbox: Mailbox
    address: bytes
    level: str
    tiers: tuple[str, ...]
    left: asyncio.Future[None]


class _EndedEarly(SandboxUnavailable):
    """A host ended before its hello; something may have killed it."""

    def __init__(self, status: int, after_s: float) -> None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        super().__init__(f"a sandbox host {how} {after_s:.1f} s after its start. Fix: see its messages on stderr")
        self.killed = status < 0


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class LocalHost:
    def __init__(self, config: SandboxConfig, mailbox: Mailbox, lose: Callable[[Peer], None]) -> None:
        """mailbox: is for this host only. lose: is told when the process of a peer has ended."""
        self._config, self.mailbox, self._lose = config, mailbox, lose
        self._greeting: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

    @property
    def expecting(self) -> bool:
        """Whether a hello is awaited; a later one comes from a process that is being ended."""
        return not self._greeting.done()

    def joined(self, peer: Peer) -> None:
        self._greeting.set_result(peer)

    def refused(self, reason: str) -> None:
        if not self._greeting.done():
            self._greeting.set_exception(SandboxUnavailable(reason))

    async def run(self) -> None:
        """Keeps one host running until cancelled. Raises SandboxUnavailable if one cannot be started."""
        clock, served = asyncio.get_running_loop().time, False
        until = clock() + self._config.start_s
        while True:
            try:
                await self._live_with_host(until)
                served, until = True, clock() + self._config.start_s
            except _EndedEarly as error:
                if not (served or error.killed) or clock() > until:
                    raise
            except (OSError, zmq.ZMQError) as error:
                raise SandboxUnavailable(
                    f"the socket of a sandbox host could not be made: {error}. "
                    "Fix: make room for temporary files, or set TMPDIR to a folder where this user may write"
                ) from error

    async def _live_with_host(self, until: float) -> None:
        """Starts a host, waits until it ends or is given up, takes back its calls and ends it."""
        self._greeting = asyncio.get_running_loop().create_future()
        with (folder := tempfile.TemporaryDirectory(prefix="rocstar-")), _opened(folder.name) as place:
            # Works however long the folder's name is, and where the host mounts
            address = f"ipc:///proc/self/fd/{place}/host"
            self.mailbox.bind(address)
            process = await self._spawn(address, place)
            try:
                async with asyncio.TaskGroup() as group:
                    ended = group.create_task(process.wait(), name="sandbox-host-ended")
                    peer = await self._greeted(process, ended, until)
                    folder.cleanup()  # it is connected, so nothing stays if we are killed
                    try:
                        await asyncio.wait((ended, peer.left), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        ended.cancel()
                        if peer.left.done() and process.returncode is None:
                            process.kill()  # it was silent, so do not wait until it leaves by itself
                        self.mailbox.drain()  # its last messages
                        self._lose(peer)
            except ExceptionGroup as errors:  # no except*: Python 3.11 before .4 wraps what is raised in it
                if not isinstance(errors.exceptions[0], SandboxUnavailable):
                    raise
                raise errors.exceptions[0] from None
            finally:
                await _end(process)
                self.mailbox.socket.unbind(address)  # not before, since it cuts the connection

    async def _spawn(self, address: str, place: int) -> Process:
        config = self._config
        given = {  # the fields of a HostConfig, whose module only the host imports
            "connect": address,
            "slots": config.slots,
            "tiers": " ".join(map(write_tier, config.tiers)),
            "session_memory_bytes": config.session_memory_bytes,
            "nsjail": config.nsjail,
            "python": config.python,
            "data": None if config.data is None else str(config.data.absolute()),
            "isolation": config.isolation,
        }
        command = [sys.executable, "-P", "-m", "sandbox.host", msgspec.json.encode(given).decode()]
        root = str(Path(__file__).parents[2])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            # Own session: a terminal's SIGINT is for us to handle.
            return await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=null, env=env, pass_fds=[place], start_new_session=True
            )
        except (PermissionError, FileNotFoundError) as error:
            raise SandboxUnavailable(
                f"cannot run the interpreter {sys.executable}: {error.strerror}. "
                "Fix: let this user execute it and enter each folder above it, or use one that this user may execute"
            ) from error
        except OSError as error:
            raise SandboxUnavailable(
                f"cannot start a process for a sandbox host: {error.strerror}. "
                "Fix: allow this user more processes, open files or memory"
            ) from error

    async def _greeted(self, process: Process, ended: asyncio.Task[int], until: float) -> Peer:
        """Returns the host after its hello. Raises SandboxUnavailable with its reason, or if it sends nothing."""
        clock = asyncio.get_running_loop().time
        since = clock()
        try:
            async with asyncio.timeout_at(until):
                await asyncio.wait((ended, self._greeting), return_when=asyncio.FIRST_COMPLETED)
                async with asyncio.timeout(LAST_MESSAGES_S if ended.done() else None):
                    return await self._greeting
        except TimeoutError:
            self._greeting.cancel()
            if ended.done():
                raise _EndedEarly(ended.result(), clock() - since) from None
            raise SandboxUnavailable(
                f"no sandbox host within {self._config.start_s:g} s: it is still starting. "
                "Fix: see its messages on stderr, or raise SandboxConfig.start_s"
            ) from None


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()  # the host ends at the end of its stdin
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
