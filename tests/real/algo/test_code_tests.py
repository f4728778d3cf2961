"""Tests that call functions, in the real sandbox: what they see of a program, and which limits each call has."""

from __future__ import annotations

import pytest

from algo.reward.code.code_reward import CodeGrader, CodeReward
from algo.reward.code.function_tests import TooManyCalls
from algo.reward.code.problem import Case, FunctionTests, ProgramTests
from recipes.code.run_tests import RunTests
from sandbox import Limits, Sandbox
from tests.support.code_problems import TASKS, solution
from tests.unit.algo.reward.test_code_reward import a_solution

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(cpu_s=1.0, wall_s=30.0, memory_bytes=512 << 20, output_bytes=1 << 20)
SWALLOWS = "try:\n    f(1)\nexcept BaseException:\n    pass"
EXPECTS_AN_ERROR = "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass"


def asserts(*tests: str, setup: str = "") -> FunctionTests:
    return FunctionTests(setup=setup, functions=("f",), tests=tests)


@pytest.mark.parametrize(
    ("program", "test", "passes"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", True),
        ("def f(x): return x + 1", "assert f(1) == 3", False),
        ("class Solution:\n    def f(self, x): return x + 1", "assert f(1) == 2", True),
        ("def f(a, *, b=1): return {(a, b)}", "assert f(1, b=2) == {(1, 2)}", True),
        ("def f(x): return f(x - 1) + 1 if x else 0", "assert f(f(f(5))) == 5", True),
        ("n = 0\ndef f():\n    global n\n    n += 1\n    return n", "assert [f(), f(), f()] == [1, 2, 3]", True),
        ("def f(x): raise ValueError('no')", EXPECTS_AN_ERROR, True),
        ("class Mine(ValueError): pass\ndef f(x): raise Mine", EXPECTS_AN_ERROR, True),
        ("def f(x): raise KeyError(x, 'no')", "try:\n    f(1)\n    assert False\nexcept KeyError as error:\n"
         "    assert error.args == (1, 'no')", True),
        ("class Mine(ValueError): pass\ndef f(x): raise Mine('no')", "try:\n    f(1)\n    assert False\n"
         "except ValueError as error:\n    assert str(error) == 'no'", True),
        ("def f(x): raise ValueError(10**5000)", "f(1)", False),
        ("def f(x): return 10**5000", "assert f(1) == 1", False),
        ("def f(x): raise KeyError('no')", EXPECTS_AN_ERROR, False),
        ("def f(x): return 1", EXPECTS_AN_ERROR, False),
        ("def f(x): raise SystemExit", SWALLOWS, False),
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 0, [1, 2]))", False),
        ("def f(x): raise StopIteration", "for y in map(f, [1, 2]):\n    assert y == 0", False),
        ("import os\ndef f(x): os._exit(0)", SWALLOWS, False),
        ("def f(x): return object()", SWALLOWS, False),
        ("def f(x):\n    while True: pass", SWALLOWS, False),
        ("def f(x): return sum(x)", "assert list(map(f, [[1], [2, 3]])) == [1, 5]", True),
        ("def f(x): return x", "import random\nx = random.random()\nassert f(x) == x", True),
        ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
         "def f(x): return A(x).x", "assert f(1) == 1", True),
        ("if __name__ == '__main__': input()\ndef f(x): return x", "assert f(1) == 1", True),
        ("print('debug')\ndef f(x):\n    print(x)\n    return x", "assert f(1) == 1", True),
        ("def f(x): yield from range(x)", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0", True),
        ("def f(x): return map(str, x)", "assert sorted(f([2, 1])) == ['1', '2']", True),
        ("def f(x): return range(x)", "assert len(f(3)) == 3 and list(f(3))[1:] == [1, 2]", True),
        ("def f(x): return iter(x)", "assert f([1]) == [1]", False),
        ("def f(x):\n    yield 1\n    raise ValueError", "try:\n    list(f(1))\n    assert False\n"
         "except ValueError:\n    pass", True),
        ("def f(x):\n    while True: yield x", SWALLOWS, False),
        ("def f(x):\n    while True: yield x", EXPECTS_AN_ERROR, False),
        ("import numpy as np\ndef f(x): return np.sum(x)", "assert f([1, 2]) == 3", True),
    ],
)  # fmt: skip
async def test_a_function_is_seen_through_its_results(box: Sandbox, program: str, test: str, passes: bool) -> None:
    graded = await CodeGrader(box, limits=LIMITS).grade(program, asserts(test))
    assert graded.passed == (passes,), graded.details


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): x.append(1)", "a = [0]\nassert f(a) is None and a == [0, 1]"),
        ("def f(x): x['a'] = x.pop('b')", "a = {'b': [1]}\nf(a)\nassert a == {'a': [1]}"),
        ("def f(x): x.add(2)", "a = {1}\nf(a)\nassert a == {1, 2}"),
        ("def f(x):\n    x.clear()\n    return []", "a = [2, 1]\nassert f(a) == sorted(a)"),
    ],
)
async def test_arguments_change_where_the_problem_says_so(
    box: Sandbox, program: str, test: str, in_place: bool
) -> None:
    """The last program passes as it does in plain Python, and so it is not what a test wants by default."""
    tests = FunctionTests(functions=("f",), tests=(test,), in_place=in_place)
    assert (await CodeGrader(box, limits=LIMITS).grade(program, tests)).passed == (in_place,)


@pytest.mark.parametrize(
    "test",
    ["assert f(print) == 1", "class A: pass\nassert f(A()) == 1", "assert f(x for x in [1]) == 1", "f(f)"],
)
async def test_a_test_whose_arguments_cannot_leave_it_is_refused(box: Sandbox, test: str) -> None:
    with pytest.raises(ValueError, match="test 1 "):
        await CodeGrader(box, limits=LIMITS).grade("def f(x): return 1", asserts("assert f(1) == 1", test))


async def test_a_test_that_does_not_compile_is_refused(box: Sandbox) -> None:
    with pytest.raises(ValueError, match="test 1 "):
        await CodeGrader(box, limits=LIMITS).grade("def f(x): return 1", asserts("assert f(1) == 1", "return f(1)"))


async def test_a_setup_that_fails_is_refused(box: Sandbox) -> None:
    with pytest.raises(ValueError, match="setup"):
        await CodeGrader(box, limits=LIMITS).grade("def f(x): return 1", asserts("f(1)", setup="1 / 0"))


@pytest.mark.parametrize("test", ["pass", "x = f", "assert x == f(1)"])
async def test_tests_that_call_nothing_are_refused(box: Sandbox, test: str) -> None:
    with pytest.raises(ValueError, match="call none of f"):
        await CodeGrader(box, limits=LIMITS).grade("this is no Python", asserts(test))


async def test_helpers_of_the_tests_are_not_the_programs(box: Sandbox) -> None:
    tests = asserts("assert near(f(1), 2)", setup="def near(a, b): return abs(a - b) < 1e-9")
    program = "def near(a, b): return True\ndef f(x): return 7"
    assert (await CodeGrader(box, limits=LIMITS).grade(program, tests)).passed == (False,)


async def test_each_call_has_the_limits_for_itself(box: Sandbox) -> None:
    """Each takes half of the limit, so that they fit one by one and not together; one never ends."""
    program = (
        "import time\ndef f(x):\n    until = time.process_time() + (0.5 if x != 2 else 99)\n"
        "    while time.process_time() < until: pass\n    return x\n"
    )
    graded = await CodeGrader(box, limits=LIMITS).grade(program, asserts(*(f"assert f({x}) == {x}" for x in range(5))))
    assert graded.passed == (True, True, False, True, True), graded.details


async def test_what_one_program_made_the_tests_ask_is_not_asked_of_the_next(box: Sandbox) -> None:
    tests = asserts("assert f(f(1)) == 1")
    grader = CodeGrader(box, limits=LIMITS)
    slow = "import time\ndef f(x):\n    if x == 5:\n        while True: pass\n    return x"
    assert not all((await grader.grade("def f(x): return 5", tests)).passed)
    timeouts = box.stats.outcomes["timeout"]
    assert all((await grader.grade(slow, tests)).passed)
    assert box.stats.outcomes["timeout"] == timeouts
    assert not all((await grader.grade("def f(x): return -x if x > 0 else 0", tests)).passed)
    assert all((await grader.grade("def f(x): return -x", tests)).passed), "calls of its own are asked for"


async def test_a_second_grading_needs_two_calls(box: Sandbox) -> None:
    tests = asserts(*(f"assert f({x}) == {x}" for x in range(20)), "assert f(f(99)) == 99")
    grader = CodeGrader(box, limits=LIMITS)
    await grader.grade("def f(x): return x", tests)
    before = box.stats.outcomes.total()
    assert all((await grader.grade("def f(x): return int(x)", tests)).passed)
    assert box.stats.outcomes.total() - before == 2


async def test_arguments_may_be_longer_than_the_output_of_a_test(box: Sandbox) -> None:
    tests = asserts("assert f('x' * 2_000_000) == 2_000_000")
    assert (await CodeGrader(box, limits=LIMITS).grade("def f(x): return len(x)", tests)).passed == (True,)
    assert (await CodeGrader(box, limits=LIMITS).grade("def f(x): return 1", tests)).passed == (False,)


async def test_public_tests_are_a_tool(box: Sandbox) -> None:
    tool = RunTests({name: task.problem for name, task in TASKS.items()}, box, LIMITS)
    right = await tool({"problem": "own-202", "code": solution(TASKS["own-202"])})
    wrong = await tool({"problem": "own-202", "code": "def find(values, target): return 0"})
    assert (right.outcome, wrong.outcome) == ("ok", "error")
    assert ("failed" in right.text, "failed" in wrong.text) == (False, True)
    refused = [{}, *({"problem": name, "code": ""} for name in ("none", 1, "own/area"))]
    for arguments in refused:
        reply = await tool(arguments)
        assert (reply.outcome, reply.executed) == ("error", False)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(x): return x + 1", "test 2 of 2: AssertionError at 'assert f(2) == 4', where f last returned 3"),
        ("def f(x): raise RecursionError('deep')", "RecursionError: deep"),
        ("import os\ndef f(x): os._exit(1)", "the program ended within a call"),
        ("def f(x):\n    while x == 2: pass\n    return 2", "test 2 of 2: the program took too long within a call"),
        ("def g(x): pass", "NameError: the program defines no f, neither at its top nor in a class Solution"),
    ],
)
async def test_a_complaint_names_the_test_and_what_is_wrong(box: Sandbox, program: str, reason: str) -> None:
    graded = await CodeGrader(box, limits=LIMITS).grade(program, asserts("assert f(1) == 2", "x = 2\nassert f(2) == 4"))
    assert graded.complaint == reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print(int(input()) + 1)", "test 2 of 2: printed '3\\n', not '4'"),
        ("if input() == '2': exit(3)\nprint(2)", "test 2 of 2: error: exit code 3"),
        ("if input() == '1':\n    while True: pass\nprint(4)", "test 1 of 2: timeout"),
    ],
)
async def test_a_complaint_of_a_whole_program_says_what_was_expected(box: Sandbox, program: str, reason: str) -> None:
    cases = (Case(stdin="1\n", expected=("2",)), Case(stdin="2\n", expected=("4",)))
    graded = await CodeGrader(box, limits=LIMITS).grade(program, ProgramTests(cases=cases))
    assert graded.complaint == reason


async def test_a_share_counts_what_passes_behind_a_failure(box: Sandbox) -> None:
    program, tests = "def drop_zeros(values): return 0", TASKS["2"].problem.hidden
    assert (await CodeGrader(box, limits=LIMITS).grade(program, tests)).passed == (False, True, False)
    assert (await CodeGrader(box, limits=LIMITS, stop=True).grade(program, tests)).passed == (False, False, False)


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("for x in range(700):\n    assert f(x) == x + 1", "def f(x): return x + 1"),
        ("assert [f(x) for x in range(700)] == [*range(1, 701)]", "def f(x): return x + 1"),
        ("assert all(f(x) == x + 1 for x in range(700))", "def f(x): return x + 1"),
        ("x = 0\nwhile x < 700:\n    assert f(x) == x + 1\n    x += 1", "def f(x): return x + 1"),
        (
            "for x in range(700):\n    r = f(x)\n    assert abs(r - x) < 1e-9\n    assert not r < x",
            "def f(x): return x",
        ),
        ("import random\nfor _ in range(700):\n    x = [random.random()]\n    assert f(x) == x", "def f(x): return x"),
    ],
)
async def test_a_right_program_passes_tests_of_many_calls(box: Sandbox, test: str, program: str) -> None:
    """And the first grading takes three jailed calls, not two for each call of a test."""
    grader, before = CodeGrader(box, limits=LIMITS), box.stats.outcomes.total()
    graded = await grader.grade(program, asserts(test))
    assert graded.passed == (True,), graded.details
    assert box.stats.outcomes.total() - before == 3
    assert (await grader.grade("def f(x): return x + 1 if x != 333 else 0", asserts(test))).passed == (False,)


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("x = 0\nfor _ in range(5):\n    x = f(x)\nassert x == 5", "def f(x): return x + 1"),
        ("x = 0\nwhile f(x) != 9:\n    x += 1\nassert x == 8", "def f(x): return x + 1"),
        ("x = 0\nwhile True:\n    try:\n        f(x)\n    except KeyError:\n        break\n    x += 1\nassert x == 5",
         "def f(x): return [1, 1, 1, 1, 1][x] if x < 5 else {}[x]"),
        ("if f(1):\n    f(3)\nelse:\n    assert not f(2)\nassert not f(4)",
         "def f(x):\n    while x == 3: pass\n    return False"),
        ("def g():\n    f(1)\n    f(3)\ntry:\n    g()\nexcept ValueError:\n    pass\nassert f(4) == 4",
         "def f(x):\n    while x == 3: pass\n    return x if x == 4 else int('no')"),
        ("assert f(2) is None\nx = f()\nf(x + 1)\nassert [f(), f()] == [3, None]",
         "s = []\ndef f(*x): return s.append(*x) if x else s.pop() if s else None"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stop", [True, False])
async def test_calls_that_follow_from_results_are_found(box: Sandbox, test: str, program: str, stop: bool) -> None:
    graded = await CodeGrader(box, limits=LIMITS, stop=stop).grade(program, asserts(test))
    assert graded.passed == (True,), graded.details


async def test_too_many_calls_fail_no_program_unless_a_right_one_makes_fewer(
    box: Sandbox,
) -> None:
    endless = "x = 1\nwhile f(x) != 0:\n    x += 1"
    grader = CodeGrader(box, limits=LIMITS, most_rounds=10)
    with pytest.raises(TooManyCalls):
        await grader.grade("def f(x): return 1", asserts(endless))
    known = FunctionTests(functions=("f",), tests=(endless,), reference="def f(x): return 3 - x")
    assert (await grader.grade("def f(x): return 1", known)).passed == (False,)
    assert (await grader.grade("def f(x): return x - 3", known)).passed == (True,)


@pytest.mark.parametrize("test", ["import no_such_module\nassert f(1) == 1", "from math import nothing\nassert f(1)"])
async def test_a_test_that_lacks_a_module_is_refused_and_a_program_that_does_fails(box: Sandbox, test: str) -> None:
    with pytest.raises(ValueError, match="sandbox lacks"):
        await CodeGrader(box, limits=LIMITS).grade("def f(x): return x", asserts("assert f(1) == 1", test))
    program = "def f(x):\n    import no_such_module"
    assert (await CodeGrader(box, limits=LIMITS).grade(program, asserts("assert f(1) == 1"))).passed == (False,)


def checked(checker: str, *expected: str) -> ProgramTests:
    return ProgramTests(cases=(Case(stdin="", expected=expected or ("5",)),), checker=checker)


@pytest.mark.parametrize(
    "body",
    ["raise KeyError(printed)", "exit()", "import no_such_module", "return [0] * 10**12", "while True: pass"],
)
async def test_a_checker_that_fails_on_the_expected_output_is_refused(box: Sandbox, body: str) -> None:
    tests = checked(f"def check(stdin, expected, printed):\n    {body}")
    with pytest.raises(ValueError, match="checker"):
        await CodeGrader(box, limits=LIMITS).grade("print(5)", tests)


async def test_a_program_that_makes_a_checker_fail_is_wrong_and_counted(box: Sandbox) -> None:
    tests = checked("def check(stdin, expected, printed):\n    return int(printed) == int(expected)")
    graded = await CodeGrader(box, limits=LIMITS).grade("print('five')", tests)
    assert graded.passed == (False,)
    assert "ValueError" in graded.complaint
    reward = CodeReward(box, limits=LIMITS)
    for shown, expected, failed in (("5", 1.0, 0.0), ("6", 0.0, 0.0), ("'five'", 0.0, 1.0)):
        grade = await reward(a_solution(tests, f"print({shown})\n"))
        assert (grade.reward, grade.scores["checker_failed"]) == (expected, failed)
