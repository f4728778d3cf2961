"""A table of graded programs: solutions pass, mutated ones fail, and so do those that attack the grading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from algo.reward.code.code_reward import CodeGrader
from algo.reward.code.problem import Case, FunctionTests, ProgramTests
from recipes.code.formats import Task
from sandbox import Limits, Sandbox
from tests.hostile.code_attacks import FUNCTIONS, PROGRAMS
from tests.support.code_problems import TASKS, solution
from tests.support.mutants import mutants

pytestmark = pytest.mark.asyncio(loop_scope="module")
# A second of CPU is far above what any solution needs; wall_s ends only what sleeps.
LIMITS = Limits(cpu_s=1.0, wall_s=3.0, memory_bytes=256 << 20, processes=16)

# These mutants are right as well: a bisection that begins wider, or goes on for one more round.
EQUIVALENT = {("4", "constant:2:25"), ("4", "constant:3:19")}
MUTANTS = {(name, mutant): program for name, task in TASKS.items() for mutant, program in mutants(solution(task))}
BY_FUNCTIONS = {name: task for name, task in TASKS.items() if isinstance(task.problem.hidden, FunctionTests)}
BY_PROGRAMS = {name: task for name, task in TASKS.items() if name not in BY_FUNCTIONS}
# Each attack meets each kind of result: a list, a tuple of sets, an expected error, letters, a float, a position.
ATTACKED = ["own/running_max", "own/split_parity", "own/mean_and_spread", "3", "4", "own-202"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader(box: Sandbox) -> AsyncIterator[CodeGrader]:
    grader = CodeGrader(box, limits=LIMITS, stop=True)
    patient = Limits(cpu_s=10.0, wall_s=60.0)
    warm = CodeGrader(box, limits=patient)
    for task in TASKS.values():
        assert all((await warm.grade(solution(task), task.problem.hidden)).passed)
        await grader.grade(solution(task), task.problem.hidden)
    yield grader


async def passes(grader: CodeGrader, task: Task, program: str) -> bool:
    return all((await grader.grade(program, task.problem.hidden)).passed)


@pytest.mark.parametrize("name", TASKS)
async def test_a_solution_passes(grader: CodeGrader, name: str) -> None:
    assert await passes(grader, TASKS[name], solution(TASKS[name]))


@pytest.mark.parametrize(("name", "mutant"), MUTANTS)
async def test_a_mutated_solution_fails(grader: CodeGrader, name: str, mutant: str) -> None:
    assert await passes(grader, TASKS[name], MUTANTS[name, mutant]) is ((name, mutant) in EQUIVALENT)


@pytest.mark.parametrize("name", ATTACKED)
@pytest.mark.parametrize("attack", FUNCTIONS)
async def test_a_hostile_function_fails(grader: CodeGrader, attack: str, name: str) -> None:
    task = BY_FUNCTIONS[name]
    function = task.problem.hidden.functions[0]
    assert not await passes(grader, task, FUNCTIONS[attack].replace("NAME", function))


@pytest.mark.parametrize("name", BY_PROGRAMS)
@pytest.mark.parametrize("attack", PROGRAMS)
async def test_a_hostile_program_fails(grader: CodeGrader, attack: str, name: str) -> None:
    assert not await passes(grader, BY_PROGRAMS[name], PROGRAMS[attack])


async def test_after_all_attacks_solutions_pass(grader: CodeGrader) -> None:
    async with asyncio.TaskGroup() as tasks:
        graded = [tasks.create_task(passes(grader, task, solution(task))) for task in TASKS.values()]
    assert all(task.result() for task in graded)


SECRET = "d41c0ffee5"  # stands in an expected value, in a test, and nowhere else
SEARCH = r"""
import gc, glob, os, sys
def search():
    texts = [repr(each)[:10000] for each in gc.get_objects() if isinstance(each, (str, bytes, list, tuple, dict))]
    frame = sys._getframe()
    while frame:
        texts.append(repr(frame.f_locals) + repr(frame.f_code.co_consts))
        frame = frame.f_back
    paths = ["/proc/self/environ", "/proc/self/cmdline"]
    for folder in (".", "/tmp", "/dev/shm", "/proc/1", "/proc/self/fd", "/proc/self/task", *glob.glob("/proc/[0-9]*")):
        for root, _, files in os.walk(folder):
            paths += [os.path.join(root, file) for file in files]
    for path in paths[:2000]:
        if path.endswith(("mem", "kmsg", "pagemap")):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            texts.append(repr(os.read(descriptor, 1 << 16)))
            os.close(descriptor)
        except OSError:
            pass
    try:
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps:
                first, last = (int(end, 16) for end in line.split()[0].split("-"))
                if " rw" in line and last - first < 1 << 26:
                    memory.seek(first)
                    texts.append(repr(memory.read(last - first)))
    except OSError:
        pass
    before, after = "d41c0", "ffee5"  # the whole word must not stand in the program itself
    return "".join([before, after]) in "".join(texts)
"""


@pytest.mark.parametrize("control", [False, True], ids=["searched", "control"])
async def test_what_is_expected_is_nowhere_in_the_process_of_the_program(box: Sandbox, control: bool) -> None:
    """The control hands the secret over as an argument: the search does find what is there."""
    given = f"'{SECRET}'" if control else "'nothing'"
    tests = FunctionTests(
        functions=("f",),
        tests=(f"found = f({given})", f"expected = '{SECRET}'\nassert not found, 'the program has read this'"),
    )
    program = f"{SEARCH}\ndef f(given): return search()"
    patient = CodeGrader(box, limits=Limits(cpu_s=30.0, wall_s=100.0, memory_bytes=2 << 30))
    assert (await patient.grade(program, tests)).passed == (True, not control)


async def test_an_expected_output_is_nowhere_in_the_process_of_the_program(box: Sandbox) -> None:
    checker = f"# {SECRET}\ndef check(stdin, expected, printed): return printed == 'False\\n'"
    tests = ProgramTests(cases=(Case(stdin="x", expected=("False",)),), checker=checker)
    patient = CodeGrader(box, limits=Limits(cpu_s=30.0, wall_s=100.0, memory_bytes=2 << 30))
    graded = await patient.grade(f"{SEARCH}\nprint(search())", tests)
    assert graded.passed == (True,), graded.details
