"""What an attack by the cells of a session is, and what such programs have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandbox import Limits, ToolResult

from .record import MIB, SYSCALLS

PLENTY = Limits(wall_s=20, cpu_s=20, memory_bytes=512 * MIB, disk_bytes=8 * MIB, processes=24)
HANGS = Limits(wall_s=0.3, cpu_s=5, memory_bytes=512 * MIB, disk_bytes=8 * MIB, processes=24)
FORGES = Limits(wall_s=1, cpu_s=5, memory_bytes=512 * MIB, disk_bytes=8 * MIB, processes=24)  # replayed, it may not end
LITTLE = Limits(wall_s=20, cpu_s=20, memory_bytes=96 * MIB, disk_bytes=4 * MIB, processes=8)
PAUSE_S = 0.5  # in which an idle session could do something


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A cell and what its result must be; `idle`: leave the session alone for PAUSE_S before it."""

    code: str
    outcomes: tuple[str, ...] = ("ok",)
    states: tuple[str, ...] = ("kept",)
    stdout: str | None = ""
    display: str | None = None
    limits: Limits = PLENTY
    idle: bool = False
    check: Callable[[ToolResult], bool] | None = None

    def complaints(self, result: ToolResult) -> list[str]:
        right = (
            result.outcome in self.outcomes
            and result.session_state in self.states
            and self.stdout in (None, result.stdout)
            and self.display in (None, result.display)
            and (self.check is None or self.check(result))
            and result.jailed
        )
        return [] if right else [f"{self.code[-200:]!r} answered {str(result)[:1200]}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionAttack:
    name: str
    point: str
    turns: tuple[Turn, ...]


COSTLY = "import time\nend = time.process_time() + 0.35\nwhile time.process_time() < end: pass\n"  # a copy is worth it
X = Turn(code="x = 1")
X_IS_1 = Turn(code="x", display="1")
X_OR_DEAD = Turn(code="x", outcomes=("ok", "killed"), states=("kept", "restored"))
# who forges the end of a cell goes on with it in the next, which then may not come to an end: the session's own loss
ANYHOW = ("ok", "error", "timeout", "lost")
LATE = Turn(code="7", outcomes=ANYHOW, states=("kept", "restored", "lost"), stdout=None, limits=HANGS)
ANY = Turn(code="8", outcomes=("ok", "timeout", "lost"), states=("kept", "restored", "lost"), stdout=None)
DIES = Turn(code="x = 2\nimport os\nos._exit(1)", outcomes=("error", "killed"), states=("restored",))
STAMPS = (
    SYSCALLS
    + """
import mmap, signal, struct, threading, time
page = mmap.mmap(-1, 4096)  # shared with children: last moment that was seen, moments that were not
def stamp():  # how long it ran while the session was idle: moments apart from others by less than 20 ms
    while True:
        now, (last, ran) = time.monotonic(), struct.unpack_from('dd', page)
        struct.pack_into('dd', page, 0, now, ran + (now - last if now - last < 0.02 else 0.0))
        time.sleep(0.001)
def ran(): return struct.unpack_from('dd', page)[1]
def child(target):
    pid = os.fork()
    if pid == 0:
        try: target()
        finally: os._exit(0)
    return pid
"""
)
# the keeper stops all at the end of a cell; half the pause is more than what a busy machine needs to run a few ms
REST = Turn(code="before, began = ran(), time.monotonic()")
RESTED = Turn(code="print(f'ran for {ran() - before:.2f} s') if ran() - before > 0.3 else None", idle=True)
BOARD = (
    SYSCALLS
    + """
import signal, struct, sys, threading, time
def board():
    frame = sys._getframe()
    while 'address' not in frame.f_locals: frame = frame.f_back
    return frame.f_locals['address']
address = board()
def serial(): return struct.unpack('q', ctypes.string_at(address, 8))[0]
def done(number, status): ctypes.memmove(address + 64, struct.pack('qq', number, status), 16)
"""
)
CLONE_PARENT = "def sibling(): return call(56 if x86 else 220, 0x8000 | 17, 0, 0, 0, 0)\n"


def attack(name: str, point: str, *turns: Turn | str) -> SessionAttack:
    return SessionAttack(
        name=name, point=point, turns=tuple(Turn(code=turn) if isinstance(turn, str) else turn for turn in turns)
    )
