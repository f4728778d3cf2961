"""A reward of what a trajectory has left in its workspace: hidden tests, run in a fresh jail.

Invariants
- Tests come to the jail for grading only, and `inside/grading.py` says why no program there can read or forge them.
- The verdict is the exit code of the tests' process, as the kernel reports it. What we lost is no verdict.
- Tests that cannot run are never a silent 0: where the reference cannot pass either, the task has no grade and is named
  in the log; where there is none, a task of which no grading ran a test is named.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.ports import Grade, GraderUnavailable
from engine.types import Prompt, Trajectory
from recipes.tools.guest import Guest, request_of
from recipes.tools.snapshot import BadEdit, Bounds, Snapshot
from recipes.tools.workspace import NAME, jail_limits, snapshot_of
from sandbox import Limits, Sandbox, SandboxUnavailable
from sandbox.require import positive, require

log = logging.getLogger(__name__)
GRADE = Guest("workspace.py", "grading.py")
SUSPICIOUS = 8  # After so many gradings of a task without a test that ran, its tests are suspected.


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How the tests of a task ended.

    failed: why, by FILE::TEST; FILE::import is a file that could not be imported. stopped: the limit that ended the
    tests' process before it could report, "" if none did.

    >>> Report(passed=3, failed={"test_a.py::test_one": "AssertionError: "}).share
    0.75
    """

    passed: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    stopped: str = ""

    @property
    def share(self) -> float:
        """The share of tests that passed."""
        return self.passed / (self.passed + len(self.failed)) if self.passed else 0.0

    @property
    def ran(self) -> bool:
        """Whether some test was run."""
        return self.passed > 0 or any(not name.endswith("::import") for name in self.failed)

    @property
    def complaint(self) -> str:
        """What the first test that failed says; "" if all passed."""
        if self.stopped:
            return f"the tests were stopped: {self.stopped}"
        return next((f"{name}: {reason}" for name, reason in self.failed.items()), "")


class HiddenTests:
    """Is 1 where all tests of `Prompt.metadata["tests"]` (file name to source) pass, else 0.

    share: the share of tests that pass instead. wall_s: seconds for each program or function that a test calls.
    total_s: seconds for all tests; a prompt may name fewer (`metadata["verifier_s"]`). The score `tests` is the share,
    and `tests_ran` whether a test was run. `metadata["solution"]` (path to text), if there is one, is a reference.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        share: bool = False,
        wall_s: float = 4.0,
        total_s: float = 20.0,
        memory_bytes: int = 512 << 20,
        bounds: Bounds | None = None,
    ) -> None:
        require("wall_s", wall_s, positive)
        require("total_s", total_s, positive)
        self._sandbox, self._share, self._wall_s, self._total_s = sandbox, share, wall_s, total_s
        self._memory_bytes, self._bounds = memory_bytes, bounds or Bounds()
        self._never_ran: Counter[str] = Counter()  # gradings by task, while none of them ran a test
        self._ran: set[str] = set()
        self._of_reference: dict[str, Report] = {}

    async def __call__(self, trajectory: Trajectory) -> Grade:
        state = trajectory.states.get(NAME)
        if state is None:
            raise ValueError(f"the trajectory has no workspace. Fix: job.rollouts([Workspaces(...)]), named {NAME!r}")
        prompt = trajectory.prompt
        report = await self.report(prompt, Snapshot.read(state, self._bounds))
        if not report.ran:
            await self._look_for_fault(prompt, report)
        elif (task := task_of(prompt)) not in self._ran:
            self._ran.add(task)
        passed = report.share
        reward = passed if self._share else float(passed == 1.0)
        return Grade(reward=reward, scores={"tests": passed, "tests_ran": float(report.ran)})

    async def report(self, prompt: Prompt, snapshot: Snapshot) -> Report:
        """Returns how the prompt's tests end on a workspace. Raises GraderUnavailable if we could not find out."""
        tests = prompt.metadata.get("tests")
        if not tests:
            raise ValueError(f"prompt {prompt.id}: metadata['tests'] must name at least one file, got {tests!r}")
        total_s = min(self._total_s, float(prompt.metadata.get("verifier_s", self._total_s)))
        request = request_of({"tests": tests, "wall_s": min(self._wall_s, total_s)}, snapshot.files)
        try:
            result = await GRADE.run(self._sandbox, "grade", request, self._limits(total_s))
        except SandboxUnavailable as error:
            raise GraderUnavailable(str(error)) from error
        if result.outcome == "lost":
            raise GraderUnavailable("the sandbox lost the tests")
        if result.outcome not in ("ok", "error"):
            return Report(stopped=result.outcome)
        report = _report(result.stdout)
        if (result.outcome == "ok") != (report.complaint == ""):
            return Report(stopped="its exit code is not what it reports")
        return report

    async def report_of_reference(self, prompt: Prompt) -> Report | None:
        """Returns how the tests end on the reference; None if there is none. Raises ValueError for what is none."""
        reference = reference_of(prompt, self._bounds)
        return None if reference is None else await self.report(prompt, reference)

    async def _look_for_fault(self, prompt: Prompt, report: Report) -> None:
        """Finds out whether tests that did not run are the task's own fault. Raises GraderUnavailable if so."""
        task = task_of(prompt)
        if task in self._ran:
            return
        self._never_ran[task] += 1
        if task not in self._of_reference and (of_reference := await self.report_of_reference(prompt)) is not None:
            self._of_reference[task] = of_reference
            if not of_reference.ran:
                log.warning(
                    "%s is not trained: its tests do not run on the reference: %s", task, of_reference.complaint
                )
        if task in self._of_reference and not self._of_reference[task].ran:
            complaint = self._of_reference[task].complaint
            raise GraderUnavailable(f"{task}: its tests do not run on the reference: {complaint}")
        if task not in self._of_reference and self._never_ran[task] == SUSPICIOUS:
            log.warning(
                "%s: none of its first %d gradings ran a test, and each counts as 0: %s. "
                "Fix: see recipes/tools/check.py, and give the task a reference",
                task,
                SUSPICIOUS,
                report.complaint,
            )

    def _limits(self, total_s: float) -> Limits:
        return jail_limits(total_s, self._memory_bytes, self._bounds)


def task_of(prompt: Prompt) -> str:
    """Returns the name of a prompt's task, which is the same in each epoch."""
    return prompt.id.partition("@")[0]


def reference_of(prompt: Prompt, bounds: Bounds) -> Snapshot | None:
    """Returns the workspace with the reference's files, None if the prompt has none. Raises ValueError for bad ones."""
    files = prompt.metadata.get("solution")
    if not files:
        return None
    try:
        solved = {path: text.encode() for path, text in files.items()}
        return Snapshot(files={**snapshot_of(prompt, bounds).files, **solved}, bounds=bounds)
    except (AttributeError, BadEdit) as error:
        raise ValueError(f"prompt {prompt.id}: metadata['solution'] is no workspace: {error}") from error


def _report(printed: str) -> Report:
    """Returns what the tests' own process tells; that it was stopped if it ended before it could."""
    try:
        report = json.loads(printed)
        return Report(passed=int(report["passed"]), failed=dict(report["failed"]))
    except (KeyError, TypeError, ValueError):
        return Report(stopped="its process ended without a report")
