"""Many hosts for one node: joining, leaving, dying, falling silent; tiers; bounded load; a node that restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import zmq

from sandbox import Limits, Sandbox, SandboxConfig, SandboxUnavailable, Tier, ToolResult, keys, wire
from sandbox.client.sandbox import QUEUED_PER_SLOT
from sandbox.host.host import Host, Node
from sandbox.mailbox import Mailbox
from tests.support.sandbox_hosts import FakeHost, host_process
from tests.support.sandbox_level import next_news
from tests.support.sandbox_processes import descendants, running, until

LOOPBACK = "tcp://127.0.0.1:*"
BARE, MATH = Tier(name="bare", preload=("math",)), Tier(name="math", preload=("math", "numpy"))
LONG = Limits(wall_s=60, cpu_s=60)


def node(**options: object) -> Sandbox:
    """A node without a host of its own."""
    defaults = {"slots": 0, "listen": LOOPBACK, "tiers": (BARE,)}
    return Sandbox(SandboxConfig(**{**defaults, **options}))  # type: ignore[arg-type]


class Entered:
    """A node with fake hosts, which it needs before it can be entered."""

    def __init__(self, *hosts: dict[str, object], **options: object) -> None:
        self.box, self.options, self.hosts = node(**options), hosts, list[FakeHost]()

    async def __aenter__(self) -> Entered:
        async with asyncio.TaskGroup() as group:
            entering = group.create_task(self.box.__aenter__(), name="enter")
            await until(lambda: self.box.address)
            self.hosts = [FakeHost(self.box.address, **options) for options in self.options]  # type: ignore[arg-type]
            await entering
            await until(lambda: self.box.stats.hosts == len(self.hosts))
        return self

    async def __aexit__(self, *_: object) -> None:
        for host in self.hosts:
            host.close()
        await self.box.__aexit__()


async def test_45000_calls_at_once_are_each_answered_once_and_hosts_hold_few() -> None:
    async with Entered({"slots": 8}, {"slots": 4}) as entered:
        box, hosts = entered.box, entered.hosts
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(box.run(f"print({i})"), name=f"call-{i}") for i in range(45_000)]
        assert [task.result().stdout for task in tasks] == [f"print({i})" for i in range(45_000)]
        assert box.stats.outcomes == {"ok": 45_000}
        assert Counter(call.id for host in hosts for call in host.calls) == dict.fromkeys(range(45_000), 1)
        assert [host.most_held <= slots * QUEUED_PER_SLOT for host, slots in zip(hosts, (8, 4), strict=True)] == [
            True
        ] * 2
        assert all(len(host.calls) > 1000 for host in hosts), "both took part"
        assert box._dispatcher.pending == 0
        assert not box._waiting


async def test_a_message_holds_at_most_64_calls() -> None:
    async with Entered({"slots": 100}) as entered, asyncio.TaskGroup() as group:
        for i in range(300):
            group.create_task(entered.box.run("pass"), name=f"call-{i}")
    assert entered.hosts[0].largest_batch == wire.BATCH


async def test_a_call_that_no_message_can_hold_fails_alone() -> None:
    """Those that would have left with it leave, and the host has room as before."""
    async with Entered({"slots": 2}) as entered:
        box, rooms = entered.box, 2 * QUEUED_PER_SLOT

        async def refused() -> None:
            call = wire.RunRequest(next(box._ids), b"", b"", LONG, "bare", seed=object())  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="the call cannot be sent"):
                await box._submit(call)

        for _ in range(3):
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                tasks = [group.create_task(box.run(f"{i}"), name=f"call-{i}") for i in range(rooms - 2)]
                group.create_task(refused(), name="refused")
                tasks += [group.create_task(box.run("last"), name="last")]
            assert [task.result().stdout for task in tasks] == [*(f"{i}" for i in range(rooms - 2)), "last"]
        for _ in range(rooms):
            await refused()
        assert (await box.run("1")).stdout == "1"
        assert box._dispatcher.pending == 0


async def test_hosts_join_and_leave_while_calls_run() -> None:
    """The calls that a leaving host holds are tried once more; nobody notices."""
    async with Entered({"reply": lambda call: None}, silence_s=600.0) as entered:
        box, first = entered.box, entered.hosts[0]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(box.run(f"print({i})"), name=f"call-{i}") for i in range(50)]
            await until(lambda: len(first.calls) == 2 * QUEUED_PER_SLOT)
            second = FakeHost(box.address)
            entered.hosts.append(second)
            await until(lambda: len(second.calls) == 50 - 2 * QUEUED_PER_SLOT)
            assert not any(task.done() and task.result().stdout == "print(0)" for task in tasks)
            first.close()
            await until(lambda: all(task.done() for task in tasks))
        assert [task.result().stdout for task in tasks] == [f"print({i})" for i in range(50)]
        assert (box.stats.hosts, box.stats.level) == (2, "full")


async def test_a_silent_host_is_given_up_and_what_it_says_later_is_ignored() -> None:
    def late(call: wire.RunRequest) -> None:
        return None

    async with Entered({"reply": late}, silence_s=1.5) as entered:
        box, silent = entered.box, entered.hosts[0]
        silent.mute = True
        async with asyncio.TaskGroup() as group:
            task = group.create_task(box.run("1"), name="call")
            await until(lambda: silent.calls)
            await until(lambda: box.stats.level == "")
            silent.answer([(silent.calls[0].id, ToolResult(outcome="ok", stdout="late"))])
            await asyncio.sleep(0.2)
            assert not task.done()
            entered.hosts.append(FakeHost(box.address))
            assert (await task).stdout == "1"


async def test_hosts_are_pinged_each_second() -> None:
    async with Entered({}) as entered:
        await until(lambda: entered.hosts[0].pings >= 3)


async def test_a_call_of_a_tier_without_host_waits_then_fails_and_holds_up_no_other() -> None:
    async with Entered({}, tiers=(BARE, MATH), start_s=2.0) as entered, asyncio.TaskGroup() as group:
        box = entered.box

        async def refused() -> None:
            with pytest.raises(
                SandboxUnavailable, match=r"no host of tier 'math' came within 2 s \(present: bare\)\. Fix: start one"
            ):
                await box.run("import numpy")

        failing = group.create_task(refused(), name="refused")
        assert (await box.run("import math")).outcome == "ok"
        assert not failing.done()
        await failing
        waiting = group.create_task(box.run("import numpy"), name="waiting")
        await asyncio.sleep(0)
        entered.hosts.append(FakeHost(box.address, tiers=("math",)))
        assert (await waiting).outcome == "ok"
        assert [call.tier for call in entered.hosts[1].calls] == ["math"]


async def test_without_any_host_entering_fails_in_time() -> None:
    with pytest.raises(
        SandboxUnavailable, match=r"no host came within 0\.2 s\. Fix: start one with `rocstar sandbox-host"
    ):
        async with node(start_s=0.2):
            raise AssertionError("entered")


async def test_a_taken_port_is_said() -> None:
    async with Entered({}) as entered:
        with pytest.raises(SandboxUnavailable, match=r"cannot listen on tcp://.*: Address already in use"):
            async with node(listen=entered.box.address):
                raise AssertionError("entered")


async def test_what_nobody_understands_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with Entered({}) as entered:
        entered.hosts[0].mailbox.send(wire.Hello(0, "", []))
        entered.hosts[0].mailbox.send(wire.Hello(5, "full", ["bare"]))
        stranger = FakeHost(entered.box.address, slots=0)
        entered.hosts.append(stranger)
        for frames in ([b""], [b"\xc1"], [b"x", b"y"], [wire.encode(wire.Ping())]):
            stranger.mailbox.send_frames(*frames)
        stranger.mailbox.send(wire.Results([wire.CallResult(0, ToolResult(outcome="ok"))]))
        stranger.mailbox.send(wire.Refused("no"))
        entered.hosts.append(FakeHost(entered.box.address, level="none"))
        await until(lambda: caplog.text.count("unexpected hello") == 3)
        await until(lambda: caplog.text.count("turned away") == 1)
        assert caplog.text.count("cannot decode") == 4
        assert (await entered.box.run("1")).stdout == "1"
        assert entered.box.stats.hosts == 1
        assert [bool(host.pings) for host in entered.hosts] == [True, False, False]


@pytest.mark.parametrize(
    "bad", [b"\xc1", wire.encode(wire.Alive())[:2] + b"\xff" * 4, b"\x91" * 4000, b"\x92\xa7Resu\xe9ts\x90"]
)
async def test_a_host_that_says_what_is_no_message_is_dropped_and_its_calls_go_elsewhere(bad: bytes) -> None:
    async with Entered({"reply": lambda call: None}) as entered, asyncio.TaskGroup() as group:
        box, strange = entered.box, entered.hosts[0]
        tasks = [group.create_task(box.run(f"{i}"), name=f"call-{i}") for i in range(3)]
        await until(lambda: len(strange.calls) == 3)
        entered.hosts.append(FakeHost(box.address))
        await until(lambda: box.stats.hosts == 2)
        strange.mailbox.send_frames(bad)
        strange.answer([(call.id, ToolResult(outcome="ok", stdout="late")) for call in strange.calls])
        assert [(await task).stdout for task in tasks] == ["0", "1", "2"]
        assert {(await box.run("next")).stdout for _ in range(9)} == {"next"}
        assert len(strange.calls) == 3


async def test_what_nobody_understands_holds_up_nothing_behind_it() -> None:
    """Also when it is the reader that fails: a socket tells only once that something has come."""
    heard, errors = list[bytes](), list[object]()

    def receive(frames: list[bytes]) -> None:
        heard.append(frames[-1])
        if frames[-1] == b"bad":
            raise KeyError("mine")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    reader, writer = Mailbox(zmq.ROUTER, receive), Mailbox(zmq.DEALER, lambda frames: None)
    reader.socket.bind(LOOPBACK)
    writer.socket.connect(reader.socket.getsockopt_string(zmq.LAST_ENDPOINT))
    for frame in (b"bad", b"1", b"bad", b"2"):
        writer.send_frames(frame)
    await until(lambda: heard == [b"bad", b"1", b"bad", b"2"])
    assert [repr(error) for error in errors] == ["KeyError('mine')"] * 2
    writer.close()
    reader.close()


async def test_messages_of_any_size_arrive(tmp_path: Path) -> None:
    async with Sandbox(SandboxConfig(slots=2, tiers=(BARE,), listen=LOOPBACK)) as box:
        code = "x = 0\n" * (1_000_000 // 6) + "print(x)"
        assert (await box.run(code)).stdout == "0\n"
        text = "\u00e4" * (5 << 20)  # ten MiB
        limits = Limits(wall_s=20, output_bytes=12 << 20)
        result = await box.run("import sys; sys.stdout.write(sys.stdin.read())", text, limits)
        assert (result.outcome, result.stdout == text) == ("ok", True)
        full = "x = 7;".ljust(wire.MAX_CODE_BYTES - 1, "#") + "\n"
        assert (await box.run(full, limits=limits)).outcome == "ok"
        with pytest.raises(ValueError, match="code must have at most 8388608 bytes"):
            await box.run(full + " ")
        async with box.session() as session:
            assert (await session.run(full, limits=limits)).session_state == "kept"
            assert (await session.run("x", text, limits=limits)).display == "7"
            with pytest.raises(ValueError, match="code must have at most 8388608 bytes"):
                await session.run(full + " ")
            assert (await session.run("x")).session_state == "kept"


async def test_a_node_that_leaves_stops_its_calls_and_can_be_entered_again() -> None:
    async with Entered({"slots": 9, "reply": lambda call: None}) as entered:
        box, first = entered.box, entered.hosts[0]

        async def refused() -> None:
            with pytest.raises(SandboxUnavailable, match="was closed"):
                await box.run("1")

        async with asyncio.TaskGroup() as group:
            group.create_task(refused(), name="refused")
            await until(lambda: first.calls)
            await box.__aexit__()
        await until(lambda: first.stopped == [0])
        box.address = ""
        async with asyncio.TaskGroup() as group:
            entering = group.create_task(box.__aenter__(), name="enter")
            await until(lambda: box.address)
            entered.hosts.append(FakeHost(box.address))
            await entering
        assert (await box.run("2")).stdout == "2"


async def test_a_cancelled_call_is_stopped_at_its_host() -> None:
    async with Entered({"reply": lambda call: None}) as entered, asyncio.TaskGroup() as group:
        host = entered.hosts[0]
        task = group.create_task(entered.box.run("1"), name="call")
        await until(lambda: host.calls)
        task.cancel()
        await until(lambda: host.stopped == [host.calls[0].id])
    assert entered.box.stats.cancelled == 1


async def test_what_a_call_asks_for_reaches_its_host() -> None:
    async with Entered({"tiers": ("bare", "math")}, tiers=(BARE, MATH)) as entered:
        box = entered.box
        await box.run("1", "in", LONG, display=True, seed=7, tier="math")
        async with box.session(seed=8) as session:
            await session.run("2")
            await session.run("3")
        async with box.session() as other:
            await other.run("4")
        host = entered.hosts[0]
        await until(lambda: len(host.ended) == 2)
        assert host.calls[0] == wire.RunRequest(0, b"1", b"in", LONG, "math", True, 7, None)
        first, second = host.calls[1:3]
        assert (first.tier, first.display, first.seed, second.seed) == ("math", True, 8, 8)
        assert first.step is not None
        assert first.step == wire.SessionStep(host.ended[0], 0, [], False)
        assert second.step == wire.SessionStep(host.ended[0], 1, None, False)
        assert host.calls[3].seed not in (None, 8)
        assert len(set(host.ended)) == 2


async def test_a_session_moves_when_its_host_dies_in_the_middle_of_a_cell() -> None:
    async with Entered({"slots": 4}) as entered, asyncio.TaskGroup() as group:
        box, first = entered.box, entered.hosts[0]
        async with box.session() as session:
            assert (await session.run("x = 1")).session_state == "kept"
            entered.hosts.append(FakeHost(box.address))
            await until(lambda: box.stats.hosts == 2)
            assert (await session.run("x = 2")).session_state == "kept"
            first.reply = lambda call: None
            task = group.create_task(session.run("x"), name="cell")
            await until(lambda: len(first.calls) == 3)
            first.close()
            assert ((await task).session_state, (await task).stdout) == ("restored", "x")
        second = entered.hosts[1]
        [rebuilt] = [call.step for call in second.calls if call.step]
        assert rebuilt.history == [wire.Cell(code, b"", Limits()) for code in (b"x = 1", b"x = 2")]
        await until(lambda: second.ended)


async def test_a_warning_is_printed_at_each_start_without_a_jail(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        async with Entered({}, isolation="none"):
            pass
    assert (
        capfd.readouterr().err
        == 2 * "sandbox: isolation='none': code runs with all rights of this user, without a jail\n"
    )


@pytest.mark.smoke
async def test_real_hosts_over_tcp_with_keys(tmp_path: Path) -> None:
    """Beside the local one, with curve; one leaves by SIGTERM, one by SIGKILL."""
    keys.make(tmp_path / "keys")
    box = Sandbox(SandboxConfig(slots=1, tiers=(BARE,), listen=LOOPBACK, keys=tmp_path / "keys"))
    options = (f"keys={tmp_path / 'keys'}", "slots=2", "tiers=bare=math")
    async with box, host_process(box.address, *options) as one, host_process(box.address, *options) as two:
        await until(lambda: box.stats.hosts == 3, deadline_s=20)
        code = "import time\ntime.sleep(0.3)\nprint(input())"
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(box.run(code, str(i)), name=f"call-{i}") for i in range(30)]
            await until(lambda: sum(task.done() for task in tasks) > 3)
            one.terminate()
            os.kill(two.pid, signal.SIGKILL)
        assert [task.result().stdout for task in tasks] == [f"{i}\n" for i in range(30)]
        assert all(task.result().jailed for task in tasks)
        async with asyncio.timeout(3):
            assert await one.wait() == 0
            assert await two.wait() == -signal.SIGKILL


async def test_a_host_with_the_wrong_key_says_what_may_be_wrong_and_gets_no_call(tmp_path: Path) -> None:
    for name in ("keys", "other"):
        keys.make(tmp_path / name)
    (tmp_path / "other" / "node.pub").write_bytes((tmp_path / "keys" / "node.pub").read_bytes())
    async with Sandbox(SandboxConfig(slots=1, tiers=(BARE,), listen=LOOPBACK, keys=tmp_path / "keys")) as box:
        options = (f"keys={tmp_path / 'other'}", "slots=1", "tiers=bare=math", "silence_s=2")
        async with host_process(box.address, *options) as wrong:
            async with asyncio.timeout(20):
                line = await next_news(wrong.stderr)
                assert "does not answer (silent for 2 s), trying again; are the keys those of the node?" in line
                assert "does not answer" in await next_news(wrong.stderr)
            wrong.send_signal(signal.SIGINT)
            async with asyncio.timeout(3):
                assert await wrong.wait() == 0
        assert box.stats.hosts == 1


async def test_a_host_outlives_its_node_ends_its_calls_and_serves_the_next() -> None:
    """Both nodes number their calls from 0: no answer to the first may reach the second, which is there at once: well
    before the host would have missed the first.
    """
    async with Entered({}) as entered:
        address = entered.box.address  # a port that is free again in a moment
    first = node(listen=address)
    async with host_process(address, "slots=1", "tiers=bare=math", "silence_s=60") as host:

        async def orphan() -> None:
            with pytest.raises(SandboxUnavailable, match="was closed"):
                await first.run("import time\ntime.sleep(2.5)\nprint('first')", limits=LONG)

        async with asyncio.TaskGroup() as group, first:
            before = len(descendants(host.pid))
            group.create_task(orphan(), name="orphan")
            await until(lambda: len(descendants(host.pid)) == before + 2)
            busy = descendants(host.pid)
        async with node(listen=address) as second:
            assert [(await second.run(f"print({i})")).stdout for i in range(3)] == ["0\n", "1\n", "2\n"]
            assert sum(running(pid) for pid in busy) == before, "the orphan has ended"
            assert (second.stats.hosts, host.returncode) == (1, None)
            assert "its calls and sessions are ended" in await next_news(host.stderr)


class FakeNode:
    """Speaks the protocol to real hosts: who said hello, and what each answered."""

    def __init__(self) -> None:
        self.hosts: list[bytes] = []
        self.results: dict[bytes, list[wire.CallResult]] = {}
        self.mailbox = Mailbox(zmq.ROUTER, self._receive)
        self.mailbox.socket.bind(LOOPBACK)
        self.address = self.mailbox.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _receive(self, frames: list[bytes]) -> None:
        match wire.decode_to_client(frames[1]):
            case wire.Hello():
                self.hosts.append(frames[0])
                self.results[frames[0]] = []
                self.mailbox.send(wire.Ping(), frames[0])
            case wire.Results(results):
                self.results[frames[0]] += results


async def test_a_host_whose_node_fell_silent_ends_its_calls_and_answers_only_who_asks() -> None:
    """Two nodes number their calls alike, and the one slot is free for the second."""
    node = FakeNode()
    code = b"import time\ntime.sleep(float(input()))\nprint('done')"
    async with host_process(node.address, "slots=1", "tiers=bare=math", "silence_s=1.5"):
        for i, wait in enumerate((b"60", b"0.5")):
            await until(lambda i=i: len(node.hosts) == i + 1, deadline_s=20)
            node.mailbox.send(wire.Run([wire.RunRequest(5, code, wait, LONG, "bare")]), node.hosts[i])
        first, second = node.hosts
        await until(lambda: node.results[second])
        assert [(item.id, item.result.stdout) for item in node.results[second]] == [(5, "done\n")]
        assert node.results[first] == []
    node.mailbox.close(linger_ms=0)


async def test_two_calls_of_one_number_are_two_calls() -> None:
    """As when a node tries a call again on the same host before the host has ended the first try."""
    node = FakeNode()
    async with host_process(node.address, "slots=1", "tiers=bare=math"):
        await until(lambda: node.hosts, deadline_s=20)
        node.mailbox.send(
            wire.Run([wire.RunRequest(5, b"print(%d)" % i, b"", LONG, "bare") for i in range(2)]), node.hosts[0]
        )
        await until(lambda: len(node.results[node.hosts[0]]) == 2)
        assert [item.result.stdout for item in node.results[node.hosts[0]]] == ["0\n", "1\n"]
    node.mailbox.close(linger_ms=0)


class BrokenPool:
    """As Pool, with a bug."""

    level = "full"

    def __init__(self, answer: object) -> None:
        self.ready, self._over = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.ready.set()
        await self._over.wait()

    def stop(self) -> None:
        self._over.set()

    def submit(self, call: wire.RunRequest) -> None:
        raise KeyError("a bug")


async def test_a_host_that_meets_a_bug_ends_rather_than_leave_a_call_unanswered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = FakeNode()
    place = Node(address=node.address, keys=None, silence_s=None)
    host = Host(place, 1, (BARE,), BrokenPool)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group, asyncio.timeout(20):
        serving = group.create_task(host.serve(), name="host")
        await until(lambda: node.hosts)
        node.mailbox.send(wire.Run([wire.RunRequest(5, b"", b"", LONG, "bare")]), node.hosts[0])
        assert await serving == "an error of our own, see above"
    assert "a bug" in caplog.text
    assert node.results == {node.hosts[0]: []}
    node.mailbox.close(linger_ms=0)


async def test_a_node_that_says_what_is_no_message_gets_a_new_connection_and_no_answers_to_the_old() -> None:
    """Its calls in that message are unknown: it shall find its host gone and try them again."""
    node = FakeNode()
    code = b"import time\ntime.sleep(float(input()))\nprint('done')"
    async with host_process(node.address, "slots=1", "tiers=bare=math") as host:
        for i, (wait, bad) in enumerate([(b"60", b"\xc1"), (b"60", b"\x91" * 4000), (b"0", b"")]):
            await until(lambda i=i: len(node.hosts) == i + 1, deadline_s=20)
            node.mailbox.send(wire.Run([wire.RunRequest(5, code, wait, LONG, "bare")]), node.hosts[i])
            if bad:
                node.mailbox.send_frames(node.hosts[i], bad)
        await until(lambda: node.results[node.hosts[2]])
        assert [[item.result.stdout for item in node.results[name]] for name in node.hosts] == [[], [], ["done\n"]]
        assert "cannot be decoded" in await next_news(host.stderr)
    node.mailbox.close(linger_ms=0)


async def test_a_host_that_cannot_serve_says_why_on_stderr() -> None:
    async with host_process("tcp://127.0.0.1:9", "nsjail=/nowhere/nsjail") as host, asyncio.timeout(20):
        _, errors = await host.communicate()
        assert errors.startswith(b"sandbox.host: no nsjail at /nowhere/nsjail. Fix: install it with")
        assert host.returncode == 1
