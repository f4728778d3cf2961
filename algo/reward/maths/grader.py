"""Grades answers that need mathematics, in the sandbox: one jailed call of a program in `guest` per answer.

Invariants
- Right and wrong need the program's own verdict: exit code 0 and exactly its two lines, with the mark that was made at
  random for this call. The text of an answer cannot bring that about.
- An answer on which two programs, each a fresh process, used up `Limits.cpu_s` is wrong, and counted as "timeout". CPU
  time is the call's own, however busy the machine is; so a policy cannot escape its 0 with answers that hang.
- Everything else raises GraderUnavailable and is never a reward of 0: no sandbox, a lost call, Math-Verify not
  installed, a reference that it cannot digest, a machine too busy to let it compute, no memory, a signal, a bug. An
  answer that provokes that twice costs two calls and its own trajectory, which is then not trained; the run continues.
"""

from __future__ import annotations

import base64
import compileall
import functools
import io
import json
import py_compile
import secrets
import shutil
import tempfile
import zipapp
from collections import Counter
from pathlib import Path
from typing import Literal

from engine.ports import GraderUnavailable, ToolRunner
from sandbox.wire import Limits, ToolResult

# The sandbox has to preload these modules, and its guest environment has to have them (requirements/guest.lock). With
# them a grading takes some hundredths of a second of CPU, without them more than half a second. From
# "antlr4.LL1Analyzer" on, they are what Math-Verify and sympy import at their first use.
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
# Nearly every grading needs less than 0.5 s of CPU. wall_s is far above cpu_s, so it ends calls only on a busy machine.
GRADER_LIMITS = Limits(cpu_s=3.0, wall_s=15.0)
LONGEST_ANSWER = 2000  # characters; reference answers have a few dozen, and parsing is slow in the length
REMEMBERED = 4096  # verdicts; the rollouts of a group often give the same answer
GUEST = Path(__file__).with_name("guest")

Judge = Literal["strict", "math-verify"]
MAIN: dict[Judge, str] = {"strict": "strict:main", "math-verify": "math_verify_judge:main"}
Verdict = Literal["right", "wrong", "timeout"]
End = Literal["right", "wrong", "timeout", "memory", "killed"]


@functools.cache
def program(judge: Judge, guest: Path = GUEST) -> str:
    """Returns a judge's program: a zipapp of the guest folder, which the code unpacks and runs.

    Beside each source lies its bytecode, which an interpreter of the same version takes instead.
    """
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, *__package__.split("."), "guest")
        shutil.copytree(guest, copy, ignore=shutil.ignore_patterns("__pycache__"))
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(copy, quiet=1, legacy=True, stripdir=folder, invalidation_mode=unchecked)
        zipapp.create_archive(folder, archive, main=f"{__package__}.guest.{MAIN[judge]}", compressed=True)
    return (
        "import base64, runpy\n"
        f'open("grader.pyz", "wb").write(base64.b64decode({base64.b64encode(archive.getvalue()).decode()!r}))\n'
        'runpy.run_path("grader.pyz", run_name="__main__")\n'
    )


class MathGrader:
    """Decides in the sandbox whether two LaTeX expressions, as `algo.reward.maths.reading` writes them, are equal.

    judge: "strict", or "math-verify" for Math-Verify as it comes.
    counts: gradings by verdict ("timeout" means wrong); "unavailable" counts each GraderUnavailable.
    """

    def __init__(self, runner: ToolRunner, limits: Limits = GRADER_LIMITS, judge: Judge = "strict") -> None:
        self.counts: Counter[str] = Counter()
        self._runner = runner
        self._limits = limits
        self._program = program(judge)
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    async def equal(self, answer: str, reference: str) -> bool:
        """Returns whether the answer equals the reference. Raises GraderUnavailable when there is no verdict."""
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
        """Runs a second program when the first was ended: what comes from outside seldom strikes twice."""
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
            result = await self._runner.run(self._program, stdin, self._limits)
        except RuntimeError as error:  # SandboxUnavailable is one
            raise GraderUnavailable(f"the grader did not run: {error}") from error
        return end_of(result, mark, self._limits)


def end_of(result: ToolResult, mark: str, limits: Limits) -> End:
    """Returns how a program ended that had begun to read the answer. Raises GraderUnavailable for any other end."""
    if result.outcome == "lost":
        raise GraderUnavailable("the grader's call was lost")
    ready, _, verdict = result.stdout.partition("\n")
    if ready != f"{mark} ready" or verdict.startswith(f"{mark} lacks "):
        reason = verdict or result.stderr.strip().rpartition("\n")[2] or f"outcome {result.outcome!r}"
        raise GraderUnavailable(f"the grader needs a sandbox with GRADER_MODULES: {reason.strip()[:300]}")
    if result.outcome == "timeout" and result.wall_s >= limits.wall_s and result.cpu_s < limits.cpu_s / 2:
        raise GraderUnavailable(f"the grader got only {result.cpu_s:.1f} s of CPU in {result.wall_s:.1f} s")
    if result.outcome in ("timeout", "memory", "killed"):
        return result.outcome
    verdicts: dict[str, End] = {f"{mark} right\n": "right", f"{mark} wrong\n": "wrong"}
    if result.outcome == "ok" and verdict in verdicts:
        return verdicts[verdict]
    raise GraderUnavailable(f"the grader gave no verdict: {verdict.removeprefix(mark).strip()[:300] or result.outcome}")
