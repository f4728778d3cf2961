"""Hostile messages at both ends of the wire, guests that do anything to descriptors: nothing is forged or lost.

A try is one message, or one program of a guest. CI makes a few hundred. The long run:

    ROCSTAR_FUZZ_TRIES=100000 python -m pytest tests/hostile/test_fuzz.py -o timeout=0
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sandbox import Limits, Sandbox, SandboxConfig, ToolResult, wire
from sandbox.mailbox import Mailbox
from tests.support.paths import ROCSTAR, ROOT
from tests.support.sandbox_honest import CLEAN, PATIENT
from tests.support.sandbox_messages import TO_HOST, TO_NODE, frames

TRIES = int(os.environ.get("ROCSTAR_FUZZ_TRIES", "300"))
MOVES, PROGRAMS = 10, 16  # tries in one example
ANSWER_S = 20.0  # more than any answer takes here


def fuzz(tries_each: int) -> settings:
    """No shrinking across sockets and processes: the messages of a failure are printed as they were."""
    health = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    phases, count = (Phase.explicit, Phase.reuse, Phase.generate), max(TRIES // tries_each, 5)
    return settings(max_examples=count, deadline=None, suppress_health_check=health, phases=phases)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@given(st.one_of(frames(TO_NODE), frames(TO_HOST)))
@fuzz(1)
def test_any_bytes_are_a_message_or_an_error_of_the_reader(message: list[bytes]) -> None:
    """Who reads expects one kind of error; msgspec has three."""
    for frame in message:
        for decode in (wire.decode_to_host, wire.decode_to_client):
            try:
                decode(frame)
            except wire.BadMessage:
                continue


class Peer:
    """A host made of a socket: `right` answers each call with its own code, else it holds them for its script."""

    def __init__(self, address: str, *, right: bool) -> None:
        self.seen: set[bytes] = set()
        self.held: list[wire.RunRequest] = []
        self._right = right
        self._mailbox = Mailbox(zmq.DEALER, self._receive)
        self._mailbox.socket.connect(address)
        self._mailbox.send(wire.Hello(4, "full", ["bare", "math", "full"]))

    def _receive(self, message: list[bytes]) -> None:
        match wire.decode_to_host(message[-1]):
            case wire.Run(calls):
                self.seen.update(call.code for call in calls)
                self.held.extend(calls)
                if self._right:
                    self.answer("ok")
            case wire.Ping():
                self._mailbox.send(wire.Alive())

    def send(self, message: list[bytes]) -> None:
        self._mailbox.socket.send_multipart(message)
        self._mailbox.drain()  # after each send: its descriptor is edge-triggered

    def answer(self, outcome: wire.Outcome) -> None:
        """Answer what is held, by "ok" rightly."""
        held, self.held = self.held, []
        for call in held:
            result = ToolResult(outcome=outcome, stdout=call.code.decode() if outcome == "ok" else "", jailed=True)
            self._mailbox.send(wire.Results([wire.CallResult(call.id, result)]))

    def close(self) -> None:
        self._mailbox.close()


class Node:
    """A sandbox whose hosts are Peers: a right one for its life, a hostile one for an example."""

    def __init__(self) -> None:
        self._count = self._examples = 0
        self._hostile: Peer | None = None
        self._errors: list[dict[str, object]] = []

    async def open(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._errors.append(context))
        self.box = Sandbox(SandboxConfig(slots=0, listen="tcp://127.0.0.1:*"))
        async with asyncio.TaskGroup() as group:
            entering = group.create_task(self.box.__aenter__(), name="entering")
            await asyncio.sleep(0)
            self.right = Peer(self.box.address, right=True)
            await entering

    async def close(self) -> None:
        self.right.close()
        if self._hostile is not None:
            self._hostile.close()
        await self.box.__aexit__()

    async def _ask(self) -> tuple[bytes, ToolResult]:
        self._count += 1
        code = f"call {self._count}"
        return code.encode(), await self.box.run(code)

    async def example(self, moves: list[list[bytes]]) -> None:
        """Calls while a hostile host makes its moves: each is answered once, by who was asked, and none by another."""
        if self._examples % 20 == 0:  # not for each: what is sent to one that has left waits for the node to notice
            if self._hostile is not None:
                self._hostile.close()
            self._hostile = Peer(self.box.address, right=False)
        self._examples += 1
        hostile = self._hostile
        assert hostile is not None
        async with asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(), name=f"ask-{n}") for n in range(2 * MOVES)]
            for move in moves:
                hostile.send(move)
                await asyncio.sleep(0)
            for _ in range(3):
                asked.append(group.create_task(self._ask(), name="ask"))
            while not all(task.done() for task in asked):
                await asyncio.sleep(0.001)
                hostile.answer("lost")  # so that what it still holds is tried elsewhere
        for code, result in (task.result() for task in asked):
            if result.stdout == "evil":
                assert code in hostile.seen, f"{code!r} was answered by a host that never had it"
            elif result.outcome != "lost":  # as the hostile host and those that left before it may say
                assert (result.outcome, result.stdout) == ("ok", code.decode())
        assert not self._errors, self._errors


@pytest.fixture(scope="module")
def node(runner: asyncio.Runner) -> Iterator[Node]:
    node = Node()
    runner.run(node.open())
    yield node
    runner.run(node.close())


@given(moves=st.lists(frames(TO_NODE), max_size=MOVES))
@fuzz(MOVES)
def test_a_hostile_host_answers_only_what_it_was_asked(
    runner: asyncio.Runner, node: Node, moves: list[list[bytes]]
) -> None:
    runner.run(node.example(moves))


class RealHost:
    """A host process and the node's end of its connection, with nothing in between."""

    async def open(self) -> None:
        self._next = 2**40  # beyond what the hostile messages use by chance
        self._answers: dict[int, list[ToolResult]] = {}
        self._arrived = asyncio.Event()
        self._mailbox = Mailbox(zmq.ROUTER, self._receive)
        self.tiers: list[str] = []
        self._mailbox.socket.bind("tcp://127.0.0.1:*")
        address = self._mailbox.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.process = await asyncio.create_subprocess_exec(
            *ROCSTAR, "sandbox-host", f"connect={address}", "slots=2", cwd=ROOT
        )
        while not self.tiers:
            await self._hear()

    async def _hear(self) -> None:
        self._arrived.clear()
        async with asyncio.timeout(ANSWER_S):
            await self._arrived.wait()

    def _receive(self, message: list[bytes]) -> None:
        self.name = message[0]
        match wire.decode_to_client(message[-1]):
            case wire.Hello() as hello:
                self.tiers = hello.tiers
            case wire.Results(results):
                for item in results:
                    self._answers.setdefault(item.id, []).append(item.result)
        self._arrived.set()

    async def example(self, moves: list[list[bytes]]) -> None:
        """After any messages the host answers a call, once and rightly; it may have made a new connection for that."""
        for move in moves:
            with contextlib.suppress(zmq.ZMQError):  # of this connection it has had enough
                self._mailbox.socket.send_multipart([self.name, *move])
            self._mailbox.drain()
        asked: dict[bytes, int] = {}  # on each connection anew
        while not (answers := [n for n in asked.values() if n in self._answers]):
            assert self.process.returncode is None, "the host ended"
            if self.name not in asked:
                self._next += 1
                asked[self.name] = self._next
                code = f"print({self._next})".encode()
                self._mailbox.send(wire.Ping(), self.name)
                self._mailbox.send(
                    wire.Run([wire.RunRequest(self._next, code, b"", PATIENT, self.tiers[0])]), self.name
                )
            await self._hear()
        for number in answers:
            (result,) = self._answers[number]
            assert (result.outcome, result.stdout) == ("ok", f"{number}\n")

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()
        self._mailbox.close()


@pytest.fixture(scope="module")
def real_host(runner: asyncio.Runner) -> Iterator[RealHost]:
    host = RealHost()
    runner.run(host.open())
    yield host
    runner.run(host.close())


@given(moves=st.lists(frames(TO_HOST), max_size=MOVES))
@fuzz(MOVES)
def test_a_hostile_node_does_not_end_a_host(
    runner: asyncio.Runner, real_host: RealHost, moves: list[list[bytes]]
) -> None:
    runner.run(real_host.example(moves))


FD = st.one_of(st.integers(0, 4), st.integers(0, 1023))
STEPS = st.one_of(
    st.builds("os.write({}, {!r})".format, FD, st.binary(max_size=100)),
    st.builds("os.write({}, {!r} * {})".format, FD, st.binary(min_size=1, max_size=4), st.integers(1, 100_000)),
    st.builds("os.close({})".format, FD),
    st.builds("os.dup2({}, {})".format, FD, FD),
    st.builds("os.ftruncate({}, {})".format, FD, st.integers(0, 1 << 42)),
    st.builds("os.lseek({}, {}, {})".format, FD, st.integers(-9, 1 << 42), st.integers(0, 4)),
    st.builds("os.pwrite({}, {!r}, {})".format, FD, st.binary(max_size=9), st.integers(0, 1 << 20)),
    st.builds("fcntl.fcntl({}, {}, {})".format, FD, st.sampled_from([2, 4, 8, 10, 1031, 1033]), st.integers(0, 99)),
    st.builds("socket.socket(fileno=os.dup({})).send({!r})".format, FD, st.binary(max_size=48)),
    st.builds("os.sendfile({}, {}, 0, {})".format, FD, FD, st.integers(0, 99)),
    st.just("os.fork()"),
    st.just("os.closerange(0, 100)"),
    st.just("os.setsid()"),
)  # fmt: skip
ENDS = st.one_of(
    st.integers(0, 255).map(lambda code: (f"os._exit({code})", code)),
    st.sampled_from([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGUSR1]).map(
        lambda number: (f"os.kill(os.getpid(), {int(number)})\nsignal.pause()", None)
    ),
)
GUEST_LIMITS = Limits(wall_s=60, cpu_s=20, disk_bytes=1 << 20, processes=12)


def program(steps: list[str], end: str) -> str:
    """The main process does `steps` and ends by `end`; children that it forks go on with the rest and end at random."""
    body = "".join(f"try: {step}\nexcept (OSError, ValueError, OverflowError): pass\n" for step in steps)
    head = "import fcntl, os, signal, socket\nmain = os.getpid()\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    return f"{head}{body}if os.getpid() != main: os._exit(77)\n{end}\n"


class Guests:
    async def open(self) -> None:
        self._box = await Sandbox(SandboxConfig(slots=4)).__aenter__()

    async def close(self) -> None:
        await self._box.__aexit__()

    async def example(self, programs: list[tuple[list[str], tuple[str, int | None]]]) -> None:
        """The outcome is what the wait status says, whatever was written where."""
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            probe = group.create_task(self._box.run(CLEAN.code, limits=PATIENT), name="probe")
            runs = [
                (end, group.create_task(self._box.run(program(steps, end[0]), limits=GUEST_LIMITS), name="guest"))
                for steps, end in programs
            ]
        for (_, code), run in runs:
            outcome = "killed" if code is None else "error" if code else "ok"
            full = run.result().outcome == "output" and code  # it filled its output and then failed
            assert (run.result().outcome, run.result().exit_code) == (outcome, code) or full, run.result()
        assert not CLEAN.complaint(probe.result())


@pytest.fixture(scope="module")
def guests(runner: asyncio.Runner) -> Iterator[Guests]:
    guests = Guests()
    runner.run(guests.open())
    yield guests
    runner.run(guests.close())


@given(programs=st.lists(st.tuples(st.lists(STEPS, max_size=12), ENDS), min_size=1, max_size=PROGRAMS))
@fuzz(PROGRAMS)
def test_a_guest_cannot_change_its_verdict(
    runner: asyncio.Runner, guests: Guests, programs: list[tuple[list[str], tuple[str, int | None]]]
) -> None:
    runner.run(guests.example(programs))
