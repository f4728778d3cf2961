"""Measures calls that are submitted all at once, and sessions turn by turn against replay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from bench.benches.sandbox.contenders import CASES, Box
from sandbox import ToolResult

# The cells of one rollout of a model: imports and a helper, two costly looks, then follow-ups on what is there.
CELLS = (
    "import math\nfrom itertools import product\ndef divisors(n): return [d for d in range(1, n + 1) if n % d == 0]",
    "import sympy as sp\nx = sp.symbols('x')\nroots = sp.solve(x**3 - 6*x**2 + 11*x - 6, x)\nroots",
    "table = {n: divisors(n) for n in range(1, 301)}\nlen(table)",
    "best = max(table, key=lambda n: len(table[n]))\nbest, len(table[best])",
    "perfect = [n for n in table if sum(table[n]) == 2 * n]\nperfect",
    "pairs = [(a, b) for a, b in product(range(1, 60), repeat=2) if math.isqrt(a*a + b*b)**2 == a*a + b*b]\npairs[:3]",
    "expanded = sp.expand((x + 1)**8)\nexpanded.coeff(x, 4)",
    "sp.factorint(2**31 - 2)",
    "total = sum(int(r) for r in roots) + len(pairs)\ntotal",
    "print(total % 1000)",
)
LAST_STDOUT = "66\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """Calls submitted at once. lost: not answered, or not with the program's output."""

    calls: int
    lost: int
    wall_s: float
    p50_s: float
    p99_s: float

    def figures(self) -> dict[str, float]:
        return {"p50_s": self.p50_s, "p99_s": self.p99_s, "calls_per_s": self.calls / self.wall_s, "lost": self.lost}


async def burst(run: Callable[[str], Awaitable[str]], calls: int, repeats: int = 1) -> Burst:
    """Submits `calls` of print(N) at once, `repeats` times one after the other."""
    latencies: list[float] = []
    lost = 0

    async def one(number: int) -> None:
        nonlocal lost
        since = time.perf_counter()
        right = await run(f"print({number})") == f"{number}\n"
        lost += not right
        latencies.append(time.perf_counter() - since)

    started = time.perf_counter()
    for _ in range(repeats):
        async with asyncio.TaskGroup() as group:
            for index in range(calls):
                group.create_task(one(index), name=f"burst-{index}")
    wall_s = time.perf_counter() - started
    latencies.sort()
    p50_s, p99_s = (latencies[int(share * (len(latencies) - 1))] for share in (0.5, 0.99))
    return Burst(calls=calls * repeats, lost=lost, wall_s=wall_s, p50_s=p50_s, p99_s=p99_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """CPU and wall seconds of a cell per turn, state alive, against a stateless call that runs all cells up to it."""

    alive_cpu_s: list[float]
    replay_cpu_s: list[float]
    alive_wall_s: list[float]
    replay_wall_s: list[float]
    wrong: int


async def turns(box: Box, sessions: int) -> Turns:
    """Runs `sessions` rollouts of ten cells side by side, and after each turn as many replays of the same cells."""
    alive: list[Batch] = []
    replay: list[Batch] = []
    tier = CASES[-1].tier.name
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(box.sandbox.session(tier=tier)) for _ in range(sessions)]
        for turn, cell in enumerate(CELLS):
            history = "\n".join(CELLS[: turn + 1])
            alive.append(await _batch(box, [session.run(cell) for session in opened]))
            replay.append(await _batch(box, [box.sandbox.run(history, tier=tier) for _ in opened]))
    wrong = sum(result.outcome != "ok" for batch in alive + replay for result in batch.results)
    wrong += sum(result.stdout != LAST_STDOUT for batch in (alive[-1], replay[-1]) for result in batch.results)
    return Turns(
        alive_cpu_s=[batch.cpu_s for batch in alive],
        replay_cpu_s=[batch.cpu_s for batch in replay],
        alive_wall_s=[batch.wall_s for batch in alive],
        replay_wall_s=[batch.wall_s for batch in replay],
        wrong=wrong,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    results: list[ToolResult]
    cpu_s: float
    wall_s: float


async def _batch(box: Box, calls: Sequence[Coroutine[Any, Any, ToolResult]]) -> Batch:
    """Runs all calls at once; CPU and wall seconds are per call."""
    cpu, started = box.meter.cpu_s(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call, name=f"turn-{index}") for index, call in enumerate(calls)]
    wall_s = (time.perf_counter() - started) / len(calls)
    cpu_s = (box.meter.cpu_s() - cpu) / len(calls)
    return Batch(results=[task.result() for task in tasks], cpu_s=cpu_s, wall_s=wall_s)
