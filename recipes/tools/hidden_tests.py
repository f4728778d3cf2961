"""A reward of what a trajectory has left in its workspace: hidden tests, run in a fresh jail.

Invariants
- Tests come to the jail for grading only, and `inside/grading.py` says why no program there can read or forge them.
- The verdict is the exit code of the tests' process, as the kernel reports it. What we lost is no verdict.
"""

from __future__ import annotations

import json

from engine.ports import Grade, GraderUnavailable
from engine.types import Trajectory
from recipes.tools.guest import Guest, request_of
from recipes.tools.snapshot import Bounds, Snapshot
from recipes.tools.workspace import NAME, jail_limits
from sandbox import Limits, Sandbox, SandboxUnavailable
from sandbox.require import positive, require

GRADE = Guest("workspace.py", "grading.py")


class HiddenTests:
    """Is 1 where all tests of `Prompt.metadata["tests"]` (file name to source) pass, else 0.

    share: the share of tests that pass instead. wall_s: seconds for each program or function that a test calls.
    total_s: seconds for all tests; a prompt may name fewer (`metadata["verifier_s"]`). The score `tests` is the share.
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

    async def __call__(self, trajectory: Trajectory) -> Grade:
        state = trajectory.states.get(NAME)
        if state is None:
            raise ValueError(f"the trajectory has no workspace. Fix: job.rollouts([Workspaces(...)]), named {NAME!r}")
        prompt = trajectory.prompt
        tests = prompt.metadata.get("tests")
        if not tests:
            raise ValueError(f"prompt {prompt.id}: metadata['tests'] must name at least one file, got {tests!r}")
        snapshot = Snapshot.read(state, self._bounds)
        total_s = min(self._total_s, float(prompt.metadata.get("verifier_s", self._total_s)))
        passed = await self.share_passed(snapshot, tests, total_s)
        return Grade(reward=passed if self._share else float(passed == 1.0), scores={"tests": passed})

    async def share_passed(self, snapshot: Snapshot, tests: dict[str, str], total_s: float) -> float:
        """Returns the share of tests that pass. Raises GraderUnavailable if we could not find out."""
        request = request_of({"tests": tests, "wall_s": min(self._wall_s, total_s)}, snapshot.files)
        try:
            result = await GRADE.run(self._sandbox, "grade", request, self._limits(total_s))
        except SandboxUnavailable as error:
            raise GraderUnavailable(str(error)) from error
        match result.outcome:
            case "ok":
                return 1.0
            case "lost":
                raise GraderUnavailable("the sandbox lost the tests")
            case "error":
                return _share(result.stdout)
        return 0.0

    def _limits(self, total_s: float) -> Limits:
        return jail_limits(total_s, self._memory_bytes, self._bounds)


def _share(printed: str) -> float:
    """Returns the share that the tests' own process tells; 0 if it ended before it could."""
    try:
        report = json.loads(printed)
        passed, failed = int(report["passed"]), len(report["failed"])
    except (KeyError, TypeError, ValueError):
        return 0.0
    return passed / (passed + failed) if failed else 0.0
