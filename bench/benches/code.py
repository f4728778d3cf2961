"""What does it cost to grade a program by tests: jailed and apart from the tests, and in plain processes?

    rocstar bench code [rounds=3] [data=HumanEval.jsonl.gz] [peer_urls=judge=http://127.0.0.1:8000 peer_pids=judge:PID]

rocstar           algo.reward.code: the program in a jailed call of its own, or one for each input; its tests in another
python, programs  a fresh Python without a jail for each program with its tests below it, or for each input. Code Judge
                  starts one such Python for each program too, behind HTTP, a queue and workers, which are not counted
python, tests     a fresh Python without a jail for each test
judge             a Code Judge that you have started, with the programs as in "python, programs"

Each grades the reference solutions of `data` in each round. A program that does not pass counts as wrong. Only the
first keeps tests from the program. Problems with a checker of their own are left out.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from algo.reward.code.code_reward import CodeGrader
from algo.reward.code.compare import same
from algo.reward.code.problem import Case, FunctionTests, ProgramTests, Rule, Tests
from bench import ROOT
from bench.benches.sandbox.contenders import open_box, plain_python
from bench.benches.sandbox.peer import PeerAddress, open_peer
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import Kind, count, milliseconds, ratio
from bench.measuring.terminal import say
from engine.data.tables import open_table
from recipes.code.formats import task_of
from sandbox import SandboxConfig
from sandbox.require import at_least, require_fields

OURS = "rocstar"
PASSED = "all tests have passed\n"
Grade = Callable[[Tests], Awaitable[bool]]


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "gradings of all problems by each"] = 3
    data: Annotated[Path, "problems with reference solutions"] = ROOT / "recipes" / "code" / "examples.jsonl"
    repeats: Annotated[int, "gradings of each problem in a round"] = 4
    concurrency: Annotated[int, "programs graded at a time, ours and peers"] = 4 * (os.cpu_count() or 1)
    peer_urls: Annotated[tuple[str, ...], "judge=http://... or fusion=http://..."] = ()
    peer_pids: Annotated[tuple[str, ...], "further roots of a peer's processes, judge:PID"] = ()

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "repeats", "concurrency")
        self.peers()

    def peers(self) -> list[PeerAddress]:
        """Raises ValueError for an address that is none."""
        return [PeerAddress.parse(text, self.peer_pids) for text in self.peer_urls]

    def tests(self) -> list[Tests]:
        """Returns the tests that have a reference solution. Raises ValueError if there are none."""
        table = open_table(self.data)
        hidden = [task_of(table.row(number)).problem.hidden for number in range(len(table))]
        usable = [tests for tests in hidden if tests.reference and not getattr(tests, "checker", "")]
        if not usable:
            raise ValueError(f"data must hold problems with reference solutions, got {self.data}")
        return usable


METRICS = {
    "cpu_s": milliseconds("CPU", "per graded program, of all processes that run code", form=".2f", kind=Kind.CPU),
    "over_ours": ratio("/ ours", "CPU over ours in the same round", form=".2f"),
    "node_cpu_s": milliseconds("node's CPU", "per graded program, of the process that asks", form=".2f", kind=Kind.CPU),
    "wrong": count("wrong", "programs that did not pass, largest of the rounds", summary="largest"),
    "programs": count("programs", "graded in a round"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Grades reference solutions. cpu_s: the CPU seconds so far of the processes that run their code."""

    name: str
    grade: Grade
    cpu_s: Callable[[], float]
    concurrency: int


def in_one_process(tests: Tests, *, each_alone: bool) -> list[tuple[str, list[tuple[str, Rule]]]]:
    """Returns programs with their tests below them, and the texts that each may print, with the rule for it."""
    if isinstance(tests, ProgramTests):
        cases = tests.cases
        return [(_with_stdin(tests.reference, case), [(each, tests.rule) for each in case.expected]) for case in cases]
    groups = [(test,) for test in tests.tests] if each_alone else [tests.tests]
    return [(_with_tests(tests, group), [(PASSED, "exact")]) for group in groups]


def _with_stdin(program: str, case: Case) -> str:
    return f"import io, sys\nsys.stdin = io.StringIO({case.stdin!r})\n{program}"


def _with_tests(tests: FunctionTests, group: Sequence[str]) -> str:
    methods = [f"if 'Solution' in globals(): {name} = Solution().{name}" for name in tests.functions]
    return "\n".join([tests.setup, tests.reference, *methods, *group, f"print({PASSED.strip()!r})"])


def through(run: Callable[[str], Awaitable[str]], *, each_alone: bool = False) -> Grade:
    """Returns a grading by processes that print what they found."""

    async def grade(tests: Tests) -> bool:
        for code, expected in in_one_process(tests, each_alone=each_alone):
            printed = await run(code)
            if not any(same(printed, text, rule, 1e-4) for text, rule in expected):
                return False
        return True

    return grade


def measure(options: Options, keep: Keep) -> None:
    asyncio.run(_measure(options, keep))


async def _measure(options: Options, keep: Keep) -> None:
    tests = options.tests() * options.repeats
    async with AsyncExitStack() as stack:
        box = await stack.enter_async_context(open_box(SandboxConfig()))
        grader = CodeGrader(box.sandbox, stop=True)

        async def ours(tests: Tests) -> bool:
            return all((await grader.grade(tests.reference, tests)).passed)

        plain = plain_python()
        contenders = [
            Contender(name=OURS, grade=ours, cpu_s=box.meter.cpu_s, concurrency=options.concurrency),
            *(
                Contender(
                    name=f"python, {'tests' if each_alone else 'programs'}",
                    grade=through(plain.run, each_alone=each_alone),
                    cpu_s=plain.cpu_s,
                    concurrency=plain.concurrency,
                )
                for each_alone in (False, True)
            ),
        ]
        for address in options.peers():
            peer = await stack.enter_async_context(open_peer(address, options.concurrency))
            contenders.append(
                Contender(name=peer.name, grade=through(peer.run), cpu_s=peer.cpu_s, concurrency=peer.concurrency)
            )
        await _graded(contenders[0], options.tests())  # learns which calls the tests make
        for number in range(options.rounds):
            rows: dict[str, dict[str, float]] = {}
            for contender in contenders:
                say(f"round {number + 1} of {options.rounds}: {contender.name}")
                rows[contender.name] = await _graded(contender, tests)
            for row in rows.values():
                if "cpu_s" in row:
                    row["over_ours"] = row["cpu_s"] / rows[OURS]["cpu_s"]
            keep(rows)


async def _graded(contender: Contender, tests: Sequence[Tests]) -> dict[str, float]:
    slots = asyncio.Semaphore(contender.concurrency)

    async def grade(each: Tests) -> bool:
        async with slots:
            return await contender.grade(each)

    cpu_s, node_s = contender.cpu_s(), time.process_time()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(grade(each), name=f"bench-code-{number}") for number, each in enumerate(tests)]
    row = {
        "node_cpu_s": (time.process_time() - node_s) / len(tests),
        "wrong": float(sum(not task.result() for task in tasks)),
        "programs": float(len(tests)),
    }
    used_s = (contender.cpu_s() - cpu_s) / len(tests)
    return row if math.isnan(used_s) else {"cpu_s": used_s, **row}


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("cpu_s", "over_ours", "wrong"),
    quick={"rounds": "1", "repeats": "1"},
)
