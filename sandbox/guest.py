"""The last step before guest code, and guest code itself: runs in the forked child of one call. Standard library only.

Invariants
- Before the first guest instruction: descriptors are exactly {0, 1, 2}, no capability is left, own uid, rlimits set,
  second seccomp filter on.
- Only this process reads the code and the stdin of a call; slot and zygote never do.
- Guest code behaves as `python main.py` would: `__main__`, traceback, exit code, flushing, atexit, threads.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import linecache
import math
import os
import resource
import signal
import struct
import sys
import threading
import traceback
from types import CodeType, ModuleType
from typing import NamedTuple, NoReturn

from . import linux

HOME = "/tmp"
FILENAME = "main.py"
# ends a child whose MemoryError nobody caught: a wait status of its own, apart from exit code 1
OUT_OF_MEMORY = signal.SIGRTMAX
FIRST_UID = 1000
REFUSED = {  # what the outer policy must leave to the slots, by name: (x86_64, aarch64)
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "memfd_create": (319, 279),  # memory that no rlimit of the call counts
    "pidfd_send_signal": (424, 424),
}
REHEARSAL = (
    b"import math\nfor i in range(3):\n    print(i, f'{math.sqrt(i):.2f}', [i])",
    b"def f(x):\n    return 1 / x\nf(0)",
    b"x = = 1",
)


class Request(NamedTuple):
    """What a slot is told about a call: its limits, in the order of wire.Limits, and the sizes of what its one
    descriptor holds: stdin, then the code.
    """

    wall_s: float
    cpu_s: float
    memory_bytes: int
    output_bytes: int
    processes: int
    disk_bytes: int
    stdin_bytes: int
    code_bytes: int


REQUEST = struct.Struct("ddqqqqqq")


def file_bytes(disk_bytes: int, output_bytes: int) -> int:
    """RLIMIT_FSIZE of a call: one limit for what it writes to a file and to stdout or stderr."""
    return max(disk_bytes, output_bytes)


def make_filter() -> linux.Filter:
    column = 0 if os.uname().machine == "x86_64" else 1
    refused = {numbers[column]: errno.EPERM for numbers in REFUSED.values()}
    # with EPERM instead, glibc would not fall back to clone
    return linux.Filter({**refused, linux.NR_CLONE3: errno.ENOSYS})


def start(request: Request, uid: int | None, source: int, out: int, err: int, second: linux.Filter) -> NoReturn:
    """Become the guest. `source` holds stdin and code; `uid` None keeps the only id that is mapped."""
    code = os.pread(source, request.code_bytes, request.stdin_bytes)
    os.ftruncate(source, request.stdin_bytes)
    for fd, standard in ((source, 0), (out, 1), (err, 2)):
        os.dup2(fd, standard)
    linux.close_from(3)
    cpu, file = math.ceil(request.cpu_s), file_bytes(request.disk_bytes, request.output_bytes)
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),  # SIGXCPU first; SIGKILL for code that ignores it
        (resource.RLIMIT_AS, request.memory_bytes, request.memory_bytes),
        (resource.RLIMIT_FSIZE, file, file),
        (resource.RLIMIT_NPROC, request.processes, request.processes),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 65536, 65536),
    ):
        resource.setrlimit(kind, (soft, hard))
    if uid is not None:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    linux.drop_capabilities()
    os.chdir(HOME)
    second.install()
    for name in ("random", "numpy.random"):
        if (module := sys.modules.get(name)) is not None:
            module.seed()
    run(code)


def run(code: bytes) -> NoReturn:
    """Run `code` as the main program and end the process as the interpreter would."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={}, __file__=FILENAME)
    sys.modules["__main__"] = main
    sys.argv[:] = [FILENAME]
    linecache.cache[FILENAME] = (lambda: code.decode(errors="replace"),)
    status: int | None = 0
    try:
        exec(compile_main(code), main.__dict__)
    except BaseException as error:
        status = finish(error)
    _end(status)


def compile_main(code: bytes) -> CodeType:
    return compile(code, FILENAME, "exec", dont_inherit=True)


def finish(error: BaseException) -> int | None:
    """Report what ended the main program; the exit code, or None for an uncaught MemoryError."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # our own frames
    try:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(type(error), error.with_traceback(trace), trace)
        else:
            sys.excepthook(type(error), error, trace)
    except BaseException as second:
        error = second if isinstance(second, MemoryError) else error
    if isinstance(error, MemoryError):
        return None
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _end(status: int | None) -> NoReturn:
    """What a program can notice of the interpreter's exit: joined threads, atexit, flushing (120 when it fails)."""
    try:
        if threading.active_count() > 1:
            getattr(threading, "_shutdown")()  # noqa: B009 - private, but it is what the interpreter calls
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:
            status = 120 if status == 0 else status
    if status is None:
        os.kill(os.getpid(), OUT_OF_MEMORY)
        signal.pause()
    os._exit(status or 0)


def rehearse() -> None:
    """Run every path of a call once in the zygote: what is built here is shared by all calls, not built in each."""
    with open(os.devnull, "r+") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        for code in REHEARSAL:
            try:
                exec(compile_main(code), {"__name__": "__rehearsal__"})
            except Exception as error:
                finish(error)
        os.pread(null.fileno(), 1, 0)
    linux.close_from(1 << 30)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK):
        resource.setrlimit(kind, resource.getrlimit(kind))
    os.chdir(os.getcwd())
    threading.active_count()
    linecache.clearcache()
    gc.collect()
