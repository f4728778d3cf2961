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
    """The kernel's count of out-of-memory kills, which is one for the whole machine."""

    def __init__(self) -> None:
        self._seen = 0
        self.struck()

    def struck(self) -> bool:
        """Whether the out-of-memory killer struck since the last look."""
        lines = Path("/proc/vmstat").read_text().splitlines()
        before = self._seen
        self._seen = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        return self._seen > before


def make_result(report: Report, limits: Limits, outputs: list[int], oom: OomWatch) -> ToolResult:
    """The result of a call with this report; `outputs` are the descriptors of its stdout and stderr."""
    (stdout, out_bytes), (stderr, err_bytes) = (_read(fd, limits.output_bytes) for fd in outputs)
    largest = max(out_bytes, err_bytes)
    code = os.waitstatus_to_exitcode(report.status)
    unexplained = report.ended == 0 and code == -signal.SIGKILL
    uncaught = 1 if code == -OUT_OF_MEMORY else None
    return ToolResult(
        outcome=judge(report, limits, largest, oom_killed=unexplained and oom.struck()),
        stdout=stdout,
        stderr=stderr,
        exit_code=code if code >= 0 else uncaught,
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
    code = os.waitstatus_to_exitcode(report.status)
    if code > 0:
        return "output" if output_bytes >= file_bytes(limits.disk_bytes, limits.output_bytes) else "error"
    match -code:
        case 0:
            return "ok"
        case number if number == OUT_OF_MEMORY:
            return "memory"
        case signal.SIGXFSZ:
            return "output"
        case signal.SIGXCPU:
            return "timeout"
        case signal.SIGKILL if report.cpu_s >= limits.cpu_s:
            return "timeout"
        case _:
            return "memory" if oom_killed else "killed"


def _read(fd: int, limit: int) -> tuple[str, int]:
    """The file's first `limit` bytes as text, and its size; a character that the limit splits is left out."""
    size = os.fstat(fd).st_size
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(os.pread(fd, min(size, limit), 0), final=size <= limit), size
