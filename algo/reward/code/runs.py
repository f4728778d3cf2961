"""What all gradings share: how tests ended, and one call of the sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from engine.ports import GraderUnavailable, ToolRunner
from sandbox.wire import Limits, ToolResult

NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """How each test ended, in their order. details: a short text for each that failed, "" for others."""

    passed: tuple[bool, ...]
    details: tuple[str, ...]

    @classmethod
    def of(cls, verdicts: Sequence[tuple[str, str]], tests: int) -> Self:
        """Tests behind the last verdict were not run, and count as failed."""
        missing = tests - len(verdicts)
        return cls(
            passed=(*(verdict == "passed" for verdict, _ in verdicts), *[False] * missing),
            details=(*(detail for _, detail in verdicts), *[NOT_RUN] * missing),
        )

    @classmethod
    def all_failed(cls, tests: int, reason: str) -> Self:
        return cls(passed=(False,) * tests, details=(reason,) * tests)

    @property
    def complaint(self) -> str:
        """Which test failed first of those that were run, and why; "" if all passed."""
        failed = [number for number, passed in enumerate(self.passed) if not passed]
        if not failed:
            return ""
        if len(failed) == len(self.details) and len(set(self.details)) == 1:
            return self.details[0]  # of the program, not of one test
        first = next((number for number in failed if self.details[number] != NOT_RUN), failed[0])
        return f"test {first + 1} of {len(self.passed)}: {self.details[first]}"

    @property
    def share(self) -> float:
        """The share of tests that passed."""
        return sum(self.passed) / len(self.passed)


async def run(runner: ToolRunner, code: str, stdin: str, limits: Limits) -> ToolResult:
    """Runs one jailed call. Raises GraderUnavailable if the sandbox lost it, or is not there."""
    try:
        result = await runner.run(code, stdin, limits)
    except RuntimeError as error:  # SandboxUnavailable is one
        raise GraderUnavailable(f"the tests did not run: {error}") from error
    if result.outcome == "lost":
        raise GraderUnavailable("a call of the tests was lost")
    return result
