"""From what the kernel reported about a call to its ToolResult: pure, but for reading the two output files.

Invariants
- The outcome depends on wait status, rusage, limits and file sizes only.
- At most `output_bytes` of each stream are read, however large the file is.
"""

from __future__ import annotations

import codecs
import os
import signal
from pathlib import Path

from .guest import OUT_OF_MEMORY, file_bytes
from .slot import Report
from .wire import Limits, Outcome, ToolResult


class OomWatch:
    """Whether the kernel's out-of-memory killer struck since the last look (a count of the whole machine)."""

    def __init__(self) -> None:
        self._seen = self._count()

    def struck(self) -> bool:
        before, self._seen = self._seen, self._count()
        return self._seen > before

    @staticmethod
    def _count() -> int:
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def make_result(report: Report, limits: Limits, outputs: list[int], oom: OomWatch) -> ToolResult:
    """The result of a call with this report; `outputs` are the descriptors of its stdout and stderr."""
    (stdout, out_bytes), (stderr, err_bytes) = (_read(fd, limits.output_bytes) for fd in outputs)
    largest = max(out_bytes, err_bytes)
    unexplained = report.ended == 0 and _signal(report) == signal.SIGKILL
    outcome = judge(report, limits, largest, oom_killed=unexplained and oom.struck())
    exit_code = 1 if _signal(report) == OUT_OF_MEMORY else None
    return ToolResult(
        outcome=outcome,
        stdout=stdout,
        stderr=stderr,
        exit_code=os.WEXITSTATUS(report.status) if os.WIFEXITED(report.status) else exit_code,
        truncated=largest > limits.output_bytes,
        wall_s=report.wall_s,
        cpu_s=report.cpu_s,
        peak_memory_bytes=report.peak_memory_bytes,
        jailed=True,
    )


def judge(report: Report, limits: Limits, output_bytes: int, *, oom_killed: bool) -> Outcome:
    """The outcome of a call whose larger output file has `output_bytes`."""
    if report.ended:
        return "timeout" if report.ended == 1 else "killed"
    match _signal(report):
        case None:
            if report.status == 0:
                return "ok"
            return "output" if output_bytes >= file_bytes(limits.disk_bytes, limits.output_bytes) else "error"
        case sig if sig == OUT_OF_MEMORY:
            return "memory"
        case signal.SIGXCPU:
            return "timeout"
        case signal.SIGXFSZ:
            return "output"
        case signal.SIGKILL if report.cpu_s >= limits.cpu_s:
            return "timeout"
        case _:
            return "memory" if oom_killed else "killed"


def _signal(report: Report) -> int | None:
    return os.WTERMSIG(report.status) if os.WIFSIGNALED(report.status) else None


def _read(fd: int, limit: int) -> tuple[str, int]:
    """The file's first `limit` bytes as text, and its size; a character that the limit splits is left out."""
    size = os.fstat(fd).st_size
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(os.pread(fd, min(size, limit), 0), final=size <= limit), size
