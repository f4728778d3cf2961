"""A process like the zygote of a tier that forks or executes on request: the floors below every sandboxed call.

It is made by the sandbox's own code: imports, rehearsal and, where the C part was built, the memory snapshot. It holds
little beyond that, since each fork pays for it. Its first line says whether the snapshot was taken.

    request, one line on stdin      answer, one line on stdout
    fork CALLS SECONDS              CALLS CPU_S WALL_S      fork as a slot does, os._exit() in the child, nothing else
    os.fork CALLS SECONDS           the same                the same with the at-fork hooks of Python
    program CALLS SECONDS SOURCE    the same                fork and run SOURCE (repr of a str) as a call does, without
                                                            namespaces, limits, filters or a file system of its own
    exec CALLS SECONDS SOURCE       the same                compile and run SOURCE in this process

It stops at CALLS or after SECONDS, whichever comes first.
"""

import ast
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import ModuleType

SANDBOX = Path(__file__).resolve().parents[3] / "sandbox"
FORK: Callable[[], int]  # set by `prepare`, as the next one
MAIN_PROGRAM: Callable[..., None]


def fork(how: Callable[[], int]) -> None:
    child = how()
    if child == 0:
        os._exit(0)
    os.wait4(child, 0)


def program(source: str) -> None:
    """Runs one call, in all but its jail."""
    code = source.encode()
    files = [os.memfd_create(name) for name in ("source", "stdout", "stderr")]
    os.pwrite(files[0], code, 0)

    child = FORK()
    if child == 0:
        for standard, fd in enumerate(files):
            os.dup2(fd, standard)
        MAIN_PROGRAM(0, len(code), -1, None)
    os.wait4(child, 0)
    for fd in files:
        os.close(fd)


def execute(source: str) -> None:
    exec(compile(source, "main.py", "exec"), {"__name__": "program"})


def cpu_s() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def prepare(modules: list[str]) -> bool:
    """Makes this process the image of a tier. Returns whether with a memory snapshot."""
    global FORK, MAIN_PROGRAM
    package = ModuleType("sandbox")  # without its __init__, which would bring asyncio and ZeroMQ into the image
    package.__path__ = [str(SANDBOX)]
    sys.modules["sandbox"] = package
    from sandbox.inside import guest, linux, native, zygote

    FORK, MAIN_PROGRAM = linux.fork, guest.main_program
    library = native.load()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    zygote.prepare(modules, proc, library)
    zygote.freeze(proc, library)
    return library is not None


def serve() -> None:
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), open(os.devnull, "w")  # noqa: SIM115
    requests = os.fdopen(os.dup(0))
    snapshot = prepare(sys.argv[1:])
    print("snapshot" if snapshot else "plain", file=answers, flush=True)
    for line in requests:
        what, calls, seconds, *source = line.split(" ", 3)
        works: dict[str, Callable[..., None]] = {
            "fork": lambda: fork(FORK),
            "os.fork": lambda: fork(os.fork),
            "program": program,
            "exec": execute,
        }
        work = works[what]
        arguments = [ast.literal_eval(code) for code in source]
        done, started, cpu = 0, monotonic(), cpu_s()
        while done < int(calls) and monotonic() - started < float(seconds):
            work(*arguments)
            done += 1
        print(done, cpu_s() - cpu, monotonic() - started, file=answers, flush=True)
