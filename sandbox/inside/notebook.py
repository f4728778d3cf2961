"""A session inside the jail: an interpreter that runs one cell after the other, and its init. Standard library only.

Invariants
- The init is PID 1 of the session's namespace and parent of the interpreter; when it ends, the kernel ends all.
- Between cells every process of a session is stopped (SIGSTOP), so an idle session uses no CPU and changes nothing. No
  guest code can wake what is stopped: its filter refuses every way to send SIGCONT. One way remains, the end of a
  process whose group is thereby orphaned; against it all are stopped again, ever less often.
- When a session goes back to its copy, everything else that ran in it is killed.
- That a cell timed out or died, how long it took and what it used comes from the kernel. Only the "ok" or "error" of a
  cell that ended by itself is the claim of the session's interpreter, as an exit code is the claim of a program.
- The interpreter's descriptors are {0, 1, 2}: code goes in and the display comes out through shared memory.
- Each cell has a sys.stdout and sys.stderr that show what it prints, whatever an earlier one did to them. A cell may
  await at its top level; tasks that it leaves continue when a later one awaits.

Control messages: host -> init: `CELL` with one descriptor (stdin, then the code), or one byte (cancel). init -> host:
READY, then for each cell ENDED at its limit or when cancelled, and a `CellReport` with the descriptors of stdout,
stderr and the board.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import linecache
import mmap
import os
import select
import signal
import socket
import sys
import time
from enum import IntEnum
from struct import Struct
from types import CodeType, ModuleType
from typing import Any, NamedTuple, NoReturn, TextIO

from sandbox.inside import guest, linux, main_program
from sandbox.inside.slot import ENDED, LONGEST_MS, READY, EndedBy, enter_namespaces, mount_home

COPY_STATE = Struct("q")  # whether to keep a copy of the state from before the cell
CELL = Struct(guest.REQUEST.format + COPY_STATE.format)  # a SlotRequest, and COPY_STATE
HEADER = Struct("qqqq")  # init -> interpreter: serial number of the cell, bytes of code, bytes of stdin, copy
DONE = Struct("qq")  # interpreter -> init: serial number of the cell that ended, its exit code
DONE_AT, DISPLAY_AT, CODE_AT = 64, 4096, 1 << 20
MAX_CODE_BYTES = 8 << 20
STOP_AGAIN_S = 0.05  # doubled up to AT_LAST_S
AT_LAST_S = 60.0
INTERRUPT_S = 0.25  # between the interrupt at the wall limit and the kill
START_S = 5.0
CO_COROUTINE = 0x80  # inspect's constant; not every tier has that module
FEW, PIDS = 1 << 15, 1 << 22  # numbers of processes: all that most sessions use, and all that Linux has


class State(IntEnum):
    """The state of a session after a cell."""

    GONE = 0
    LIVE = 1
    FROM_COPY = 2  # the copy from before the cell


class CellReport(NamedTuple):
    """The report of a cell.

    ended: an EndedBy. status: a wait status if died, else an exit code (-1: out of memory). state: a State.
    """

    ended: int
    status: int
    wall_s: float
    cpu_s: float
    died: int
    state: int


CELL_REPORT = Struct("qqddqq")


class SessionInit:
    def __init__(self, control: socket.socket, identity: guest.Identity) -> None:
        self._control = control
        self._identity = identity
        self._child = self._backup = self._serial = self._newest = 0
        # Whether the copy is still to be made; the board is not asked, since guest code can write to it.
        self._copy = False
        self._status: int | None = None  # wait status of an interpreter that ended
        self._stopped = False

    def serve(self) -> None:
        """Becomes PID 1 of a namespace and runs cells until the host closes the control socket or the state is gone."""
        enter_namespaces()
        linux.unshare(linux.CLONE_NEWPID)
        if os.fork():
            return
        os.setsid()
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # PID 1 never sees it
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._control.send(READY)
        state = State.LIVE
        while state != State.GONE:
            self._keep_still()
            message, descriptors, _, _ = socket.recv_fds(self._control, CELL.size, 1)
            if not message:
                return
            if descriptors:
                *request, copy = CELL.unpack(message)
                state = self._cell(guest.SlotRequest(*request), bool(copy), descriptors[0])
                os.close(descriptors[0])

    def _keep_still(self) -> None:
        """Waits for the next message."""
        poll, seconds = select.poll(), STOP_AGAIN_S
        poll.register(self._control, select.POLLIN)
        while not poll.poll(seconds * 1000):
            seconds = min(2 * seconds, AT_LAST_S)
            _stop_all()

    def _start(self, request: guest.SlotRequest) -> None:
        """Starts the interpreter and waits until it is idle."""
        mount_home(self._identity.uid, request.disk_bytes)
        self._files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
        board = os.memfd_create("board")
        os.ftruncate(board, CODE_AT + MAX_CODE_BYTES)
        self._board, self._board_fd = mmap.mmap(board, 0), board
        self._child = os.fork()
        if self._child == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # Each cell has a wall limit; the sum of CPU is not limited
                request = request._replace(cpu_s=float("inf"))
                guest.drop_privileges(request, self._identity, *self._files)
                interpret(linux.address_of(self._board), request.seed)
            except MemoryError:
                main_program.die(main_program.OUT_OF_MEMORY)
            finally:
                os._exit(255)
        for fd in self._files[1:]:
            linux.set_append(fd)
        if self._wait(START_S) != EndedBy.ITSELF or self._status is not None:
            sys.exit("the session's interpreter did not start")

    def _cell(self, request: guest.SlotRequest, copy: bool, source: int) -> State:
        if not self._child:
            self._start(request)
        self._serial += 1
        self._copy = copy
        self._lay_out(request, copy, source)
        cpu = _cpu_s(self._child)
        started = time.monotonic()
        self._stopped = False
        os.kill(-1, signal.SIGCONT)
        ended = self._wait(request.wall_s)
        if ended != EndedBy.ITSELF and self._status is None:
            self._control.send(ENDED)
            # Raises an exception in the cell; the state lives if the cell lets it pass
            os.kill(self._child, signal.SIGINT)
            os.kill(self._child, signal.SIGCONT)
            if self._wait(INTERRUPT_S, final=True) != EndedBy.ITSELF:
                os.kill(self._child, main_program.LAST_WORDS)
                if self._wait(main_program.LAST_WORDS_S, final=True) != EndedBy.ITSELF:
                    os.kill(self._child, signal.SIGKILL)
                    self._wait(START_S, final=True)
        cpu = _cpu_s(self._child) - cpu if self._status is None else 0.0
        wall = time.monotonic() - started
        return self._report(ended, wall, cpu)

    def _report(self, ended: EndedBy, wall: float, cpu: float) -> State:
        """Leaves nothing running, settles on a state, and reports it."""
        _stop_all()
        died, state = self._status, State.LIVE
        status = max(-1, min(DONE.unpack_from(self._board, DONE_AT)[1], 255))
        if died is not None:
            status = died
            copy_made = self._backup and not self._copy
            state = State.FROM_COPY if copy_made and self._alone(self._backup) else State.GONE
            self._child = self._backup
            self._status = None
        elif self._backup:
            os.kill(self._backup, signal.SIGKILL)
        self._backup = 0
        report = CellReport(ended, status, wall, cpu, died is not None, state)
        socket.send_fds(self._control, [CELL_REPORT.pack(*report)], [*self._files[1:], self._board_fd])
        return state

    def _lay_out(self, request: guest.SlotRequest, copy: bool, source: int) -> None:
        code = os.pread(source, request.code_bytes, request.stdin_bytes)
        stdin, stdout, stderr = self._files
        for fd in (stdin, stdout, stderr):
            os.ftruncate(fd, 0)
        os.pwrite(stdin, os.pread(source, request.stdin_bytes, 0), 0)
        os.lseek(stdin, 0, os.SEEK_SET)
        HEADER.pack_into(self._board, 0, self._serial, len(code), request.stdin_bytes, copy)
        guest.LENGTH.pack_into(self._board, DISPLAY_AT, -1)
        self._board[CODE_AT : CODE_AT + len(code)] = code

    def _wait(self, wall_s: float, *, final: bool = False) -> EndedBy:
        """Waits for the end of the cell or the interpreter (ITSELF), the limit, or a cancellation or the host's end."""
        until = time.monotonic() + wall_s
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if not final:
            poll.register(self._control, select.POLLIN)
        while True:
            self._collect()
            if self._status is not None:
                return EndedBy.ITSELF
            if self._stopped and DONE.unpack_from(self._board, DONE_AT)[0] == self._serial:
                return EndedBy.ITSELF
            if self._stopped and self._copy and self._backup:  # both are stopped: from here on nothing else is the copy
                self._copy = self._stopped = False
                os.kill(self._child, signal.SIGCONT)
            ready = {fd for fd, _ in poll.poll(min(max(0.0, until - time.monotonic()) * 1000, LONGEST_MS))}
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
            elif ready:
                return EndedBy.CANCELLED
            elif time.monotonic() >= until:
                return EndedBy.WALL_LIMIT

    def _collect(self) -> None:
        """Notes every child that stopped or ended; guest code may have made children of ours."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | linux.WALL)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                self._stopped = os.WIFSTOPPED(status)
                self._status = None if self._stopped else status
            elif pid == self._backup:
                self._backup = pid if os.WIFSTOPPED(status) else 0
            elif os.WIFSTOPPED(status) and not self._backup and self._copy:
                self._backup = pid
                self._given(pid)

    def _given(self, pid: int) -> bool:
        """Notes a number just given; returns whether numbers have only ascended, so that none above it is in use."""
        self._newest = pid if pid > self._newest else PIDS
        return self._newest < PIDS

    def _alone(self, kept: int) -> bool:
        """Kills every process of the session but one, all being stopped; returns whether none can have been missed."""
        _kill(range(2, FEW), kept)  # first of all, since a further process may need their memory
        try:
            ascending = self._given(os.fork() or os._exit(0))
        except OSError:
            return False
        _kill(range(FEW, self._newest if ascending else FEW), kept)
        return ascending


def _stop_all() -> None:
    with contextlib.suppress(ProcessLookupError):  # none is left
        os.kill(-1, signal.SIGSTOP)


def _kill(pids: range, kept: int) -> None:
    for pid in pids:
        if pid != kept:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _cpu_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)  # the kernel's clock of a process's CPU time


def interpret(address: int, seed: int) -> NoReturn:
    """Runs the cells that the init lays out, and is stopped in between. address: that of the board."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    sys.argv[:] = [""]
    guest.seed_random(seed)
    done, board, loop = 0, guest.Board(address + DISPLAY_AT, CODE_AT - DISPLAY_AT), EventLoop()
    stdin, reopen, outputs = sys.stdin, open, Outputs()
    while True:
        try:
            os.kill(os.getpid(), signal.SIGSTOP)
            serial, code_bytes, stdin_bytes, copy = HEADER.unpack(ctypes.string_at(address, HEADER.size))
            if serial == done:
                continue
            done = serial
            if copy and _copy_made():
                continue
            if stdin_bytes or sys.stdin is stdin:  # a new one, since the last one may hold what its cell did not read
                sys.stdin = stdin = None  # as in Python if the descriptor was closed: open(0).read() does that
                with contextlib.suppress(OSError):
                    sys.stdin = stdin = reopen(0, encoding="utf-8", closefd=False)
            outputs.heal()
            code = ctypes.string_at(address + CODE_AT, code_bytes)
            status = _run(code, f"<cell {serial}>", main, board, loop)
            outputs.flush()
            ctypes.memmove(address + DONE_AT, DONE.pack(serial, status), DONE.size)
        except KeyboardInterrupt:  # it came late, between a cell and its stop
            ctypes.memmove(address + DONE_AT, DONE.pack(done, 1), DONE.size)


class Outputs:
    """The sys.stdout and sys.stderr of all cells."""

    def __init__(self) -> None:
        self._streams: dict[str, TextIO] = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._open = open  # guest code may replace the name

    def heal(self) -> None:
        """Restores them if a cell has put others in their place, and makes new ones for closed ones."""
        for name, stream in self._streams.items():
            if _closed(stream):
                # If the cell has closed the descriptor too there is none, as in any Python.
                with contextlib.suppress(OSError):
                    self._streams[name] = stream = self._new(name)
                    setattr(sys, f"__{name}__", stream)
            setattr(sys, name, stream)

    def flush(self) -> None:
        """Writes out what was printed before a cell put another stream in the place of one."""
        for stream in self._streams.values():
            with contextlib.suppress(Exception):
                stream.flush()

    def _new(self, name: str) -> TextIO:
        if name == "stdout":
            return self._open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
        return self._open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _closed(stream: TextIO) -> bool:
    try:
        return stream.closed
    except ValueError:  # its buffer was detached
        return True


class EventLoop:
    """Runs the code of cells. The first cell that awaits makes the loop."""

    def __init__(self) -> None:
        self._loop: Any = None

    def evaluate(self, code: CodeType, namespace: dict[str, object]) -> object:
        value: Any = eval(code, namespace)
        return self._run(value) if code.co_flags & CO_COROUTINE else value

    def _run(self, coroutine: Any) -> object:
        import asyncio  # not above: few cells need it, and the smallest tier does not have it

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)  # again in each cell, since asyncio.run leaves none
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except BaseException as error:
            if not task.done():  # an interrupt while it waited: it must not continue in a later cell
                task.cancel()
                try:
                    self._loop.run_until_complete(task)
                except asyncio.CancelledError as end:
                    error.__traceback__ = end.__traceback__  # it shows where in the cell it waited
            elif not task.cancelled():
                task.exception()  # marks it as retrieved, or asyncio would log it
            main_program.strip(error, os.path.dirname(asyncio.__file__))
            raise


def _copy_made() -> bool:
    """Copies this process, for the init to go back to; returns whether this is the copy.

    Without memory or a process to spare there is none.
    """
    try:
        pid = linux.fork_sibling()
    except OSError:
        return False
    if pid:
        os.kill(os.getpid(), signal.SIGSTOP)  # until the copy has stopped
    return pid == 0


def _run(code: bytes, name: str, main: ModuleType, board: guest.Board, loop: EventLoop) -> int:
    # Whole lines: for a name in angle brackets linecache would not ask for them later.
    linecache.cache[name] = len(code), None, code.decode(errors="replace").splitlines(keepends=True), name
    main_program.note_process()
    status: int | None = 0
    try:
        main_program.execute(
            main_program.without_cookie(code),
            name,
            main.__dict__,
            board.show,
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            evaluate=loop.evaluate,
        )
    except BaseException as error:
        status = None
        with contextlib.suppress(MemoryError):
            status = main_program.finish(error)
    for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            status = status or 120
    return -1 if status is None else abs(status)
