"""Runs a program of a workspace, or hidden tests against one. It runs in the jail; standard library only.

Invariants
- What the workspace holds is executed in processes of its own. This process, the first of the call's PID namespace,
  never imports or evaluates any of it, so that its exit code and what it prints are no program's to forge.
- Tests are read from standard input after the process that starts programs was forked. They are on no disk, and in the
  memory of no process that runs the workspace's code.
- What a program, or a function that a test calls, answers is bytes or a literal: no object of the workspace gets here.
- Before files are read back, every process that a program has left is dead.

`sandbox.run(source + "\\nrun()", request)` and `... + "\\ngrade()"`. A request is a line of JSON, then the contents of
its files, bytes as Latin-1 characters; so is the answer of `run`.
"""

import atexit
import contextlib
import io
import json
import os
import random
import select
import signal
import stat
import sys
import threading
import traceback
import types

ROOT = "/tmp/workspace"
DEEPEST = 32  # folders below one another


# Both commands


def read_request():
    """Returns the request of standard input, after which nobody else can read it, and makes the workspace."""
    with open(0, "rb", closefd=False) as stdin:
        head, _, body = stdin.read().decode("utf-8", "surrogatepass").partition("\n")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    request = json.loads(head)
    os.mkdir(ROOT)
    at = 0
    for path, size in request["files"]:
        place = f"{ROOT}/{path}"
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(body[at : at + size].encode("latin-1"))
        at += size
    return request


def take_stdout():
    """Returns a copy of standard output that no child inherits; what else is printed goes nowhere."""
    out = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)
    return out


def start(job, stdin, output_bytes, wall_s):
    """Runs `job` in a process of its own and returns (wait status, None after the deadline; stdout; stderr)."""
    streams = [os.open(f"/tmp/.{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) for name in "iou"]
    for name in "iou":
        os.unlink(f"/tmp/.{name}")
    os.write(streams[0], stdin)
    os.lseek(streams[0], 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(3, 256)
            os.chdir(ROOT)
            random.seed(os.urandom(16))  # a fork seeds it anew; os.urandom follows from the call's seed
            os._exit(status_of(job))
        os._exit(1)
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    in_time = bool(poll.poll(wall_s * 1000))
    os.close(ended)
    status = kill_all(child)
    texts = [os.pread(stream, output_bytes, 0) for stream in streams[1:]]
    for stream in streams:
        os.close(stream)
    return status if in_time else None, *texts


def kill_all(child):
    """Kills the child and all that it has left; returns the child's wait status."""
    own_namespace = 1 in (os.getpid(), os.getppid())  # without one these would be processes of the machine
    with contextlib.suppress(ProcessLookupError):
        while own_namespace:
            os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    pid, status = os.waitpid(-1, 0)
                    if pid == child:
                        return status | reap()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def reap():
    """Waits for all other children; returns 0."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        while True:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
    return 0


def status_of(job):
    """Runs the job as the main program and returns its exit code."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "replace")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace")
    sys.__dict__.update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    status = 0
    try:
        job()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals is globals():
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: it waits for threads
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    return status & 0xFF


def program(path, arguments):
    """Returns a job: the file as the main program or, if it is named test_*.py, its tests."""

    def job():
        place = os.path.join(ROOT, path)
        sys.argv[:] = [path, *arguments]
        sys.path[:0] = [os.path.dirname(place), ROOT]
        main = types.ModuleType("__main__")
        main.__file__ = place
        sys.modules["__main__"] = main
        with open(place, "rb") as file:
            code = compile(file.read(), place, "exec", dont_inherit=True)
        exec(code, main.__dict__)
        if os.path.basename(path).startswith("test_"):
            sys.exit(own_tests(main.__dict__))

    return job


def own_tests(namespace):
    """Runs the test functions of the model's own file, prints what became of each, and returns an exit code."""
    failed = 0
    tests = [(name, test) for name, test in namespace.items() if name.startswith("test") and callable(test)]
    for name, test in tests:
        try:
            test()
        except Exception as error:
            failed += 1
            traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
            print(f"FAILED {name}")
        else:
            print(f"passed {name}")
    print(f"{len(tests) - failed} of {len(tests)} tests passed")
    return int(failed > 0 or not tests)


# A tool call


def run():
    """Runs a program of the workspace and answers with how it ended, its output, and the files afterwards."""
    out, request = take_stdout(), read_request()
    root = os.open(ROOT, os.O_DIRECTORY)
    job = program(request["path"], request["arguments"])
    status, stdout, stderr = start(job, request["stdin"].encode(), request["output_bytes"], request["wall_s"])
    files, contents, problem = [], [], None
    try:
        for path, content in regular_files(root, request["most_files"], request["most_bytes"]):
            files.append((path, len(content)))
            contents.append(content)
    except (OSError, ValueError) as error:
        files, contents, problem = [], [], str(error)
    answer = {"files": files, "problem": problem, "status": status}
    answer |= {"stdout": stdout.decode("utf-8", "replace"), "stderr": stderr.decode("utf-8", "replace")}
    write_all(out, json.dumps(answer).encode() + b"\n" + b"".join(contents).decode("latin-1").encode())
    os._exit(0)


def regular_files(root, most_files, most_bytes):
    """Yields (path, content) of the regular files below a folder. Follows no link; leaves out all other kinds.

    Raises ValueError if there are more files or bytes than the workspace may have.
    """
    count = total = 0
    folders = [("", os.dup(root), 0)]
    seen = 0
    while folders:
        prefix, folder, depth = folders.pop()
        os.fchmod(folder, 0o700)
        for entry in sorted(os.listdir(folder)):
            seen += 1
            if seen > 8 * most_files:
                raise ValueError(f"the workspace has more than {most_files} files")
            path = prefix + entry
            kind = os.stat(entry, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(kind.st_mode):
                if depth >= DEEPEST:
                    raise ValueError(f"{path[:80]}... lies in more than {DEEPEST} folders")
                os.chmod(entry, 0o700, dir_fd=folder)
                opened = os.open(entry, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                folders.append((f"{path}/", opened, depth + 1))
            elif stat.S_ISREG(kind.st_mode):
                count, total = count + 1, total + kind.st_size
                if count > most_files:
                    raise ValueError(f"the workspace has more than {most_files} files")
                if total > most_bytes:
                    raise ValueError(f"the workspace has more than {most_bytes} bytes")
                os.chmod(entry, 0o600, dir_fd=folder)
                with open(os.open(entry, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
                    content = file.read(kind.st_size)
                yield path, content
        os.close(folder)


def write_all(out, data):
    while data:
        data = data[os.write(out, data) :]
