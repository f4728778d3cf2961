"""The grader in the real sandbox: answers that attack it, and faults that are not the answer's."""

from __future__ import annotations

import asyncio
import json
import shutil
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from algo.reward.maths.grader import GRADER_LIMITS, GRADER_MODULES, GUEST, MathGrader, end_of, program
from engine.ports import GraderUnavailable
from sandbox import TIERS, Limits, Sandbox, SandboxConfig, Tier

pytestmark = pytest.mark.asyncio(loop_scope="module")
HALF = r"\frac{1}{2}"
NUMBERS = """
    from algo.reward.maths.guest.verdict import NUMBER, evaluator
    evaluate_number = evaluator(NUMBER)
    spaces = {}, {"Integer": int, "Float": float}
    numbers = [evaluate_number(text, *spaces) for text in ("Integer (5 )", "Float ('1.5' )")]
    refused = 0
    for text in ("__import__('os')", "Integer (5 )+1", "Integer (print )", "Symbol ('x' )", compile("1", "", "eval")):
        try:
            evaluate_number(text, *spaces)
        except ValueError:
            refused += 1
    print(*numbers, "refused", refused)
"""
SHORT = Limits(cpu_s=1.0, wall_s=20.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(slots=2, tiers=(Tier(name="grader", preload=GRADER_MODULES),))) as sandbox:
        yield sandbox


def changed(folder: Path, name: str, before: str, after: str) -> str:
    """Returns the strict judge's program with another text in one of its files."""
    guest = folder / "guest"
    shutil.copytree(GUEST, guest)
    text = (guest / name).read_text()
    assert before in text
    (guest / name).write_text(text.replace(before, after))
    return program("strict", guest)


HOSTILE = {
    "braces": "{" * 100 + "1" + "}" * 100,
    "open brackets": "(" * 1900,
    "roots": r"\sqrt{" * 100 + "2" + "}" * 100,
    "chain": "1/" * 300 + "1",
    "input": r"\input{/etc/passwd}",
    "write18": r"\immediate\write18{touch /tmp/x}",
    "python": "__import__('os')._exit(0)",
    "python text": r"\text{__import__('os')._exit(0)}",
    "python name": r"\operatorname{exit}(0)",
    "python arguments": r"\gcd(exit(0),print(1))",
    "python index": "x_{exit(0)}",
    "python variable": r"\variable{__import__('os')._exit(0)}",
    "token": "right",
    "tokens": "0000 ready\n0000 right\n",
    "json": '", "right"]\n"right"',
    "surrogate": "\ud800",
    "nul": "\x001",
    "newlines": "\n" * 1000,
    "exponent": "1e999999999",
    "plus or minus": r"\pm" * 100 + "1",
    "nan": r"\frac{0}{0}",
    "infinity": r"\infty",
    "unicode": "½",
    "digits": "1" * 1900 + "x",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_answers_are_wrong(box: Sandbox, name: str) -> None:
    graded = MathGrader(box, SHORT)
    assert not await graded.equal(HOSTILE[name], r"\frac{1}{3}")
    assert sum(graded.counts.values()) == 1
    assert await graded.equal(r"\frac{2}{6}", r"\frac{1}{3}")


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "10^{10^{10}}", "100000000!"])
async def test_an_answer_that_hangs_the_grader_costs_two_calls(box: Sandbox, answer: str) -> None:
    hung, honest = MathGrader(box, SHORT), MathGrader(box)
    async with asyncio.TaskGroup() as tasks:
        hanging = tasks.create_task(hung.equal(answer, HALF), name="hanging")
        beside = tasks.create_task(honest.equal(r"\frac{2}{4}", HALF), name="beside")
    assert (hanging.result(), beside.result()) == (False, True)
    assert hung.counts == {"timeout": 1}


async def test_a_grader_without_memory_is_no_reward_of_0(box: Sandbox, tmp_path: Path) -> None:
    code = changed(tmp_path, "verdict.py", "        right =", "        bytearray(10**12)\n        right =")
    result = await box.run(code, json.dumps(["m", HALF]) + '\n"1/2"\n', GRADER_LIMITS)
    with pytest.raises(GraderUnavailable, match="failed MemoryError"):
        end_of(result, "m", GRADER_LIMITS)
    assert await MathGrader(box).equal(r"\frac{2}{4}", HALF)


@pytest.mark.parametrize("bug", ["raise KeyError(1)", "exit()", "os._exit(0)"])
async def test_a_bug_of_the_grader_is_no_reward_of_0(box: Sandbox, tmp_path: Path, bug: str) -> None:
    code = changed(tmp_path, "strict.py", "    return any(", f"    import os\n    {bug}\n    return any(")
    result = await box.run(code, json.dumps(["m", HALF]) + '\n"1/2"\n', GRADER_LIMITS)
    with pytest.raises(GraderUnavailable, match="no verdict"):
        end_of(result, "m", GRADER_LIMITS)


@pytest.mark.parametrize("reference", ["0000 ready", r"\input{x}", "\ud800", "{", ""])
async def test_a_reference_that_means_nothing_equals_no_mathematics(box: Sandbox, reference: str) -> None:
    assert not await MathGrader(box).equal(HALF, reference)


async def test_a_reference_that_hangs_the_grader_is_no_reward_of_0(box: Sandbox) -> None:
    with pytest.raises(GraderUnavailable, match="timeout"):
        await MathGrader(box, SHORT).equal(HALF, "9^{9^{9^{9}}}")


async def test_a_module_that_cannot_be_imported_is_no_reward_of_0(box: Sandbox, tmp_path: Path) -> None:
    """Math-Verify and sympy swallow the ImportError and would call the two unequal."""
    code = changed(tmp_path, "strict.py", "    return any(", "    import sympy.absent\n    return any(")
    result = await box.run(code, json.dumps(["m", HALF]) + '\n"1/2"\n', GRADER_LIMITS)
    with pytest.raises(GraderUnavailable, match=r"lacks sympy\.absent"):
        end_of(result, "m", GRADER_LIMITS)


async def test_a_sandbox_without_math_verify_is_no_reward_of_0(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    async with Sandbox(SandboxConfig(slots=1, tiers=TIERS[:1], python=str(tmp_path / "bin" / "python"))) as bare:
        with pytest.raises(GraderUnavailable, match="ModuleNotFoundError"):
            await MathGrader(bare).equal(r"\frac{2}{4}", HALF)
    with pytest.raises(GraderUnavailable, match="the sandbox was closed"):
        await MathGrader(bare).equal(r"\frac{2}{4}", HALF)


async def test_only_numbers_become_code(box: Sandbox, tmp_path: Path) -> None:
    result = await box.run(changed(tmp_path, "strict.py", "    grade(read, same)\n", NUMBERS), limits=GRADER_LIMITS)
    assert (result.outcome, result.stdout) == ("ok", "5 1.5 refused 5\n"), result.stderr
