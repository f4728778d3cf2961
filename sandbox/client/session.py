"""`Session`: cells of Python that share one interpreter, as in a notebook.

Invariants
- Cells run one at a time, in the order of `run`. Each `run` returns one ToolResult with a true session_state, or raises
  as Sandbox.run does.
- A cell never runs on another state than the one that the kept cells before it made. If that state cannot be had, the
  cell does not run and its result says "lost"; only the next one starts from empty.
- Cells are replayed only if the state is gone from the host that held it; the log is never replayed for each call.
- The log is bounded (LOG_CELLS, LOG_BYTES). A session that outgrew it, or one of whose cells was interrupted when a
  part of its effects was done, cannot be replayed: it stays on its host, with a fork snapshot before each cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec

from sandbox import wire
from sandbox.config import SandboxUnavailable, Stats

LOG_CELLS = 1000
LOG_BYTES = 16 << 20
BACKUP_S = 0.3  # if a replay costs more CPU than this, a snapshot (some ms) before each cell is cheaper insurance
REBUILDS = 2  # how often a state is built before it is given up: once more than a host may die under it
# Cells that ended by themselves have the same effects again; an interrupted one may have had any part of them.
REPLAYABLE = ("ok", "error")

SendCell = Callable[[wire.Cell, wire.SessionStep], Awaitable[wire.ToolResult]]


class CellLog:
    """The cells that made the state of a session, how they ended and what they cost. Pure.

    >>> log = CellLog()
    >>> log.add(wire.Cell(b"x = 1", b"", wire.Limits()), "ok", cpu_s=0.2)
    >>> log.number, log.backup, [(cell.code, cell.ok) for cell in log.history]
    (1, False, [(b'x = 1', True)])
    >>> log.add(wire.Cell(b"while True: x += 1", b"", wire.Limits()), "timeout", cpu_s=4.0)
    >>> log.number, log.backup, log.history
    (2, True, None)
    """

    def __init__(self) -> None:
        self.number = 0
        self._cells: list[wire.Cell] = []
        self._bytes = 0
        self._cpu_s = 0.0
        self._replayable = True

    @property
    def history(self) -> list[wire.Cell] | None:
        """The cells that rebuild the state; None if they cannot."""
        return list(self._cells) if self._replayable else None

    @property
    def backup(self) -> bool:
        """Whether the next cell is worth a fork snapshot."""
        return self._cpu_s > BACKUP_S or not self._replayable

    def add(self, cell: wire.Cell, outcome: wire.Outcome, cpu_s: float) -> None:
        self.number += 1
        self._bytes += cell.size_bytes
        self._cpu_s += cpu_s
        fits = self.number <= LOG_CELLS and self._bytes <= LOG_BYTES
        self._replayable = self._replayable and fits and outcome in REPLAYABLE
        if self._replayable:
            self._cells.append(msgspec.structs.replace(cell, ok=outcome == "ok"))
        else:
            self._cells.clear()


class Session:
    """Runs cells on one state; `Sandbox.session` makes it.

    >>> async with box.session() as session:
    ...     await session.run("x = 20")
    ...     result = await session.run("x + 1")
    >>> result.display, result.session_state
    ('21', 'kept')
    """

    def __init__(
        self, send: SendCell, end: Callable[[bytes], None], *, id: bytes, limits: wire.Limits, stats: Stats
    ) -> None:
        """send: gives a cell to a host and returns its answer. end: is told that the session is over."""
        self._send, self._end, self._id, self._limits, self._stats = send, end, id, limits, stats
        self._log = CellLog()
        self._built = False  # whether some host may hold the state
        self._turn = asyncio.Lock()
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        self._end(self._id)

    async def run(self, code: str, stdin: str = "", limits: wire.Limits | None = None) -> wire.ToolResult:
        """Runs `code` on the state of the cells before it; without output it shows its last expression. See ToolResult.

        No cell gets higher limits on memory, processes and files than the first one had; cpu_s does not end a cell. A
        cell whose task is cancelled is ended; its effects are undone at the next cell.
        """
        limits = wire.check_limits(limits, self._limits)
        cell = wire.Cell(wire.encode_code(code), wire.encode_stdin(stdin), limits)
        self._check_open()
        clock = asyncio.get_running_loop().time
        since = clock()
        async with self._turn:
            result = await self._run(cell)
        self._stats.outcomes[result.outcome] += 1
        self._stats.sessions_restored += result.session_state == "restored"
        self._stats.sessions_lost += result.session_state == "lost"
        return msgspec.structs.replace(result, queue_s=max(0.0, clock() - since - result.wall_s))

    async def _run(self, cell: wire.Cell) -> wire.ToolResult:
        if self._built:
            result = await self._attempt(cell, history=None)
            if result.outcome != "lost":
                return await self._settle(cell, result, rebuilt=False)
        rebuilt = self._log.number > 0
        result = await self._build(cell)
        return await self._settle(cell, result, rebuilt=rebuilt)

    async def _attempt(self, cell: wire.Cell, *, history: list[wire.Cell] | None) -> wire.ToolResult:
        self._check_open()  # it may have ended while this cell waited
        self._built = True
        backup = self._log.backup and bool(cell.code)
        result = await self._send(cell, wire.SessionStep(self._id, self._log.number, history, backup))
        self._check_open()
        return result

    async def _build(self, cell: wire.Cell) -> wire.ToolResult:
        """Runs the cell on a rebuilt state; the result is "lost" if the state cannot be rebuilt."""
        history = self._log.history
        result = wire.ToolResult(outcome="lost")
        for _ in range(REBUILDS if history is not None else 0):
            result = await self._attempt(cell, history=history)
            if result.outcome != "lost":
                break
        return result

    async def _settle(self, cell: wire.Cell, result: wire.ToolResult, *, rebuilt: bool) -> wire.ToolResult:
        """Logs the cell's result, rebuilds the state if it is gone, and returns the result with the session's state."""
        state: wire.SessionState = "kept"
        if result.outcome == "lost":
            state = "lost"
        elif result.session_state == "kept":
            self._log.add(cell, result.outcome, result.cpu_s)
            state = "restored" if rebuilt else "kept"
        elif result.session_state == "restored":
            state = "restored"  # the host returned to its snapshot
        elif self._log.number == 0:
            self._built, state = False, "restored"  # it is empty again, as before this cell
        else:
            nothing = wire.Cell(b"", b"", cell.limits)
            rebuild = await self._build(nothing)
            state = "restored" if rebuild.session_state == "kept" else "lost"
            self._log.add(nothing, "ok", 0.0)  # the host counts every cell that it kept
        if state == "lost":
            self._log, self._built = CellLog(), False
        return msgspec.structs.replace(result, session_state=state)

    def _check_open(self) -> None:
        if not self._open:
            raise SandboxUnavailable("the session is not open. Fix: use `async with box.session() as session`")
