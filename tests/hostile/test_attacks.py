"""The attack suite (attacks/) against one sandbox, first one by one, then all at once; and against a host without the
native part.

Beside and after every attack run honest calls, each with one right answer. At the end the machine must be as it was
before: looked at from outside, where no guest can lie.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox import Limits, Sandbox, SandboxConfig, ToolResult
from sandbox.host.slots import GRACE_S
from tests.hostile.attacks import ATTACKS as ALL
from tests.hostile.attacks import PAUSE_S, SESSION_ATTACKS, Attack, SessionAttack
from tests.support.paths import ROOT
from tests.support.sandbox_honest import CLEAN, PATIENT, Honest, honest
from tests.support.sandbox_hosts import host_process
from tests.support.sandbox_leftovers import MARK, cgroups_of, folders_and_mounts, processes_below, system_v_objects
from tests.support.sandbox_level import CGROUPS, OWN_IDS, needs_own_ids
from tests.support.sandbox_processes import descendants, host_pid, running, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]
SLOTS = 8
BESIDE = 3  # honest calls that run while an attack does
TOGETHER = 4 if OWN_IDS else 1  # attacks by sessions at a time: a fork bomb may take what all of one id may fork
# Memory of a call as a whole is bounded in control groups only; its processes under an id of its own, that is not 0.
UNBOUND = set() if CGROUPS else {"shared_mappings", "many_processes", "socket_buffers"}
if not OWN_IDS:
    UNBOUND |= {"identity_of_root", "limits_that_must_be_there"}
    UNBOUND |= {"threads", "processes", "processes_that_change_their_session"}
ATTACKS = [attack for attack in ALL if attack.name not in UNBOUND]
PLAIN_POINTS = {"A1", "A2", "A3", "A4", "B9", "D20", "D21"}  # what slot.py and guest.py do without the native part


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return iter(range(1_000_000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    before = folders_and_mounts() | system_v_objects()
    async with Sandbox(SandboxConfig(slots=SLOTS)) as sandbox:
        await sandbox.run("import numpy", limits=PATIENT)  # every tier that the tests use is up
        yield sandbox
        below = descendants(os.getpid())
        groups = cgroups_of(below)
    assert not [pid for pid in below if running(pid)], "processes are left"
    assert not [group for group in groups if group.exists()], "control groups are left"
    await until(lambda: not (folders_and_mounts() | system_v_objects()) - before)


@pytest.fixture(scope="module")
def next_calls() -> list[float]:
    """How long the call after each attack took, in s."""
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def idle(box: Sandbox) -> tuple[int, int]:
    """The pid of the host, and how many processes it has below it when it is idle."""
    return host_pid(), len(descendants(host_pid()))


async def ask(box: Sandbox, call: Honest) -> str:
    return call.complaint(await box.run(call.code, call.stdin, PATIENT))


async def ask_at_once(box: Sandbox, next_calls: list[float]) -> None:
    """The call after an attack is right, and does not wait until the host misses a slot (slots.GRACE_S)."""
    result = await box.run(CLEAN.code, CLEAN.stdin, PATIENT)
    assert not CLEAN.complaint(result)
    next_calls.append(result.queue_s + result.wall_s)
    assert next_calls[-1] < GRACE_S


async def under_attack(box: Sandbox, attack: Attack) -> list[str]:
    """What went wrong for the attack and for the call that it wants at its side."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(box.run(attack.code, attack.stdin, attack.limits), name=attack.name)
        if attack.beside is not None:
            victim = Honest(attack.beside[0], "", attack.beside[1])
            beside = group.create_task(ask(box, victim), name="beside")
    found = attack.complaints(task.result())
    return [*found, beside.result()] if attack.beside is not None and beside.result() else found


async def session_under_attack(box: Sandbox, attack: SessionAttack) -> list[str]:
    """What went wrong for the attack, and for a session that lives beside it."""
    async with box.session(tier="bare") as session, box.session(tier="bare") as victim:
        for number, turn in enumerate(attack.turns):
            if turn.idle:
                await asyncio.sleep(PAUSE_S)  # in which nothing may happen
            beside = await victim.run(f"n = {number} if {number} == 0 else n + 1\nn", limits=PATIENT)
            if (beside.display, beside.session_state) != (str(number), "kept"):
                return [f"the session beside it answered {beside}"]
            if found := turn.complaints(await session.run(turn.code, limits=turn.limits)):
                return [f"turn {number}: {complaint}" for complaint in found]
    return []


def calm(host: int, idle: int) -> bool:
    """Whether there are no more processes below the host than when it is idle, and no dead ones."""
    alive, dead = processes_below(host)
    return alive <= idle and not dead


async def all_well(box: Sandbox, idle: tuple[int, int], next_calls: list[float]) -> None:
    """Right after an attack every slot is right, and nothing of the attack is left."""
    await ask_at_once(box, next_calls)
    async with asyncio.TaskGroup() as group:
        probes = [group.create_task(ask(box, CLEAN), name="probe") for _ in range(SLOTS)]
    assert not [task.result() for task in probes if task.result()]
    await until(lambda: calm(*idle))


@pytest.mark.parametrize("attack", ATTACKS, ids=[f"{attack.point}-{attack.name}" for attack in ATTACKS])
async def test_attack(
    box: Sandbox, idle: tuple[int, int], numbers: Iterator[int], next_calls: list[float], attack: Attack
) -> None:
    """The attack fails; what runs beside it and right after it, in every slot, is right; nothing of it lives on."""
    hosts = box.stats.hosts
    async with asyncio.TaskGroup() as group:
        attacked = group.create_task(under_attack(box, attack), name=attack.name)
        honest_calls = [group.create_task(ask(box, honest(next(numbers))), name="honest") for _ in range(BESIDE)]
    assert not attacked.result()
    assert not [task.result() for task in honest_calls if task.result()]
    await all_well(box, idle, next_calls)
    assert box.stats.hosts == hosts, "the attack ended the host"


@pytest.mark.parametrize("first", range(0, len(SESSION_ATTACKS), TOGETHER))
async def test_session_attacks(
    box: Sandbox, idle: tuple[int, int], numbers: Iterator[int], next_calls: list[float], first: int
) -> None:
    """The same for cells of a session, some at a time as they mostly wait: sessions and calls beside them are right."""
    hosts = box.stats.hosts
    attacks = SESSION_ATTACKS[first : first + TOGETHER]
    async with asyncio.TaskGroup() as group:
        attacked = [group.create_task(session_under_attack(box, attack), name=attack.name) for attack in attacks]
        honest_calls = [group.create_task(ask(box, honest(next(numbers))), name="honest") for _ in range(BESIDE)]
    assert not [(task.get_name(), task.result()) for task in attacked if task.result()]
    assert not [task.result() for task in honest_calls if task.result()]
    await all_well(box, idle, next_calls)
    assert box.stats.hosts == hosts, "the attack ended the host"


async def test_sessions_do_not_see_each_other(box: Sandbox) -> None:
    """Files, processes, names, shared memory: what one leaves, the other looks for while the first lives."""
    leave = """
import os, socket, time
for path in ('/tmp/left', '/dev/shm/left'): open(path, 'w').write('secret')
if os.fork() == 0: time.sleep(60)
for family, name in ((socket.AF_UNIX, '\\0left'), (socket.AF_UNIX, '/tmp/left.socket')):
    try: socket.socket(family).bind(name); print('bound')
    except OSError: pass
print(os.getuid())
"""
    look = """
import os, socket
found = [name for folder in ('/tmp', '/dev/shm') for name in os.listdir(folder)]
for pid in range(FIRST, 400):
    if pid != os.getpid():
        try: os.kill(pid, 9); found.append(pid)
        except OSError as error: found += [pid] if error.errno == 1 and pid > 1 else []
try: socket.socket(socket.AF_UNIX).connect('\\0left'); found.append('socket')
except OSError: pass
print(os.getuid(), *found)
""".replace("FIRST", "1" if OWN_IDS else "2")  # of the same id, the first may be signalled, to which it is deaf
    async with box.session(tier="bare") as one, box.session(tier="bare") as two:
        await two.run("pass")
        uid = (await one.run(leave, limits=PATIENT)).stdout.strip()
        other, *found = (await two.run(look, limits=PATIENT)).stdout.split()
        assert (uid.isdigit(), other.isdigit(), found) == (True, True, [])
        assert uid != other or os.geteuid() != 0  # with a range of ids each has its own
        assert (await one.run("open('/tmp/left').read()")).display == "'secret'"


async def storm(box: Sandbox, order: Sequence[Attack | SessionAttack]) -> list[str]:
    """All of these in one queue, an honest call after each attack and probes between them; all complaints."""
    complaints: list[str] = []

    async def attacked(attack: Attack | SessionAttack) -> None:
        if isinstance(attack, Attack):
            found = await under_attack(box, attack)
        else:
            found = await session_under_attack(box, attack)
        complaints.extend(f"{attack.name}: {complaint}" for complaint in found)

    async def asked(call: Honest) -> None:
        complaints.extend(filter(None, [await ask(box, call)]))

    async with asyncio.TaskGroup() as group:
        for number, attack in enumerate(order):
            group.create_task(attacked(attack), name=attack.name)
            group.create_task(asked(honest(number)), name=f"honest-{number}")
            group.create_task(asked(CLEAN), name=f"probe-{number}")
    return complaints


@needs_own_ids  # else a fork bomb takes what sessions beside it may fork
async def test_all_attacks_at_once(box: Sandbox, idle: tuple[int, int]) -> None:
    order: list[Attack | SessionAttack] = [*ATTACKS, *SESSION_ATTACKS]
    random.Random(3).shuffle(order)
    hosts = box.stats.hosts
    complaints = await storm(box, order)
    assert not complaints, "\n".join(complaints)
    assert box.stats.hosts == hosts
    await until(lambda: calm(*idle))


async def test_attacks_without_the_native_part(tmp_path: Path) -> None:
    """What slot.py and guest.py do in its place holds as well."""
    shutil.copytree(ROOT / "sandbox", tmp_path / "sandbox", ignore=shutil.ignore_patterns("_native.*", "__pycache__"))
    order = [attack for attack in ATTACKS if attack.point in PLAIN_POINTS]
    random.Random(4).shuffle(order)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    async with (
        host_process(address, f"slots={SLOTS}", root=tmp_path),
        Sandbox(SandboxConfig(slots=0, listen=address, start_s=30)) as sandbox,
    ):
        complaints = await storm(sandbox, order)
        assert not complaints, "\n".join(complaints)
        assert (await sandbox.run("print(1)\nwhile True: pass", limits=Limits(wall_s=0.3))).stdout == "1\n"
        assert sandbox.stats.hosts == 1


async def test_cancelled_attacks_end(box: Sandbox, idle: tuple[int, int]) -> None:
    """Cancelling the callers kills the calls, however they resist."""
    resisting = [attack for attack in ATTACKS if attack.outcomes == ("timeout",)]
    long = Limits(wall_s=120, cpu_s=120)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(box.run(attack.code, limits=long), name=attack.name) for attack in resisting[:SLOTS]]
        await until(lambda: len(descendants(idle[0])) >= idle[1] + SLOTS // 2)
        for task in tasks:
            task.cancel()
    await until(lambda: len(descendants(idle[0])) <= idle[1])
    assert not await ask(box, CLEAN)


RANDOM = """
import os, random, secrets, uuid, numpy
print(random.random(), random.SystemRandom().random(), os.urandom(8).hex(), uuid.uuid4(), secrets.token_hex(8),
      numpy.random.random(), numpy.random.default_rng().random(), random.Random().random(), numpy.random.randint(2**60))
"""


async def test_random_numbers_differ_between_calls(box: Sandbox) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(box.run(RANDOM, limits=PATIENT), name="random") for _ in range(40)]
    results = [task.result() for task in tasks]
    assert {result.outcome for result in results} == {"ok"}, results[0].stderr
    drawn = [number for result in results for number in result.stdout.split()]
    assert len(drawn) == 40 * 9
    assert len(set(drawn)) == len(drawn)


async def test_the_last_call_is_as_good_as_the_first(
    box: Sandbox, next_calls: list[float], record_property: Callable[[str, object], None]
) -> None:
    """Every slot works after all that. The time of a call is reported (`pytest -rA`, junit), not judged."""
    waits: list[float] = []

    async def timed(number: int) -> ToolResult:
        since = asyncio.get_running_loop().time()
        result = await box.run(f"print({number})")
        waits.append(asyncio.get_running_loop().time() - since)
        return result

    assert [(await timed(number)).stdout for number in range(20)] == [f"{number}\n" for number in range(20)]
    for name, found in (("after_each_attack", next_calls), ("after_all", waits)):
        if found:
            record_property(f"median_call_s_{name}", statistics.median(found))
            median, slowest = statistics.median(found) * 1000, max(found) * 1000
            print(f"{name}: a call takes {median:.1f} ms, at most {slowest:.1f} ms")


async def test_the_suite_is_whole() -> None:
    """Each attack has its own name and program, and the checklist of the threat model is covered."""
    assert len({attack.name for attack in ALL}) == len({attack.code for attack in ALL}) == len(ALL) >= 120
    assert len({attack.name for attack in SESSION_ATTACKS}) == len(SESSION_ATTACKS) >= 20
    points = {f"A{n}" for n in range(1, 9)} | {"B9", "B10", "B11", "C13", "C14", "C15", "C16"}
    assert {attack.point for attack in ALL} >= points | {"D18", "D19", "D20", "D21", "E22"}
    assert any(MARK in attack.code for attack in ALL)
