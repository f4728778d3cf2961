"""The reward and its grader with scripted runners; no sandbox and no Math-Verify."""

import ast
import asyncio
import json
import sys

import pytest

from algo.reward.math_reward import MathReward
from algo.reward.maths.grader import GRADER_LIMITS, GRADER_MODULES, GUEST, LONGEST_ANSWER, MathGrader, end_of, program
from engine.ports import GraderUnavailable
from engine.stages.grading import graded
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, StopReason
from sandbox.wire import Limits, ToolResult
from tests.support.algo_fakes import trajectory
from tests.support.fakes import Clock, ScriptedRunner

MARK = "00ff"
HALF = r"\frac{1}{2}"


def printed(*verdicts, outcome="ok", **fields):
    """Returns a result in which the grader printed these, one a line."""
    return ToolResult(outcome=outcome, stdout="".join(f"{MARK} {verdict}\n" for verdict in verdicts), **fields)


class Prints:
    """A runner whose n-th call ends as results[n], and later ones as the last, with the mark of the call.

    It accepts only the program of one judge.
    """

    def __init__(self, *results, judge="strict"):
        self.program = program(judge)
        self.results = list(results)
        self.answers = []

    async def run(self, code, stdin="", limits=None):
        assert code == self.program
        assert limits == GRADER_LIMITS
        first, second = stdin.splitlines()
        mark, _ = json.loads(first)
        self.answers.append(json.loads(second))
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return ToolResult(outcome=result.outcome, stdout=result.stdout.replace(MARK, mark))


def boxed(answer, reference):
    return trajectory(f"<answer>\\boxed{{{answer}}}</answer>", answer=reference)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("42", "42", 1.0),
        ("41", "42", 0.0),
        ("1{,}234", "1234", 1.0),
        ("-0.50", "-.5", 1.0),
        ("0.333333", "0.3333333", 0.0),
        ("12345678901234567891", "12345678901234567890", 0.0),
        ("9" * 5000, "9", 0.0),
        (r"\text{Monday}", r"\text{ Monday }", 1.0),
        (r"\dfrac{1}{2}", r"\dfrac{1}{ 2}", 1.0),
        ("", HALF, 0.0),
    ],
)
async def test_numbers_and_equal_texts_never_reach_the_sandbox(answer, reference, expected):
    runner = Prints(AssertionError("the sandbox was asked"))
    assert await MathReward(runner=runner)(boxed(answer, reference)) == expected
    assert runner.answers == []


async def test_other_answers_do():
    for word, expected in (("right", 1.0), ("wrong", 0.0)):
        runner = Prints(printed("ready", word))
        reward = MathReward(runner=runner)
        assert await reward(boxed(r"\frac{2}{4}", HALF)) == expected
        assert runner.answers == [r"\frac{2}{4}"]
        assert reward.grader.counts == {word: 1}
    assert await MathReward()(boxed(r"\frac{2}{4}", HALF)) == 0.0


def test_integers_need_no_runner():
    with pytest.raises(ValueError, match="takes no runner"):
        MathReward(integers_only=True, runner=Prints(printed("ready", "right")))


async def test_a_truncated_rollout_is_not_graded():
    runner = Prints(AssertionError("the sandbox was asked"))
    text = f"<answer>\\boxed{{{HALF}}}</answer>"
    assert await MathReward(runner=runner)(trajectory(text, answer="1/2", stop=StopReason.LENGTH)) == 0.0


BUSY = {"outcome": "timeout", "wall_s": GRADER_LIMITS.wall_s + 0.01}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (printed("ready", "right"), "right"),
        (printed("ready", "wrong"), "wrong"),
        (printed("ready", outcome="timeout", wall_s=3.1, cpu_s=2.2), "timeout"),  # the kernel counts CPU time in ticks
        (printed("ready", **BUSY, cpu_s=2.0), "timeout"),
        (printed("ready", outcome="memory"), "memory"),
        (printed("ready", outcome="killed"), "killed"),
    ],
)
def test_ends(result, expected):
    assert end_of(result, MARK, GRADER_LIMITS) == expected


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (printed("ready", **BUSY, cpu_s=0.4), "only 0.4 s of CPU in 15.0 s"),
        (printed("ready"), "no verdict: ok"),
        (printed("ready", "right", "right"), "no verdict: right"),
        (ToolResult(outcome="ok", stdout=f"{MARK} ready\nright\n"), "no verdict: right"),
        (ToolResult(outcome="ok", stdout=f"{MARK} ready\nx\n{MARK} right\n"), "no verdict: x"),
        (printed("ready", "right", outcome="error", exit_code=1), "no verdict: right"),
        (printed("ready", "failed KeyError: 1", outcome="error", exit_code=1), "no verdict: failed KeyError: 1"),
        (printed("ready", outcome="output"), "no verdict: output"),
        (printed("ready", "lacks sympy.solvers", outcome="error", exit_code=1), "lacks sympy.solvers"),
        (printed(outcome="timeout", wall_s=3.1, cpu_s=3.0), "outcome 'timeout'"),
        (printed(outcome="memory"), "outcome 'memory'"),
        (printed(outcome="ok"), "outcome 'ok'"),
        (printed("right"), "GRADER_MODULES"),
        (ToolResult(outcome="ok", stdout="0000 ready\n0000 right\n"), "GRADER_MODULES"),
        (
            ToolResult(outcome="error", exit_code=1, stderr="Traceback\nModuleNotFoundError: x"),
            "ModuleNotFoundError: x",
        ),
        (printed(outcome="lost"), "lost"),
    ],
)
def test_no_verdict(result, expected):
    with pytest.raises(GraderUnavailable, match=expected):
        end_of(result, MARK, GRADER_LIMITS)


@pytest.mark.parametrize(
    "failure",
    [printed(outcome="lost"), printed(outcome="killed"), RuntimeError("the sandbox was closed")],
    ids=["lost", "killed before it read", "unavailable"],
)
async def test_what_could_not_be_graded_is_an_infrastructure_error(failure):
    runner = Prints(failure)
    reward = MathReward(runner=runner)
    done = await graded(boxed(r"\frac{2}{4}", HALF), reward, Timeline(Clock()))
    assert (done.reward, done.error.boundary, done.stop) == (None, Boundary.REWARD, StopReason.ERROR)
    assert reward.grader.counts == {"unavailable": 1}
    runner.results = [printed("ready", "right")]
    assert await reward(boxed(r"\frac{2}{4}", HALF)) == 1.0  # it was not remembered


async def test_one_signal_from_outside_costs_nothing():
    runner = Prints(printed("ready", outcome="killed"), printed("ready", "right"))
    reward = MathReward(runner=runner)
    assert await reward(boxed(r"\frac{2}{4}", HALF)) == 1.0
    assert reward.grader.counts == {"right": 1}


async def test_an_answer_that_hangs_two_graders_is_wrong():
    """Were it no verdict, answers that hang would be a way around the 0."""
    runner = Prints(printed("ready", outcome="timeout", cpu_s=3.0))
    reward = MathReward(runner=runner)
    assert await reward(boxed(r"\frac{2}{4}", HALF)) == 0.0
    assert reward.grader.counts == {"timeout": 1}
    assert len(runner.answers) == 2


@pytest.mark.parametrize("ends", [("killed", "killed"), ("memory", "memory"), ("timeout", "killed")])
async def test_graders_that_end_otherwise_say_nothing(ends):
    runner = Prints(*(printed("ready", outcome=end, cpu_s=3.0) for end in ends))
    reward = MathReward(runner=runner)
    with pytest.raises(GraderUnavailable, match=", ".join(ends)):
        await reward(boxed(r"\frac{2}{4}", HALF))
    assert reward.grader.counts == {"unavailable": 1}
    assert len(runner.answers) == 2


async def test_the_same_answer_is_graded_once():
    runner = Prints(printed("ready", "right"))
    grader = MathGrader(runner)
    for answer in ("a", "b", "a"):
        assert await grader.equal(answer, "c")
    assert await grader.equal("a", "d")
    assert runner.answers == ["a", "b", "a"]


async def test_an_endless_answer_is_not_sent():
    runner = Prints(AssertionError("the sandbox was asked"))
    assert await MathReward(runner=runner)(boxed("x" * (LONGEST_ANSWER + 1), HALF)) == 0.0
    assert await MathReward(runner=runner)(boxed("x" * 1_000_000, HALF)) == 0.0


async def test_cancelling_the_reward_cancels_the_call():
    runner = ScriptedRunner(hold=True)
    async with asyncio.TaskGroup() as tasks:
        grading = tasks.create_task(MathReward(runner=runner)(boxed(r"\frac{2}{4}", HALF)), name="grading")
        await runner.started.wait()
        grading.cancel()
    assert grading.cancelled()
    assert (runner.cancelled, runner.running) == (1, 0)


async def test_limits_reach_the_runner():
    runner = ScriptedRunner()
    limits = Limits(cpu_s=1.0, wall_s=9.0)
    with pytest.raises(GraderUnavailable):
        await MathReward(runner=runner, limits=limits)(boxed(r"\frac{2}{4}", HALF))
    assert [call[2] for call in runner.calls] == [limits]


@pytest.mark.parametrize(
    "options",
    [
        {"judge": "prime"},
        {"judge": "math-verify"},
        {"judge": "math-verify", "runner": Prints(printed("ready", "right")), "percent_is_optional": True},
        {"judge": "math-verify", "runner": Prints(printed("ready", "right")), "integers_only": True},
    ],
)
def test_options_that_math_verify_does_not_have(options):
    with pytest.raises(ValueError, match="MathReward"):
        MathReward(**options)


async def test_math_verify_decides_alone():
    """Equal texts and numbers are sent to it too."""
    for verdict, expected in (("right", 1.0), ("wrong", 0.0)):
        runner = Prints(printed("ready", verdict), judge="math-verify")
        assert await MathReward(runner=runner, judge="math-verify")(boxed("42", "42")) == expected
        assert runner.answers == ["42"]


def test_the_program_imports_nothing_but_what_is_preloaded():
    imported = set()
    for path in GUEST.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
    others = {module for module in imported if not module.startswith("algo.reward.maths.guest.")}
    assert {module.partition(".")[0] for module in others} - sys.stdlib_module_names <= set(GRADER_MODULES)
