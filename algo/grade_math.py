"""Grades answers that are no plain numbers: runs `algo.grader` in the sandbox, one jailed call per answer.

Invariants
- Right needs the grader's own word: exit code 0 and exactly its two lines, with the mark made at random for this call.
  The text of an answer cannot bring that about.
- A limit that the grader hits after it began to read the answer (time, memory, a crash) is the answer's doing: wrong,
  and counted. It costs one call of at most `Limits.cpu_s`.
- All else that keeps the grader from a verdict raises GraderUnavailable: no sandbox, a lost call, Math-Verify not
  installed, a reference that it cannot digest, a machine too busy to let it compute.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from pathlib import Path
from typing import Literal

from engine.ports import GraderUnavailable, ToolRunner
from sandbox.wire import Limits, ToolResult

# What a sandbox has to preload: with them a grading takes a tenth of a second of CPU, without them more than half a
# second. From "antlr4.LL1Analyzer" on it is what Math-Verify and sympy import at the first use.
GRADER_MODULES = (
    "latex2sympy2_extended",
    "math_verify",
    "sympy",
    "antlr4.LL1Analyzer",
    "sympy.assumptions.wrapper",
    "sympy.integrals.heurisch",
    "sympy.integrals.manualintegrate",
    "sympy.integrals.prde",
    "sympy.integrals.risch",
    "sympy.physics.matrices",
    "sympy.physics.units",
    "sympy.sets.handlers.functions",
    "sympy.sets.setexpr",
    "sympy.tensor.tensor",
)
# Nearly every grading needs less than 0.5 s of CPU. wall_s is far above cpu_s: only on a busy machine it ends a call.
GRADER_LIMITS = Limits(cpu_s=3.0, wall_s=15.0)
LONGEST_ANSWER = 2000  # characters; reference answers have a few dozen, and parsing is slow in the length
REMEMBERED = 4096  # verdicts: the rollouts of a group often give the same answer
PROGRAM = Path(__file__).with_name("grader.py").read_text()

Verdict = Literal["right", "wrong", "timeout", "memory", "killed", "error", "output"]


class MathGrader:
    """Whether two LaTeX expressions mean the same, decided by Math-Verify in the sandbox.

    counts: gradings by verdict; those that are neither "right" nor "wrong" name what ended the grader (and mean wrong);
    "unavailable" is each GraderUnavailable.
    """

    def __init__(self, runner: ToolRunner, limits: Limits = GRADER_LIMITS) -> None:
        self.counts: Counter[str] = Counter()
        self._runner = runner
        self._limits = limits
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    async def equal(self, answer: str, reference: str) -> bool:
        """Raises GraderUnavailable when it could not be found out."""
        if len(answer) > LONGEST_ANSWER:
            return False
        pair = (answer, reference)
        if pair not in self._verdicts:
            try:
                verdict = await self._grade(answer, reference)
            except GraderUnavailable:
                self.counts["unavailable"] += 1
                raise
            self.counts[verdict] += 1
            if len(self._verdicts) >= REMEMBERED:
                del self._verdicts[next(iter(self._verdicts))]
            self._verdicts[pair] = verdict
        return self._verdicts[pair] == "right"

    async def _grade(self, answer: str, reference: str) -> Verdict:
        for _ in range(2):  # a signal from outside strikes once; one that the answer provokes strikes again
            mark = secrets.token_hex(8)
            stdin = json.dumps([mark, reference]) + "\n" + json.dumps(answer) + "\n"
            try:
                result = await self._runner.run(PROGRAM, stdin, self._limits)
            except RuntimeError as error:  # SandboxUnavailable is one
                raise GraderUnavailable(f"the grader did not run: {error}") from error
            if result.outcome != "killed":
                break
        return verdict(result, mark, self._limits)


def verdict(result: ToolResult, mark: str, limits: Limits) -> Verdict:
    """What the grader's call says. Raises GraderUnavailable when that is nothing about the answer."""
    if result.outcome == "lost":
        raise GraderUnavailable("the grader's call was lost")
    ready, _, rest = result.stdout.partition("\n")
    if ready != f"{mark} ready" or rest.startswith(f"{mark} lacks "):
        said = rest or result.stderr.strip().rpartition("\n")[2] or f"outcome {result.outcome!r}"
        raise GraderUnavailable(f"the grader needs a sandbox with GRADER_MODULES: {said.strip()[:300]}")
    if result.outcome == "timeout" and result.wall_s >= limits.wall_s and result.cpu_s < limits.cpu_s / 2:
        raise GraderUnavailable(f"the grader got only {result.cpu_s:.1f} s of CPU in {result.wall_s:.1f} s")
    if result.outcome != "ok":
        return result.outcome
    return "right" if rest == f"{mark} right\n" else "wrong"
