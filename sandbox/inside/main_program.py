"""Runs guest code as `python main.py` would, in the process that guest.py has made ready. Standard library only.

Invariants
- The program finds `__main__`, tracebacks, exit codes, flushing, atexit and threads as the interpreter gives them.
- `show` is called at most once, with the repr of the value of the last expression (as IPython shows it).
- A program that failed never ends as one that succeeded, whatever interrupts its ending (no memory, a signal handler).
- At a time limit the interpreter flushes what the program has printed (`last_words`). Output is lost only if the
  interpreter is inside one call into C, or if the program handles these signals itself.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal.signal makes objects
import ast
import atexit
import contextlib
import ctypes
import gc
import linecache
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

HOME = "/tmp"
FILENAME = f"{HOME}/main.py"  # absolute, as the interpreter makes it
OURS = os.path.dirname(__file__)
# The signal that ends a child whose MemoryError nobody caught: a wait status of its own, distinct from exit code 1.
OUT_OF_MEMORY, DEFAULT = int(signal.SIGRTMAX), int(signal.SIG_DFL)
LAST_WORDS = OUT_OF_MEMORY - 1  # the signal that a slot sends at the wall limit, LAST_WORDS_S before it kills
LAST_WORDS_S = 0.05
# Computed here, since there may be no memory for a number later
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
Show = Callable[[str], None] | None
DISPLAY = sys.__excepthook__  # prints as the interpreter does, whatever guest code makes of the names in sys
FOPEN, FFLUSH = ctypes.CDLL(None)["fopen"], ctypes.CDLL(None)["fflush"]
FOPEN.restype, FOPEN.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_char_p)
RUN_FILE = ctypes.pythonapi["PyRun_FileEx"]
RUN_FILE.restype = ctypes.py_object
RUN_FILE.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, *(ctypes.py_object,) * 2, ctypes.c_int)
FILE_INPUT = 257  # Py_file_input
# Code with one of these finds main.py on its disk. For other code a file would only cost time.
NEED_FILE = re.compile(
    rb"__file__|__loader__|main\.py|sys\.argv|listdir|scandir|glob|iterdir|spawn|hread|__del__|atexit|yield|coding|ctypes|"
    rb"import main|def flush|walk\(|system\(|subprocess|popen|co_filename|weakref|async|fork|\f|\xe2\x80\xa8|\xc2\x85|"
    rb"/dev/stdin"
)
# Code with one of these may compile differently from a file: a surrogate, a cookie.
ODD = re.compile(rb"\xed|coding")
# A coding declaration (PEP 263) of another encoding than UTF-8, in the first line, or the second after a comment.
COOKIE = re.compile(
    rb"(?:\xef\xbb\xbf)?(?:[ \t\f]*(?:#[^\r\n]*)?(?:\r\n|\r|\n))?"
    rb"[ \t\f]*#[^\r\n]*?coding(?P<sign>[:=])[ \t]*(?!(?i:utf[-_]?8)\b)[-\w.]"
)
# Only code with one of these can show something while its objects die; a search for garbage costs 100 page faults.
FINALISERS = re.compile(rb"__del__|yield|weakref|async|fdopen|open\(1|Wrapper|def close|tqdm|always")
SPECIAL = re.compile(b"|".join(pattern.pattern for pattern in (NEED_FILE, ODD, FINALISERS)))


def _as_one_line(tree: ast.Module) -> ast.Module:
    """Returns the same program, all of it in line 1."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.arg | ast.keyword):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0
    return tree


with open(os.path.join(OURS, "finalise.py"), encoding="utf-8") as _file:
    LAST = compile(_as_one_line(ast.parse(_file.read())), "sys", "exec", dont_inherit=True)
_source = [b""]  # the code that runs, for linecache
_process = [0]  # the process that runs it; the processes that it forks hold copies of what it has printed


def make_ready() -> ModuleType:
    """Makes the module `__main__` and all else that a program finds; the zygote does it, to spare the calls."""
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __file__=FILENAME, __cached__=None)
    main.__loader__ = SourceFileLoader("__main__", FILENAME)
    sys.modules["__main__"] = main
    sys.argv[:] = ["main.py"]
    linecache.cache[FILENAME] = (lambda: _source[0].decode(errors="replace"),)
    return main


def run(code: bytes, show: Show, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Runs `code` as the main program and ends the process as the interpreter would: by `leave`, or by a signal.

    leave: is called with the exit code.
    """
    _source[0] = code
    note_process()
    special = SPECIAL.search(code) is not None
    if special:
        code = without_cookie(code)
    finalise = special and FINALISERS.search(code) is not None
    if special and NEED_FILE.search(code):
        write_main(code)
    if finalise:
        make_ready()  # the one from the zygote is frozen: no garbage collection would see what only it holds
    namespace = sys.modules["__main__"].__dict__
    ended = None
    try:
        if show is None:
            exec_main(code, namespace, odd=special and ODD.search(code) is not None)
        else:
            execute(code, FILENAME, namespace, show)
    except BaseException as error:
        ended = error
    status: int | None = 0
    try:
        if ended is not None:  # handled here, where no exception is the context of a second one
            status = 1
            write_main(code)
            status = finish(ended)
        del namespace, ended  # their contents must die in _end
        status = _end(status, special and b"ctypes" in code, finalise=finalise)
    except MemoryError:
        status = None
    except BaseException:  # a signal handler may raise it; none can interrupt the interpreter's own ending, which is C
        signal.pthread_sigmask(signal.SIG_BLOCK, range(signal.SIGQUIT, OUT_OF_MEMORY))  # not those of `die`
        _flush()
    if status is None or status < 0:
        die(OUT_OF_MEMORY if status is None else -status)
    leave(status)


def note_process() -> None:
    """Notes that from here on this process's output is what `last_words` writes."""
    _process[0] = os.getpid()


def last_words(number: int, frame: object) -> NoReturn:
    """Handles LAST_WORDS and SIGXCPU: writes out what was printed, then dies by that signal as without a handler."""
    if os.getpid() == _process[0]:
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            with contextlib.suppress(BaseException):
                getattr(sys, name).flush()
        FFLUSH(None)
    die(number)


def without_cookie(code: bytes) -> bytes:
    """Returns the same program without a coding declaration, since code comes as text, which we encode.

    No byte moves: the colon of `coding: latin-1` becomes a semicolon.
    """
    while (cookie := COOKIE.match(code)) is not None:
        at = cookie.start("sign")
        code = code[:at] + b";" + code[at + 1 :]
    return code


def die(number: int) -> NoReturn:
    """Ends this process by a signal, without allocating memory, since there may be none."""
    _signal.signal(number, DEFAULT)
    os.kill(os.getpid(), number)
    signal.pause()
    os._exit(255)


def write_main(code: bytes) -> None:
    """Writes main.py where `python main.py` would have it (tracebacks made in C read it), and what /dev/stdin is."""
    with contextlib.suppress(OSError):
        fd = os.open(FILENAME, CREATE, 0o644)
        os.write(fd, code)
        os.close(fd)
        if b"/dev/stdin" in code:  # it is this copy: all of stdin, or none
            fd, size = os.open(".stdin", CREATE, 0o600), os.fstat(0).st_size
            if os.sendfile(fd, 0, 0, size) < size:
                os.unlink(".stdin")
            os.close(fd)


def exec_main(code: bytes, namespace: dict[str, object], *, odd: bool) -> None:
    """Compiles and runs code; as a file if text and file differ, for odd bytes and syntax errors."""
    if not odd:
        try:
            program = compile_main(code)
        except (SyntaxError, ValueError):
            pass
        else:
            exec(program, namespace)
            return
    write_main(code)
    file = FOPEN(FILENAME.encode(), b"rb")
    if file:
        RUN_FILE(file, FILENAME.encode(), FILE_INPUT, namespace, namespace, 1)  # it closes the file too
    else:
        exec(compile_main(code), namespace)


def execute(
    code: bytes,
    filename: str,
    namespace: dict[str, object],
    show: Callable[[str], None],
    *,
    flags: int = 0,
    evaluate: Callable[[CodeType, dict[str, object]], object] = eval,
) -> None:
    """Compiles and runs code, and shows the value of the last expression, unless a semicolon ends it.

    flags: those of the compiler. evaluate: runs what they make of code.
    """
    # With ast.parse a syntax error would show a frame of it.
    tree: Any = compile(code, filename, "exec", ast.PyCF_ONLY_AST | flags, dont_inherit=True)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    evaluate(compile(tree, filename, "exec", flags, dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        value = evaluate(compile(ast.Expression(last.value), filename, "eval", flags, dont_inherit=True), namespace)
        if value is not None and not code.rstrip().endswith(b";"):
            show(repr(value))


def compile_main(code: bytes) -> CodeType:
    return compile(code, FILENAME, "exec", dont_inherit=True)


def finish(error: BaseException) -> int | None:
    """Reports what ended the main program as PyErr_Print does, and returns the exit code.

    It is None for an uncaught MemoryError, and negative for a death by that signal.
    """
    if isinstance(error, SystemExit):
        return _exit_code(error)
    strip(error)
    kind = type(error)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, error.__traceback__
    try:
        if hasattr(sys, "excepthook"):
            sys.excepthook(kind, error, error.__traceback__)
        else:
            _say("sys.excepthook is missing\n")
            DISPLAY(kind, error, error.__traceback__)
    except SystemExit as second:
        return _exit_code(second)
    except BaseException as second:
        strip(second)
        _say("Error in sys.excepthook:\n")
        DISPLAY(type(second), second, second.__traceback__)
        _say("\nOriginal exception was:\n")
        DISPLAY(kind, error, error.__traceback__)
    if isinstance(error, MemoryError):
        return None
    return -signal.SIGINT if kind is KeyboardInterrupt else 1


def strip(error: BaseException, *folders: str) -> None:
    """Removes the frames of our own code, and of files in `folders`, from the top of the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((OURS, *folders)):
        trace = trace.tb_next
    error.__traceback__ = trace


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF if -(1 << 63) <= error.code < 1 << 63 else 255
    _say(error.code)
    _say("\n")
    return 1


def _say(text: object) -> None:
    """Writes to sys.stderr, or to descriptor 2 if that is gone; never fails."""
    with contextlib.suppress(BaseException):
        stream = getattr(sys, "stderr", None)
        encoded = str(text)
        if stream is None:
            os.write(2, encoded.encode(errors="backslashreplace"))
        else:
            stream.write(encoded)


def _end(status: int | None, in_c: bool, *, finalise: bool) -> int | None:
    """Does what a program can notice of the interpreter's exit: joins threads, runs atexit, flushes, finalises.

    It returns the exit code: 120 if flushing fails. None and negative ones, for deaths by a signal, stay.
    """
    try:
        if len(threading._active) > 1:  # type: ignore[attr-defined] # active_count would take a lock
            getattr(threading, "_shutdown")()  # noqa: B009 - private, but it is what the interpreter calls
        if atexit._ncallbacks():
            atexit._run_exitfuncs()
    except BaseException as error:
        strip(error)
        DISPLAY(type(error), error, error.__traceback__)
    flushed = _flush()
    stdout: Any = getattr(sys, "__stdout__", None)
    stderr: Any = getattr(sys, "__stderr__", None)
    replaced = stdout is not getattr(sys, "stdout", None) or stderr is not getattr(sys, "stderr", None)
    if finalise:
        _finalise(stdout, stderr)
    if finalise or replaced:
        for stream in (stdout, stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
    if in_c:
        FFLUSH(None)  # prints what C code has printed
    return status if flushed or status is None or status < 0 else 120


def _finalise(stdout: Any, stderr: Any) -> None:
    """Lets the main program's objects die, in the interpreter's order."""
    if gc.isenabled():
        gc.collect()
    sys.last_type = sys.last_value = sys.last_traceback = None
    sys.stdout, sys.stderr = stdout, stderr
    # Warnings then look as they do when no frame is left.
    alone = len(threading._active) == 1 and getattr(sys, "excepthook", None) is DISPLAY  # type: ignore[attr-defined]
    # What a daemon thread or a hook holds lives on.
    names = {"__name__": "sys", "modules": sys.modules, "gc": gc, "objects": gc.get_objects if alone else list}
    exec(LAST, names)


def _flush() -> bool:
    """Flushes stdout and stderr as the interpreter does; returns whether both could be flushed."""
    flushed = True
    stream = getattr(sys, "stdout", None)
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except BaseException as error:
        flushed = False
        strip(error)
        with contextlib.suppress(BaseException):
            _say(f"Exception ignored in: {stream!r}\n")
            DISPLAY(type(error), error, error.__traceback__)
    stream = getattr(sys, "stderr", None)
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except BaseException:
        flushed = False
    return flushed
