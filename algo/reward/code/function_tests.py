"""Grades a program by tests that call its functions.

The program and the tests never share a process, nor a jailed call:

    program's call:  gets the arguments, prints the results as plain values     (guest/candidate.py)
    tests' call:     looks the results up and compares                          (guest/checks.py)

Invariants
- What the program is run with are its own text and arguments. Expected values and tests are in no process, file or
  message that it can reach, so it can choose its results, and nothing else.
- The verdict is that of the tests' process, in which no code of the program is run: results are rebuilt as values of
  Python's own types.
- Each call has the limits for itself. A program that was ended by a limit is started again from the call that it was
  in; only where nothing else ran before is a call lost, which fails its test whatever the test does.
- Which calls the tests make is found out in rounds. A run of the tests that goes on behind each call without an answer
  collects those that need none (`guest/checks.py`); one whose arguments follow from earlier results waits for the next
  round, in which all calls run anew. The verdict is that of a run in which each call had its answer.
- Tests that make more calls than a grading can are refused, and no program is failed for them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from algo.reward.code.guest.plain import encode
from algo.reward.code.problem import FunctionTests
from algo.reward.code.programs import guest_program, with_imports
from algo.reward.code.runs import Graded, run
from engine.ports import GraderUnavailable, ToolRunner
from sandbox.wire import Limits, ToolResult

Call = tuple[str, str]
"""A function's name and its arguments as `guest.plain.encode` writes them."""
Answer = str
"""A line of the program about one call, or ours about one that ended it."""

MOST_CALLS = 20_000  # of one grading
MOST_ROUNDS = 500  # of one grading: one for each call that waits for the result of another
REPLY_BYTES = 16 << 20  # of the tests' process, which names the arguments of a call; the limit of a test may be lower


ENDED = {"ok": "ended", "timeout": "took too long", "memory": "took too much memory", "output": "wrote too much"}


class TooManyCalls(ValueError):
    """The tests make more calls of a program than a grading can."""


async def grade_functions(
    program: str,
    tests: FunctionTests,
    runner: ToolRunner,
    limits: Limits,
    *,
    stop: bool,
    known: Sequence[Call] = (),
    most_rounds: int = MOST_ROUNDS,
) -> tuple[Graded, list[Call]]:
    """Returns how the tests ended, and the calls that they made.

    stop: whether the first failure ends the grading. known: calls that the tests are expected to make, from an earlier
    grading; they save rounds, of which there are `most_rounds` at most. Raises GraderUnavailable, TooManyCalls, and
    ValueError naming a test that cannot be graded safely, or needs a module that the sandbox lacks.
    """
    calls, guessing, longest = list(known) or await _collected(tests, [], runner, limits), True, -1
    for _ in range(most_rounds):
        loaded, answers = await call_functions(program, calls, runner, limits, stop=stop)
        if loaded is not None:
            return Graded.all_failed(len(tests.tests), loaded), []
        answered = list(zip(calls, answers, strict=False))  # There may be none behind a call that was lost.
        reply = await _check(tests, answered, runner, limits, stop=stop)
        if reply is None:
            return Graded.all_failed(len(tests.tests), "the results were too much for the tests"), []
        if reply["refused"] is not None:
            number, reason = reply["refused"]
            raise ValueError(f"test {number} cannot be graded: {reason}: {tests.tests[number].strip()[:100]!r}")
        made = [(name, arguments) for name, arguments in reply["calls"]]
        if reply["complete"] and not made:
            raise ValueError(f"the tests call none of {', '.join(tests.functions)}, so nothing of a program is tested")
        if reply["complete"]:
            return Graded.of(reply["tests"], len(tests.tests)), made
        # A guess may hold a call that the tests never make and no program survives; what they did make is no guess.
        guessing = guessing and len(made) > longest
        guessed = await _collected(tests, answered, runner, limits) if guessing else []
        guessing = len(guessed) >= len(made)
        calls, longest = (guessed if guessing else made), len(made)
    raise TooManyCalls(
        f"the tests make more than {MOST_CALLS} calls of {', '.join(tests.functions)}, or more than {most_rounds} that "
        "each wait for the result of another one. Fix: make fewer"
    )


async def _collected(
    tests: FunctionTests, answered: Sequence[tuple[Call, Answer]], runner: ToolRunner, limits: Limits
) -> list[Call]:
    """Returns the calls that the tests make as far as these answers show, in their order.

    The list is empty if there are none, or if that cannot be said.
    """
    reply = await _check(tests, answered, runner, limits, stop=False, collect=True)
    calls = [] if reply is None else [(name, arguments) for name, arguments in reply["calls"]]
    return calls if len(calls) < MOST_CALLS else []


async def call_functions(
    program: str, calls: Sequence[Call], runner: ToolRunner, limits: Limits, *, stop: bool
) -> tuple[str | None, list[Answer]]:
    """Returns why the program could not be loaded, if so, and an answer for each call.

    stop: whether calls behind one that was lost need no answer; the list ends with it.
    """
    answers: list[Answer] = []
    code = with_imports(guest_program("candidate"), program)
    while len(answers) < len(calls):
        rest = calls[len(answers) :]
        result = await run(runner, code, json.dumps({"program": program, "calls": rest}), limits)
        first, *lines = result.stdout.split("\n")
        if first != "loaded":
            return _not_loaded(first, result), []
        lines = lines[:-1][: len(rest)]  # what follows the last line break was cut off
        answers += lines or [encode(["lost", f"the program {ENDED.get(result.outcome, ENDED['ok'])} within a call"])]
        if stop and not lines:
            break
    return None, answers


def _not_loaded(line: str, result: ToolResult) -> str:
    if line.startswith("failed "):
        return line.removeprefix("failed ")[:300]
    return f"the program did not begin: outcome {result.outcome!r}"


async def _check(
    tests: FunctionTests,
    answers: Sequence[tuple[Call, Answer]],
    runner: ToolRunner,
    limits: Limits,
    *,
    stop: bool,
    collect: bool = False,
) -> dict[str, Any] | None:
    """Returns the reply of the tests' process; None if it was ended, by what the program gave it to look at."""
    request = {
        "setup": tests.setup,
        "functions": tests.functions,
        "tests": tests.tests,
        "answers": answers,
        "in_place": tests.in_place,
        "stop": stop,
        "collect": collect,
        "most_calls": MOST_CALLS,
    }
    code = with_imports(guest_program("checks"), tests.setup, *tests.tests)
    enough = msgspec.structs.replace(limits, output_bytes=max(limits.output_bytes, REPLY_BYTES))
    result = await run(runner, code, json.dumps(request), enough)
    if result.outcome == "timeout" and result.cpu_s < limits.cpu_s / 2 and not collect:
        raise GraderUnavailable(f"the tests got only {result.cpu_s:.1f} s of CPU in {result.wall_s:.1f} s")
    if result.outcome in ("timeout", "memory", "output") or result.truncated:
        return None
    try:
        return json.loads(result.stdout)
    except ValueError:
        reason = result.stderr.strip().rpartition("\n")[2] or f"outcome {result.outcome!r}"
        raise GraderUnavailable(f"the tests' process gave no verdict: {reason[:300]}") from None
