"""Kill -9 at every level, at random, under load: each call is answered once and never wrongly, and nothing is left.

A call may be "killed" when its own process was, and "lost" when what was below or above it died twice; both are counted
and neither is ever an answer. CI runs for some seconds. The long run, in seconds:

    ROCSTAR_CHAOS_S=120 python -m pytest tests/slow/test_sandbox_chaos.py -s -o timeout=0
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import Limits, Sandbox, SandboxConfig, Tier
from tests.support.sandbox_honest import CLEAN, PATIENT, Honest, honest
from tests.support.sandbox_leftovers import cgroups_of, folders_and_mounts, processes_below, system_v_objects
from tests.support.sandbox_processes import descendants, host_pid, parent_of, running, until

pytestmark = pytest.mark.alone

CHAOS_S = float(os.environ.get("ROCSTAR_CHAOS_S", "10"))
SLOTS, CALLERS, TALKERS = 8, 24, 6
TIERS = (
    Tier(name="bare", preload=("json", "math", "random", "tempfile", "time")),
    Tier(name="more", preload=("asyncio",)),
)
ANSWER_S = 60.0  # an answer that takes longer than this is no answer
LEVELS = ("host", "nsjail", "zygote", "slot", "child")  # by depth below us
WEIGHTS = (1, 1, 1, 4, 6)
PAUSE_S = (0.05, 0.6)
SLEEPER = "import time\ntime.sleep(0.2)\nprint({n})"


class Watch:
    """Every process and control group ever seen below the host, to be looked for at the end."""

    def __init__(self) -> None:
        self.pids: dict[int, str] = {}
        self.groups: set[Path] = set()

    def look(self) -> None:
        below = descendants(os.getpid())
        for pid in below:
            with contextlib.suppress(OSError):
                self.pids[pid] = _birth(pid)
        self.groups |= cgroups_of(below)

    def left(self) -> list[object]:
        alive: list[object] = []
        for pid, birth in self.pids.items():
            with contextlib.suppress(OSError):
                if running(pid) and _birth(pid) == birth:  # else the number is used again by another process
                    alive.append(pid)
        return alive + [group for group in self.groups if group.exists()]


def _birth(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]


def by_level() -> dict[str, list[int]]:
    """The sandbox's processes by what they are. Some may end while we look."""
    with contextlib.suppress(StopIteration, ValueError, OSError):  # no host at this moment
        host = host_pid()
        depths = {host: 0}
        below = {pid for pid, command in descendants(host).items() if "-m sandbox.host" not in command}  # the janitor
        for _ in LEVELS:
            for pid in below:
                with contextlib.suppress(OSError):  # it has ended
                    if (parent := parent_of(pid)) in depths:
                        depths[pid] = depths[parent] + 1
        deepest = len(LEVELS) - 1
        return {
            level: [pid for pid, depth in depths.items() if min(depth, deepest) == n] for n, level in enumerate(LEVELS)
        }
    return {}


async def kill(watch: Watch, until_s: float, killed: Counter[str]) -> None:
    """Kill something at random until the time is over."""
    chance = random.Random(time.time_ns())
    while time.monotonic() < until_s:
        await asyncio.sleep(chance.uniform(*PAUSE_S))
        watch.look()
        level = chance.choices(LEVELS, WEIGHTS)[0]
        if victims := by_level().get(level):
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(victims), signal.SIGKILL)
                killed[level] += 1


async def call(box: Sandbox, numbers: Iterator[int], until_s: float, answers: Counter[str], wrong: list[str]) -> None:
    """Ask one thing after another until the time is over."""
    while time.monotonic() < until_s:
        number = next(numbers)
        asked = honest(number) if number % 3 else Honest(SLEEPER.format(n=number), "", f"{number}\n")
        tier = TIERS[number % len(TIERS)].name if number % 5 == 0 else None
        async with asyncio.timeout(ANSWER_S):
            result = await box.run(asked.code, asked.stdin, PATIENT, tier=tier, display=number % 4 == 0)
        if result.outcome in ("lost", "killed"):
            answers[result.outcome] += 1
        elif complaint := asked.complaint(result):
            wrong.append(complaint)
        else:
            answers["right"] += 1


async def talk(box: Sandbox, until_s: float, states: Counter[str], wrong: list[str]) -> None:
    """Sessions, one after the other: a cell that says "kept" or "restored" has run on, or left, just the kept cells."""
    numbers = itertools.count()
    while time.monotonic() < until_s:
        async with box.session() as session:
            kept: list[int] | None = None  # None: nothing is in the session
            while time.monotonic() < until_s and (kept is None or len(kept) < 20):
                n = next(numbers)
                code = f"kept.append({n})" if kept is not None else f"kept = [{n}]"
                async with asyncio.timeout(ANSWER_S):
                    result = await session.run(f"import time\ntime.sleep({n % 3 / 20})\n{code}\nkept", limits=PATIENT)
                states[f"{result.session_state}"] += 1
                if result.session_state == "lost":
                    kept = None
                elif result.outcome == "ok":
                    kept = [*(kept or ()), n]
                    if result.display != str(kept):
                        wrong.append(f"{result.session_state}: {result.display} instead of {kept}")
                elif result.outcome == "killed" and result.session_state == "restored":
                    continue  # undone: the next cell shows it
                else:
                    wrong.append(f"after {kept}: {result}")


async def test_killing_at_random() -> None:
    before = folders_and_mounts() | system_v_objects()
    answers: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    states: Counter[str] = Counter()
    wrong: list[str] = []
    numbers, watch, end = itertools.count(), Watch(), time.monotonic() + CHAOS_S
    async with Sandbox(SandboxConfig(slots=SLOTS, tiers=TIERS)) as box:
        async with asyncio.TaskGroup() as group:
            group.create_task(kill(watch, end, killed), name="killer")
            for n in range(CALLERS):
                group.create_task(call(box, numbers, end, answers, wrong), name=f"caller-{n}")
            for n in range(TALKERS):
                group.create_task(talk(box, end, states, wrong), name=f"talker-{n}")
        assert not wrong, "\n".join(wrong[:5])
        assert answers["right"] > answers["lost"] + answers["killed"], answers
        assert sum(answers.values()) == next(numbers), "each was answered once"
        assert sum(box.stats.outcomes.values()) == sum(answers.values()) + sum(states.values())
        assert states["kept"] > states["lost"]
        assert states["restored"]
        assert sum(killed.values()) >= CHAOS_S / 2
        async with asyncio.TaskGroup() as group:
            probes = [group.create_task(box.run(CLEAN.code, limits=PATIENT), name="probe") for _ in range(SLOTS)]
        assert not [probe.result() for probe in probes if CLEAN.complaint(probe.result())]
        await until(lambda: not processes_below(host_pid())[1])
        watch.look()
    counts = f"killed {dict(killed)}; answers {dict(answers)}; cells {dict(states)}; hosts {box.stats.hosts}"
    print(f"\n{CHAOS_S:g} s: {counts}")
    await until(lambda: not watch.left())
    await until(lambda: not (folders_and_mounts() | system_v_objects()) - before)


async def test_killed_while_idle() -> None:
    """Each level dies while nothing runs: the next call is right, and no call is lost."""
    async with Sandbox(SandboxConfig(slots=2)) as box:
        for level in ("slot", "zygote", "nsjail", "host"):
            await until(lambda level=level: by_level().get(level))
            os.kill(by_level()[level][0], signal.SIGKILL)
            for number in range(4):
                assert (await box.run(f"print({number})", limits=Limits(wall_s=20))).stdout == f"{number}\n", level
        assert set(box.stats.outcomes) == {"ok"}
