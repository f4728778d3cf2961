"""`Sandbox`: runs Python in a jail from asyncio.

Invariants
- Each `run` returns one ToolResult or raises: ValueError for misuse, SandboxUnavailable if no host for it is there or
  comes within its deadline, CancelledError if its task is cancelled (which ends the call). Nothing that guest code does
  makes it raise.
- Calls start in the order of `run`. A call's limits count from the start of its execution, so any number may wait. Only
  the waiting calls themselves take memory: what hosts and sockets hold is bounded by the hosts' credits.
- A host that is silent, loses its connection or sends an undecodable message is given up. Its calls are answered as
  lost or run elsewhere.
- When the context is left, however it is left, the local host process and everything below it are gone. They are gone
  too if this process is killed. Hosts on other machines end the calls of a node that is gone.
- If the jail cannot be built, entering the context raises SandboxUnavailable. Code never runs outside of a jail unless
  isolation="none" is spelled out; then a line on stderr warns at each start.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import sys
from dataclasses import dataclass
from typing import Self

import msgspec
import zmq

from sandbox import keys, wire
from sandbox.client.dispatch import Action, Cancel, Deliver, Dispatcher, Failed, Forget, Lost, Send
from sandbox.client.local_host import LocalHost, Peer
from sandbox.client.session import Session
from sandbox.config import NO_JAIL, SandboxConfig, SandboxUnavailable, Stats
from sandbox.mailbox import Mailbox
from sandbox.tiers import choose

PING_S = 1.0
QUEUED_PER_SLOT = 3  # calls that a host holds per slot: enough that a slot never waits for the node's event loop
NOT_OPEN = "the sandbox is not open. Fix: use `async with Sandbox(...)`"
LEVELS = ("none", "no-cgroup", "full")  # the weakest first; an unknown level counts as weaker still
LOST = wire.ToolResult(outcome="lost")
log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _Waiting:
    """A call without an answer yet. result, error: the answer if the Dispatcher decides Deliver or Failed."""

    request: wire.RunRequest
    since: float
    answer: asyncio.Future[wire.ToolResult]
    result: wire.ToolResult = LOST
    error: SandboxUnavailable | None = None


class Sandbox:
    """Runs Python in jails.

    >>> async with Sandbox(SandboxConfig(slots=4)) as box:
    ...     result = await box.run("print(input())", stdin="hello")
    >>> result.outcome, result.stdout
    ('ok', 'hello\\n')
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config or SandboxConfig()
        self.stats = Stats()
        self.address = ""  # further hosts connect to it
        self._dispatcher = Dispatcher()
        self._ids = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._outbox: dict[str, list[wire.RunRequest]] = {}
        self._peers: dict[str, Peer] = {}
        self._silent: dict[str, int] = {}  # our beats since a peer was heard; none pass while this process is stopped
        self._served_until: dict[str, float] = {}  # tier -> when its last host left
        self._mailboxes: list[Mailbox] = []
        self._closed: SandboxUnavailable | None = SandboxUnavailable(NOT_OPEN)

    async def __aenter__(self) -> Self:
        config = self._config
        if config.isolation == "none":
            print(NO_JAIL, file=sys.stderr, flush=True)
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._local_host: LocalHost | None = None
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._tasks: list[asyncio.Task[None]] = []
        try:
            if config.listen is not None:
                self._listen(config.listen)
            if config.slots:
                self._local_host = LocalHost(config, self._open_mailbox(), self._lose)
                self._tasks.append(self._group.create_task(self._run_local_host(self._local_host), name="sandbox-host"))
            self._tasks.append(self._group.create_task(self._beat(), name="sandbox-beat"))
            await self._first_host()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        calls = wire.CancelCalls(list(self._waiting))
        self._close(SandboxUnavailable("the sandbox was closed"))
        for peer in self._peers.values():
            peer.mailbox.send(calls, peer.address)  # a host on another machine would go on until it misses us
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            for mailbox in reversed(self._mailboxes):
                mailbox.close()
            self._mailboxes.clear()
            for peer in list(self._peers.values()):
                self._lose(peer)

    async def run(
        self,
        code: str,
        stdin: str = "",
        limits: wire.Limits | None = None,
        *,
        display: bool = False,
        seed: int | None = None,
        tier: str | None = None,
    ) -> wire.ToolResult:
        """Runs `code` as a main program of its own, within `limits` or else the config's; see ToolResult.

        display: code without output shows its last expression, as a notebook does.
        seed: determines all random numbers that Python draws: `random`, numpy, sympy, `os.urandom` and with it secrets,
        uuid4 and tempfile (not `os.getrandom`, nor /dev/urandom). By default each call has another one.
        tier: name of a tier; by default the code's imports choose it.
        """
        request = wire.RunRequest(
            id=next(self._ids),
            code=wire.encode_code(code),
            stdin=wire.encode_stdin(stdin),
            limits=wire.check_limits(limits, self._config.limits),
            tier=choose(code, self._config.tiers) if tier is None else self._check_tier(tier),
            display=wire.check_display(display),
            seed=wire.check_seed(seed),
        )
        result = await self._submit(request)
        self.stats.outcomes[result.outcome] += 1
        return result

    def session(
        self, *, seed: int | None = None, limits: wire.Limits | None = None, tier: str | None = None
    ) -> Session:
        """Returns a new session, to be entered. limits, tier: those of each cell (default: the last tier)."""
        if self._config.isolation == "none":
            raise ValueError("SandboxConfig.isolation must be 'nsjail' for sessions: without a jail there are none")
        tier = self._config.tiers[-1].name if tier is None else self._check_tier(tier)
        seed = secrets.randbits(wire.SEED_BITS) if seed is None else wire.check_seed(seed)

        async def send(cell: wire.Cell, step: wire.SessionStep) -> wire.ToolResult:
            request = wire.RunRequest(
                id=next(self._ids),
                code=cell.code,
                stdin=cell.stdin,
                limits=cell.limits,
                tier=tier,
                display=True,
                seed=seed,
                step=step,
            )
            return await self._submit(request)

        limits = wire.check_limits(limits, self._config.limits)
        return Session(send, self._end_session, id=secrets.token_bytes(16), limits=limits, stats=self.stats)

    def _check_tier(self, tier: str) -> str:
        names = [known.name for known in self._config.tiers]
        if type(tier) is not str or tier not in names:
            raise ValueError(f"tier must be one of {names!r}, got {tier!r}")
        return tier

    async def _submit(self, request: wire.RunRequest) -> wire.ToolResult:
        if self._closed is not None:
            raise self._closed
        waiting = _Waiting(request=request, since=self._loop.time(), answer=self._loop.create_future())
        self._waiting[request.id] = waiting
        session = None if request.step is None else request.step.session
        try:
            self._act(self._dispatcher.submit(request.id, request.tier, session))
            result = await waiting.answer
        except asyncio.CancelledError:
            self.stats.cancelled += 1
            self._act(self._dispatcher.cancel(request.id))
            raise
        finally:
            del self._waiting[request.id]
        queue_s = max(0.0, self._loop.time() - waiting.since - result.wall_s)
        return msgspec.structs.replace(result, queue_s=queue_s)

    def _end_session(self, session: bytes) -> None:
        self._act(self._dispatcher.end_session(session))

    def _act(self, actions: list[Action]) -> None:
        """Does what the Dispatcher decided. A call whose answer is already done was cancelled."""
        for action in actions:
            match action:
                case Send(host, call):
                    if not self._outbox:
                        self._loop.call_soon(self._flush)
                    self._outbox.setdefault(host, []).append(self._waiting[call].request)
                case Cancel(host, call):
                    self._tell(host, wire.CancelCalls([call]))
                case Forget(host, session):
                    self._tell(host, wire.EndSessions([session]))
                case Deliver(call) if not self._waiting[call].answer.done():
                    self._waiting[call].answer.set_result(self._waiting[call].result)
                case Lost(call) if not self._waiting[call].answer.done():
                    self._waiting[call].answer.set_result(LOST)
                case Failed(call) if not self._waiting[call].answer.done():
                    error = self._waiting[call].error or self._closed or SandboxUnavailable(NOT_OPEN)
                    self._waiting[call].answer.set_exception(error)

    def _tell(self, host: str, message: wire.ToHost) -> None:
        """Sends after the flush, which may still have to send the call that the message is about."""
        peer = self._peers[host]
        self._loop.call_soon(peer.mailbox.send, message, peer.address)

    def _flush(self) -> None:
        """Sends what this tick of the loop produced."""
        outbox, self._outbox = self._outbox, {}
        for host, calls in outbox.items():
            peer = self._peers.get(host)  # None: it left in this tick, with its calls
            if peer is not None and not all(self._send(run, peer) for run in wire.batches(calls)):
                self._lose(peer)

    def _send(self, run: wire.Run, peer: Peer) -> bool:
        """Sends calls; one that no message can hold (4 GiB of stdin) fails alone. Returns False if the peer is gone."""
        try:
            message = wire.encode(run)
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            if len(run.calls) > 1:
                return all(self._send(wire.Run([call]), peer) for call in run.calls)
            [call] = run.calls
            waiting = self._waiting.get(call.id)
            if waiting is not None and not waiting.answer.done():
                waiting.answer.set_exception(ValueError(f"the call cannot be sent: {error}"))
            self._act(self._dispatcher.answered(peer.name, call.id, lost=False))  # frees the host's credit
            return True
        return peer.mailbox.send_frames(peer.address, message)

    def _listen(self, address: str) -> None:
        mailbox = self._open_mailbox()
        if self._config.keys is not None:
            self._mailboxes.append(keys.guard(mailbox, keys.load_node(self._config.keys)))
        try:
            mailbox.bind(address)
        except zmq.ZMQError as error:
            raise SandboxUnavailable(
                f"cannot listen on {address}: {error}. Fix: choose another SandboxConfig.listen"
            ) from None
        self.address = mailbox.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _open_mailbox(self) -> Mailbox:
        mailbox = Mailbox(zmq.ROUTER, lambda frames: self._from_host(mailbox, frames))
        self._mailboxes.append(mailbox)
        return mailbox

    def _from_host(self, mailbox: Mailbox, frames: list[bytes]) -> None:
        name = f"{self._mailboxes.index(mailbox)}:{frames[0].hex()}"
        local = self._local_host
        if local is not None and local.mailbox is not mailbox:
            local = None
        try:
            message = wire.decode_to_client(frames[-1])
        except wire.BadMessage as error:  # no peer may stop the others
            log.warning(
                "sandbox: cannot decode a message from host %s: %s. Fix: run the same version on both", name, error
            )
            if name in self._peers:
                self._lose(self._peers[name])
            return
        if name in self._peers:
            self._silent[name] = 0
        match message:
            case wire.Results(results) if name in self._peers:  # otherwise it was given up and its calls run elsewhere
                for item in results:
                    self._answered(name, item)
            case wire.Hello(slots) if (
                name in self._peers or not 1 <= slots <= wire.MAX_SLOTS or (local is not None and not local.expecting)
            ):
                log.warning("sandbox: host %s sent an unexpected hello", name)
            case wire.Hello(level="none") if self._config.isolation != "none":
                log.warning(
                    "sandbox: host %s has no jail and was turned away. Fix: install nsjail on it, or isolation='none'",
                    name,
                )
            case wire.Hello():
                peer = Peer(
                    name=name, mailbox=mailbox, address=frames[0], level=message.level, tiers=tuple(message.tiers),
                    left=self._loop.create_future(),
                )  # fmt: skip
                self._join(peer, message.slots)
                if local is not None:
                    local.joined(peer)
            case wire.Refused(reason) if local is not None:
                local.refused(reason)
            case wire.Alive() if (
                name not in self._peers and local is None
            ):  # it belonged to an earlier node, or was given up
                mailbox.send(wire.Reconnect(), frames[0])

    def _answered(self, host: str, item: wire.CallResult) -> None:
        waiting = self._waiting.get(item.id)  # None: the call was cancelled
        if waiting is not None:
            waiting.result = item.result
        self._act(self._dispatcher.answered(host, item.id, lost=item.result.outcome == "lost"))

    def _join(self, peer: Peer, slots: int) -> None:
        self._peers[peer.name] = peer
        self._silent[peer.name] = 0
        self.stats.hosts += 1
        self._note_level()
        peer.mailbox.send(wire.Ping(), peer.address)
        self._act(self._dispatcher.host_joined(peer.name, slots * QUEUED_PER_SLOT, peer.tiers))
        if not self._started.done():
            self._closed = None
            self._started.set_result(None)

    def _lose(self, peer: Peer) -> None:
        """Gives up a host; repeated calls change nothing."""
        if self._peers.pop(peer.name, None) is None:
            return
        del self._silent[peer.name]
        peer.left.set_result(None)
        self._note_level()
        self._served_until.update(dict.fromkeys(peer.tiers, self._loop.time()))
        self._act(self._dispatcher.host_left(peer.name))

    def _note_level(self) -> None:
        levels = [peer.level for peer in self._peers.values()]
        self.stats.level = min(levels, key=lambda level: LEVELS.index(level) if level in LEVELS else -1, default="")

    def _close(self, reason: SandboxUnavailable) -> None:
        """Fails what waits, and what comes from now on, with `reason`."""
        self._closed = reason
        self._act(self._dispatcher.fail_all())

    async def _first_host(self) -> None:
        """Waits for a host. Raises SandboxUnavailable if the local one cannot serve, or none comes."""
        try:
            # The local host has a deadline of its own, and gives the reason.
            async with asyncio.timeout(None if self._local_host else self._config.start_s):
                await self._started
        except TimeoutError:
            raise SandboxUnavailable(
                f"no host came within {self._config.start_s:g} s. Fix: start one with "
                f"`rocstar sandbox-host connect={self.address}`, or raise SandboxConfig.start_s"
            ) from None

    async def _run_local_host(self, local_host: LocalHost) -> None:
        """Keeps a local host; if one cannot be started, closes, or continues without it if others may come."""
        try:
            await local_host.run()
        except SandboxUnavailable as error:
            if not self._started.done():
                self._started.set_exception(error)
            elif self.address:
                log.warning("sandbox: going on without a local host: %s", error)
            else:
                self._close(error)

    async def _beat(self) -> None:
        """Pings the hosts each second, gives up silent ones, and fails calls for which no host came."""
        while True:
            await asyncio.sleep(PING_S)
            for mailbox in self._mailboxes:
                mailbox.drain()  # our own loop may have been busy
            for peer in list(self._peers.values()):
                self._silent[peer.name] += 1
                silent = self._silent[peer.name] * PING_S > self._config.silence_s
                if silent or not peer.mailbox.send(wire.Ping(), peer.address):
                    self._lose(peer)
            self._fail_unserved(self._loop.time() - self._config.start_s)

    def _fail_unserved(self, since: float) -> None:
        """Fails the calls that have waited since then for a host of their tier."""
        for call, tier in self._dispatcher.unserved():
            waiting = self._waiting[call]
            if max(waiting.since, self._served_until.get(tier, 0.0)) < since:
                present = ", ".join(sorted({name for peer in self._peers.values() for name in peer.tiers})) or "none"
                cause = f"no host of tier {tier!r} came within {self._config.start_s:g} s (present: {present})"
                waiting.error = SandboxUnavailable(f"{cause}. Fix: start one, see `rocstar sandbox-host --help`")
                self._act(self._dispatcher.fail(call))
