"""A sandbox host: serves the pool of this machine to a node over ZeroMQ. `rocstar sandbox-host --help`

Invariants
- Every call is answered once, to the node that sent it. It is not answered if that node is gone or the host ends; the
  node then runs it elsewhere. An answer never reaches another node, although its calls may have the same ids.
- A node's own host, which is its child, ends with the node: at the end of its stdin, or when the node dies.
- Any other host survives its node. If it hears no ping for silence_s, it drops the node's calls and sessions and says
  hello on a new connection until a node answers. If the node restarted, or sent an undecodable message, it does so at
  once; the node resubmits the calls.
- A host lives as long as its pool. SIGTERM and SIGINT end both.
- Without keys it connects only to this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop
import zmq

from sandbox import keys, wire
from sandbox.config import NO_JAIL, require_jailed_data, stays_here
from sandbox.host import nsjail as jail
from sandbox.host.pool import RECYCLE_CALLS, Pool
from sandbox.host.slots import TierJail
from sandbox.host.verdict import OomWatch
from sandbox.inside import guest, linux
from sandbox.mailbox import Mailbox
from sandbox.require import positive, require_fields
from sandbox.tiers import TIERS, Tier, read_tier

ALIVE_S = 1.0
FDS = 1 << 14  # one for each slot and session, and some more; a soft limit of 1024 is common


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Where the node is. silence_s: None if its end is noticed in another way."""

    address: str
    keys: keys.HostKeys | None
    silence_s: float | None


class Host:
    """Serves one pool to one node after another, from `serve` until the pool stops."""

    def __init__(self, node: Node, slots: int, tiers: tuple[Tier, ...], make_pool: Callable[..., Pool]) -> None:
        """make_pool: `make_pool(answer=...)` returns the pool."""
        self._node = node
        self._hello = wire.Hello(slots, "", [tier.name for tier in tiers])
        self._loop = asyncio.get_running_loop()
        # The pool needs ids of its own: two nodes, or two attempts at one call, may use the same one.
        self._pool_ids = itertools.count()
        self._node_ids: dict[int, int] = {}  # the pool's id of an unanswered call -> the node's
        self._sessions: set[bytes] = set()
        self._results: list[wire.CallResult] = []
        self._broken: str | None = None
        self._pool = make_pool(answer=self._answer)
        self._connect()

    async def serve(self) -> str | None:
        """Answers calls until the node leaves or the pool ends; returns the cause if it could not."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._pool.stop)
        self._loop.set_exception_handler(self._bug)
        async with asyncio.TaskGroup() as group:
            beat = group.create_task(self._beat(), name="host-beat")
            try:
                await self._pool.run()
            except jail.JailUnavailable as error:
                self._mailbox.send(wire.Refused(str(error)))
                return str(error)
            finally:
                beat.cancel()
                self._mailbox.close()
        return self._broken

    def _bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Ends the host after an error in a callback, which may have cost an answer: the node retries elsewhere."""
        loop.default_exception_handler(context)
        self._broken = "an error of our own, see above"
        self._pool.stop()

    def stop_at_end_of(self, fd: int) -> None:
        """Ends the host at the end of `fd`, on which nothing is sent."""

        def ended() -> None:
            self._loop.remove_reader(fd)
            self._pool.stop()

        self._loop.add_reader(fd, ended)

    def _connect(self) -> None:
        self._mailbox = Mailbox(zmq.DEALER, self._from_node)
        if self._node.keys is not None:
            keys.trust(self._mailbox, self._node.keys)
        try:
            self._mailbox.connect(self._node.address)
        except zmq.ZMQError:
            self._mailbox.close()  # collecting an open mailbox would wait without end
            raise
        self._silent = 0  # our beats since the node was heard; none pass while this process is stopped
        self._greeted = False

    async def _beat(self) -> None:
        """Says hello once the pool is ready, then each second that it is alive; misses a node that is gone."""
        await self._pool.ready.wait()
        self._hello = msgspec.structs.replace(self._hello, level=self._pool.level)
        self._mailbox.send(self._hello)
        self._silent = 0
        while True:
            await asyncio.sleep(ALIVE_S)
            self._mailbox.drain()  # this loop may have been busy
            self._silent += 1
            silence_s = self._node.silence_s
            if silence_s is not None and self._silent * ALIVE_S > silence_s:
                state = "is gone: its calls and sessions are ended" if self._greeted else "does not answer"
                hint = "" if self._greeted or self._node.keys is None else "; are the keys those of the node?"
                self._forget_node(f"{state} (silent for {silence_s:g} s), trying again{hint}")
            self._mailbox.send(wire.Alive())

    def _forget_node(self, state: str) -> None:
        """Ends all that the node had here, and says hello on a new connection, which has nothing of it."""
        print(f"sandbox.host: node {self._node.address} {state}", file=sys.stderr, flush=True)
        open_calls = list(self._node_ids)
        self._node_ids.clear()  # before the pool answers
        self._results.clear()
        self._pool.cancel(open_calls)
        self._pool.end_sessions(self._sessions)
        self._sessions = set()
        self._mailbox.close(linger_ms=0)
        self._connect()
        self._mailbox.send(self._hello)

    def _from_node(self, frames: list[bytes]) -> None:
        try:
            message = wire.decode_to_host(frames[0])
        except wire.BadMessage as error:
            self._forget_node(
                f"sent a message that cannot be decoded ({error}), reconnecting. Fix: run the same version on both"
            )
            return
        match message:
            case wire.Ping():
                self._greeted = True
            case wire.Reconnect() if self._greeted:  # otherwise our hello was turned away, or is on its way
                self._forget_node("does not know this host any more: its calls and sessions are ended, reconnecting")
            case wire.Run(calls):
                for call in calls:
                    self._start(call)
            case wire.CancelCalls(ids):
                cancelled = set(ids)
                self._pool.cancel([pool_id for pool_id, node_id in self._node_ids.items() if node_id in cancelled])
            case wire.EndSessions(sessions):
                self._sessions.difference_update(sessions)
                self._pool.end_sessions(sessions)
        if self._greeted:
            self._silent = 0

    def _start(self, call: wire.RunRequest) -> None:
        pool_id = next(self._pool_ids)
        self._node_ids[pool_id] = call.id
        if call.step is not None:
            self._sessions.add(call.step.session)
        self._pool.submit(msgspec.structs.replace(call, id=pool_id))

    def _answer(self, pool_id: int, result: wire.ToolResult) -> None:
        node_id = self._node_ids.pop(pool_id, None)
        if node_id is None:
            return  # the node that asked is gone
        if not self._results:
            self._loop.call_soon(self._flush)
        self._results.append(wire.CallResult(node_id, result))

    def _flush(self) -> None:
        """Sends what this tick of the loop produced."""
        results, self._results = self._results, []
        for first in range(0, len(results), wire.BATCH):
            self._mailbox.send(wire.Results(results[first : first + wire.BATCH]))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostConfig:
    connect: str
    """The node's `Sandbox.address`, for example tcp://node:5555."""
    keys: Path | None = None
    """Folder with host.key and node.pub (`rocstar keys`), required beyond this machine."""
    slots: int = field(default_factory=lambda: 4 * (os.cpu_count() or 1))
    """Calls that run at once."""
    tiers: str = ""
    """What each warmed interpreter imports: "NAME=MODULE,MODULE? NAME=MODULE", with a question mark for a module that
    need not be installed. Empty: the tiers of sandbox/tiers.py.
    """
    session_memory_bytes: float = 4 << 30
    """Memory of all sessions; beyond it idle ones end."""
    recycle_calls: int = RECYCLE_CALLS
    """Calls after which a jail is replaced."""
    silence_s: float = 15.0
    """A node that was not heard for this long is gone."""
    nsjail: str | None = None
    """Path of the nsjail executable."""
    python: str | None = None
    """Path of the Python that runs guest code; see SandboxConfig.python."""
    data: str | None = None
    """Folder of this machine that guest code may read, as /data; the node's SandboxConfig.data is for its own host."""
    isolation: Literal["nsjail", "none"] = "nsjail"
    """What jails the code: "nsjail", or "none", which runs code with all rights of this user."""

    def __post_init__(self) -> None:
        if "://" not in self.connect:
            raise ValueError(f"connect must be like tcp://node:5555, got {self.connect!r}")
        if self.keys is None and not stays_here(self.connect):
            raise ValueError(f"keys must be set to connect to {self.connect}, beyond this machine")
        if not 1 <= self.slots <= wire.MAX_SLOTS:
            raise ValueError(f"slots must be between 1 and {wire.MAX_SLOTS}, got {self.slots}")
        require_fields(self, positive, "session_memory_bytes", "recycle_calls", "silence_s")
        require_jailed_data(self.data, self.isolation)
        self.read_tiers()

    def read_tiers(self) -> tuple[Tier, ...]:
        """Returns the tiers. Raises ValueError."""
        return tuple(map(read_tier, self.tiers.split())) or TIERS


async def serve(config: HostConfig, *, is_child: bool = False) -> int | str | None:
    """Serves until it is told to leave; returns what to exit with."""
    node = Node(
        address=config.connect,
        keys=None if config.keys is None else keys.load_host(config.keys),
        silence_s=None if is_child else config.silence_s,
    )
    tiers = config.read_tiers()
    refusal: str | None
    try:
        # before ZeroMQ, since namespaces need a single thread
        template = jail.build(config.nsjail, config.python, tiers, config.isolation, config.data)
    except jail.JailUnavailable as error:
        refusal = str(error)
        mailbox = Mailbox(zmq.DEALER, lambda frames: None)
        if is_child:
            mailbox.connect(node.address)
            mailbox.send(wire.Refused(refusal))
        mailbox.close()
    else:
        if template.warning:
            print(f"sandbox: {template.warning}", file=sys.stderr, flush=True)

        def make_pool(answer: Callable[[int, wire.ToolResult], None]) -> Pool:
            oom = OomWatch()
            return Pool(
                make_jail=lambda tier: TierJail(template, tier, oom),
                level=template.level,
                tiers=template.tiers,
                slots=config.slots,
                session_memory_bytes=config.session_memory_bytes,
                recycle_calls=config.recycle_calls,
                answer=answer,
            )

        try:
            host = Host(node, config.slots, tiers, make_pool)
            if is_child:
                host.stop_at_end_of(0)
            refusal = await host.serve()
        finally:
            template.close()
    if refusal is None:
        return None
    return 1 if is_child else f"sandbox.host: {refusal}"  # the node of a child has got the reason


def run(config: HostConfig, *, is_child: bool = False) -> int | str | None:
    """Serves as this process; returns what to exit with.

    is_child: this process is a child of its node, which holds the other end of its standard input.
    """
    if config.isolation == "none" and not is_child:  # for a child the node has printed it
        print(NO_JAIL, file=sys.stderr, flush=True)
    os.environ.pop("PYTHONPATH", None)  # it was set to find this package; without a jail guest code would find it too
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may ignore it, and then no child could be waited for
    while (
        null := os.open(os.devnull, os.O_RDWR)
    ) <= 2:  # a standard stream is closed, and a file that we open would take its place
        pass
    os.close(null)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FDS)), hard))
    # Guest code inherits this. At 0 the kernel still pipes a crashed process to the machine's core handler, as root
    # (core(5)); at 1 it does not. Nothing in the jail can change it (policy.kafel).
    guest.limit(resource.RLIMIT_CORE, 1, 1)
    if is_child:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        return uvloop.run(serve(config, is_child=is_child))
    except (keys.KeysUnusable, zmq.ZMQError) as error:  # ZMQError: an impossible address
        return f"sandbox.host: {error}"
