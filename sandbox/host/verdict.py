"""Makes a call's ToolResult from what the kernel reported about it. Pure, except for reading the two output files.

Invariants
- The outcome depends on wait status, rusage, limits and file sizes only.
- At most `output_bytes` of each stream are read, however large the file is.
"""

from __future__ import annotations

import codecs
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from sandbox.inside.guest import LENGTH, file_bytes
from sandbox.inside.main_program import OUT_OF_MEMORY
from sandbox.inside.notebook import CODE_AT, DISPLAY_AT, CellReport, State
from sandbox.inside.slot import EndedBy, SlotReport
from sandbox.wire import Limits, Outcome, SessionState, ToolResult

CPU_SHARE = 0.7  # the kernel limits by counting ticks, and reports what it measured: up to a tenth less under load

SESSION_STATES: dict[State, SessionState] = {State.GONE: "lost", State.LIVE: "kept", State.FROM_COPY: "restored"}


class OomWatch:
    """The kernel's count of out-of-memory kills, which is one for the whole machine."""

    def __init__(self) -> None:
        self._seen = 0
        self.struck()

    def struck(self) -> bool:
        """Returns whether the out-of-memory killer struck since the last call."""
        lines = Path("/proc/vmstat").read_text().splitlines()
        before = self._seen
        self._seen = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        return self._seen > before


class Outputs:
    """The files of a call: stdout, stderr and, if it was asked for, the board with the display."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def text(self, stream: int, limit: int) -> tuple[str, int]:
        """Returns the first `limit` bytes of stdout (0) or stderr (1) as text, whole characters only, and its size."""
        size = os.fstat(self._fds[stream]).st_size
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(os.pread(self._fds[stream], min(size, limit), 0), final=size <= limit), size

    def display(self, at: int, limit: int) -> tuple[str | None, int]:
        """Returns the display as `text` does; None without one. Content and length are the guest's own claim."""
        size = LENGTH.unpack(os.pread(self._fds[2], LENGTH.size, at))[0] if len(self._fds) == 3 else 0
        if size <= 0:
            return None, 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(os.pread(self._fds[2], min(size, limit), at + LENGTH.size), final=size <= limit), size


def make_result(report: SlotReport, limits: Limits, outputs: Outputs, oom_struck: Callable[[], bool]) -> ToolResult:
    """Returns the result of a call with this report."""
    code = os.waitstatus_to_exitcode(report.status)
    unexplained = report.ended == EndedBy.ITSELF and code == -signal.SIGKILL
    uncaught = 1 if code == -OUT_OF_MEMORY else None
    result, written = _with_outputs(outputs, 0, limits)
    return msgspec.structs.replace(
        result,
        outcome=judge(report, limits, written, oom_killed=unexplained and oom_struck()),
        exit_code=code if code >= 0 else uncaught,
        wall_s=report.wall_s,
        cpu_s=report.cpu_s,
        peak_memory_bytes=report.peak_memory_bytes,
    )


def cell_result(report: CellReport, limits: Limits, outputs: Outputs, oom_struck: Callable[[], bool]) -> ToolResult:
    """Returns the result of a session's cell."""
    result, _ = _with_outputs(outputs, DISPLAY_AT, limits)
    exit_code: int | None = None
    if report.died:
        usage = SlotReport(report.ended, report.status, report.wall_s, report.cpu_s, 0)
        result = msgspec.structs.replace(
            make_result(usage, limits, outputs, oom_struck), display=result.display, truncated=result.truncated
        )
        outcome, exit_code = result.outcome, result.exit_code
        outcome = "killed" if outcome == "ok" else outcome  # a session that leaves by os._exit(0) took its state along
    elif report.ended != EndedBy.ITSELF:
        outcome = "timeout" if report.ended == EndedBy.WALL_LIMIT else "killed"
    else:
        exit_code = abs(report.status)
        outcome = "ok" if report.status == 0 else "memory" if report.status < 0 else "error"
    return msgspec.structs.replace(
        result,
        outcome=outcome,
        exit_code=exit_code,
        wall_s=report.wall_s,
        cpu_s=report.cpu_s,
        session_state=SESSION_STATES[State(report.state)],
        jailed=True,
    )


def _with_outputs(outputs: Outputs, display_at: int, limits: Limits) -> tuple[ToolResult, int]:
    """Returns a result with the texts filled in, and the size of the larger output file."""
    (stdout, out_bytes), (stderr, err_bytes) = (outputs.text(stream, limits.output_bytes) for stream in (0, 1))
    room = min(limits.output_bytes, CODE_AT - DISPLAY_AT - LENGTH.size) if display_at else limits.output_bytes
    display, display_bytes = outputs.display(display_at, room)
    written = max(out_bytes, err_bytes)
    truncated = written > limits.output_bytes or display_bytes > room
    return ToolResult(outcome="lost", stdout=stdout, stderr=stderr, display=display, truncated=truncated), written


def judge(report: SlotReport, limits: Limits, output_bytes: int, *, oom_killed: bool) -> Outcome:
    """Returns the outcome of a call whose larger output file has `output_bytes`.

    A limit is named only if it was reached: a signal or an exit code alone proves nothing, since code may choose both.
    There is one exception: only the process knows that memory was refused, so "memory" may be its own claim
    (OUT_OF_MEMORY) in place of "killed" or "error".
    """
    if report.ended != EndedBy.ITSELF:
        return "timeout" if report.ended == EndedBy.WALL_LIMIT else "killed"
    if report.cpu_s >= limits.cpu_s:
        return "timeout"
    code = os.waitstatus_to_exitcode(report.status)
    full = output_bytes >= file_bytes(limits.disk_bytes, limits.output_bytes)
    match -code:
        case 0:
            return "ok"
        case number if number < 0:
            return "output" if full else "error"
        case number if number == OUT_OF_MEMORY:
            return "memory"
        case signal.SIGXFSZ if full:
            return "output"
        case signal.SIGXCPU if report.cpu_s >= limits.cpu_s * CPU_SHARE:
            return "timeout"
        case _:
            return "memory" if oom_killed else "killed"
