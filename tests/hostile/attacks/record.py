"""What an attack is: a program, the limits it runs under and what its result must look like if the sandbox held.

Most programs print only what they should not have been able to do, so that silence, exit code 0 and an empty stderr
(it ran to its end) mean that the attack was refused. `point` is the line of the threat model's checklist: A verdict,
B independence, C liveness, D host, E kernel surface, L limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandbox import Limits, ToolResult

MIB = 1 << 20
QUICK = Limits(wall_s=30, cpu_s=10, memory_bytes=512 * MIB, disk_bytes=8 * MIB, processes=16)  # ends by itself
HANGS = Limits(wall_s=0.25, cpu_s=5, memory_bytes=512 * MIB, disk_bytes=8 * MIB, processes=16)  # the wall ends it
SMALL = Limits(wall_s=4, cpu_s=4, memory_bytes=128 * MIB, disk_bytes=2 * MIB, processes=16, output_bytes=4096)

SYSCALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == 'x86_64'
def call(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
def refused(name, on_x86, on_arm, *arguments):
    number = on_x86 if x86 else on_arm
    if number is None: return
    result = call(number, *arguments)
    if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        print(name, result, errno.errorcode.get(ctypes.get_errno()))
"""
PLANTED = b"PLANTED-[0-9a-f]{16}"  # what honest calls carry in source and stdin; nobody else may find it


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """`stdout` None: anything; `check`: what else must hold of the result; `beside`: a call to run at the same time
    and what it must print.
    """

    name: str
    point: str
    code: str
    limits: Limits = QUICK
    stdin: str = ""
    outcomes: tuple[str, ...] = ("ok",)
    exit_code: int | None = None
    stdout: str | None = ""
    check: Callable[[ToolResult], bool] | None = None
    beside: tuple[str, str] | None = None

    def complaints(self, result: ToolResult) -> list[str]:
        """What in `result` shows that the sandbox did not hold."""
        found = []
        if result.outcome not in self.outcomes:
            found.append(f"outcome is {result.outcome}, not {'/'.join(self.outcomes)}")
        if self.stdout is not None and result.stdout != self.stdout:
            found.append(f"stdout is {result.stdout[:500]!r}, not {self.stdout[:500]!r}")
        if self.outcomes == ("ok",) and self.stdout is not None and result.stderr:
            found.append(f"stderr is {result.stderr[-500:]!r}")
        if self.exit_code is not None and result.exit_code != self.exit_code:
            found.append(f"exit code is {result.exit_code}, not {self.exit_code}")
        if self.check is not None and not self.check(result):
            found.append(f"its check fails for {str(result)[:800]}")
        if not result.jailed:
            found.append("it was not jailed")
        return found
