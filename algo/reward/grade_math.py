"""Grades answers that need mathematics: runs `algo.reward.grader_program` in the sandbox, one jailed call per answer.

Invariants
- Right and wrong need the grader's own word: exit code 0 and exactly its two lines, with the mark made at random for
  this call. The text of an answer cannot bring that about. Wrong is what was compared, and what the grader cannot
  read or compare (`algo.reward.grader_program.REFUSALS`): the model's fault.
- An answer on which two graders, each a fresh process, used up `Limits.cpu_s` is wrong too, and counted as "timeout".
  CPU time is the call's own, however busy the machine is; so a policy cannot escape its 0 with answers that hang.
- All else raises GraderUnavailable, and is never a reward of 0: no sandbox, a lost call, Math-Verify not installed, a
  reference that it cannot digest, a machine too busy to let it compute, no memory, a signal, a bug. An answer that
  provokes that twice costs two calls and its own trajectory, which is then not trained; the run goes on.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from pathlib import Path
from typing import Literal

from engine.ports import GraderUnavailable, ToolRunner
from sandbox.wire import Limits, ToolResult

# What a sandbox has to preload; its guest environment has to have them (requirements/guest.lock). With them a grading
# takes some hundredths of a second of CPU, without them more than half a second. From "antlr4.LL1Analyzer" on it is
# what Math-Verify and sympy import at the first use.
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
FILES = ("grader_latex.py", "grader_program.py")  # the program, one text: nothing of ours can be imported in the jail

Verdict = Literal["right", "wrong", "timeout"]
End = Literal["right", "wrong", "timeout", "memory", "killed"]


def program() -> str:
    """The files one behind another, without their imports of each other."""
    lines = [line for name in FILES for line in Path(__file__).with_name(name).read_text().splitlines()]
    ours = ("from __future__ ", "from algo.")
    return "\n".join(["from __future__ import annotations", *(line for line in lines if not line.startswith(ours)), ""])


PROGRAM = program()


class MathGrader:
    """Whether two LaTeX expressions, as `algo.reward.math_text` writes them, mean the same, decided in the sandbox.

    counts: gradings by verdict ("timeout" means wrong); "unavailable" is each GraderUnavailable.
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
        """One more grader when one was ended: what comes from outside seldom strikes twice."""
        ends = []
        for _ in range(2):
            end = await self._run(answer, reference)
            if end in ("right", "wrong"):
                return end
            ends.append(end)
        if ends == ["timeout", "timeout"]:
            return "timeout"
        raise GraderUnavailable(f"two graders were ended: {ends[0]}, {ends[1]}")

    async def _run(self, answer: str, reference: str) -> End:
        mark = secrets.token_hex(8)
        stdin = json.dumps([mark, reference]) + "\n" + json.dumps(answer) + "\n"
        try:
            result = await self._runner.run(PROGRAM, stdin, self._limits)
        except RuntimeError as error:  # SandboxUnavailable is one
            raise GraderUnavailable(f"the grader did not run: {error}") from error
        return end_of(result, mark, self._limits)


def end_of(result: ToolResult, mark: str, limits: Limits) -> End:
    """How a grader ended that had begun to read the answer. Raises GraderUnavailable when it failed otherwise."""
    if result.outcome == "lost":
        raise GraderUnavailable("the grader's call was lost")
    ready, _, word = result.stdout.partition("\n")
    if ready != f"{mark} ready" or word.startswith(f"{mark} lacks "):
        said = word or result.stderr.strip().rpartition("\n")[2] or f"outcome {result.outcome!r}"
        raise GraderUnavailable(f"the grader needs a sandbox with GRADER_MODULES: {said.strip()[:300]}")
    if result.outcome == "timeout" and result.wall_s >= limits.wall_s and result.cpu_s < limits.cpu_s / 2:
        raise GraderUnavailable(f"the grader got only {result.cpu_s:.1f} s of CPU in {result.wall_s:.1f} s")
    if result.outcome in ("timeout", "memory", "killed"):
        return result.outcome
    verdicts: dict[str, End] = {f"{mark} right\n": "right", f"{mark} wrong\n": "wrong"}
    if result.outcome == "ok" and word in verdicts:
        return verdicts[word]
    raise GraderUnavailable(f"the grader gave no verdict: {word.removeprefix(mark).strip()[:300] or result.outcome}")
