"""Runs hidden tests against a workspace, after `workspace.py` in the same namespace in the jail.

Invariants
- The tests' process executes nothing of the workspace, and imports from no folder that a program can write to.
- Tests are read from standard input after the process that starts programs was forked. They are on no disk, and in the
  memory of no process that runs the workspace's code.
- What a program, or a function that a test calls, answers is bytes or a literal: no object of the workspace gets here.
- A test gets Python's and the environment's modules first, whatever files of their names the workspace has.
- A call without an answer raises NoAnswer, which `pytest.raises` does not take for the error that a test waits for.
"""

import ast
import builtins
import contextlib
import importlib
import importlib.machinery
import json
import math
import os
import re
import socket
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.tools.inside.workspace import ROOT, program, read_request, start, take_stdout, write_all

HEAD_BYTES = 8  # the length before a message between tests and starter
LITERAL_BYTES = 1 << 20
EXACT = (int, float, complex, bool, str, bytes, type(None))
CONTAINERS = (list, tuple, set, frozenset)
NUMBERS = (int, float, bool)


class NoAnswer(BaseException):
    """A call of the workspace ended with neither a plain value nor an exception: it exited, or took too long."""


def grade():
    """Runs the tests of a request. Exit code 0: all passed. It prints how many passed, and what failed."""
    sys.path[:] = [path for path in sys.path if path and not path.startswith("/tmp")]
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        serve_programs(there)
        os._exit(0)
    there.close()
    out, request = take_stdout(), read_request()
    os.chdir(ROOT)
    ask = Starter(here, request["wall_s"])
    sys.meta_path.append(Modules({path for path, _ in request["files"]}, ask))
    sys.modules["pytest"] = pytest_module()
    passed, failed = 0, {}
    for file, source in request["tests"].items():
        namespace = {"__name__": file, "__builtins__": builtins, "run": ask.run}
        for name, test in collected(source, file, namespace):
            try:
                if (returned := test()) is not None:
                    raise TypeError(f"a test must run to its end and return None, got {type(returned).__name__}")
            except BaseException as error:
                failed[f"{file}::{name}"] = f"{type(error).__name__}: {error}"[:300]
            else:
                passed += 1
    write_all(out, json.dumps({"passed": passed, "failed": failed}).encode())
    os._exit(0 if passed and not failed else 1)


def collected(source, file, namespace):
    """Yields (name, test) of each test of a file; if the file itself fails, one test that does."""
    try:
        exec(compile(source, file, "exec", dont_inherit=True), namespace)
    except BaseException as error:

        def broken(error=error):
            raise error

        yield "import", broken
        return
    for name, test in list(namespace.items()):
        if name.startswith("test") and isinstance(test, types.FunctionType):
            for number, arguments in enumerate(cases(test)):
                yield f"{name}[{number}]", lambda test=test, arguments=arguments: test(**arguments)
        elif isinstance(test, type) and any(each.startswith("test") for each in vars(test)):
            yield name, lambda: "a class"  # its tests are not run, so they must not pass


def cases(test):
    """Returns the arguments of each case of a test: one without any, unless it is parametrized."""
    made: list[dict[str, object]] = [{}]
    for names, values in getattr(test, "cases", ()):
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        each = [dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values]
        made = [{**one, **other} for one in made for other in each]
    return made


def pytest_module():
    """Returns what tests use of pytest: raises, approx, mark.parametrize."""
    module = types.ModuleType("pytest")

    class Raises:
        def __init__(self, kind, match=None):
            self.kind, self.match, self.value = kind, match, None

        def __enter__(self):
            return self

        def __exit__(self, kind, value, frames):
            assert kind is not None, f"{self.kind} was not raised"
            self.value = value
            expected = issubclass(kind, self.kind) and kind is not NoAnswer
            return expected and (self.match is None or re.search(self.match, str(value)) is not None)

    class Approx:
        """Compares as pytest does: where only `abs` is given, it alone counts."""

        def __init__(self, wanted, rel=None, abs=None):
            self.wanted, self.rel, self.abs = wanted, rel, abs

        def __eq__(self, other):
            wanted, within = self.wanted, (self.rel, self.abs)
            if type(wanted) is dict:
                same = type(other) is dict and wanted.keys() == other.keys()
                return same and all(Approx(each, *within) == other[key] for key, each in wanted.items())
            if type(wanted) in (list, tuple):
                same = type(other) in (list, tuple) and len(wanted) == len(other)
                return same and all(Approx(one, *within) == two for one, two in zip(wanted, other, strict=True))
            if wanted == other or type(wanted) not in NUMBERS or type(other) not in NUMBERS:
                return wanted == other
            if math.isinf(wanted) or math.isinf(other):
                return False
            relative = (
                0.0
                if self.rel is None and self.abs is not None
                else (1e-6 if self.rel is None else self.rel) * abs(wanted)
            )
            return abs(wanted - other) <= max(relative, 1e-12 if self.abs is None else self.abs)

    def parametrize(names, values, **_):
        def marked(test):
            test.cases = [*getattr(test, "cases", ()), (names, values)]
            return test

        return marked

    mark = types.SimpleNamespace(parametrize=parametrize)
    module.__dict__.update(raises=Raises, approx=Approx, mark=mark)
    return module


class Starter:
    """Asks the process that starts programs."""

    def __init__(self, connection, wall_s):
        self.connection, self.wall_s = connection, wall_s

    def run(self, path, *arguments, stdin=""):
        """Runs a program of the workspace; returns an object with returncode, stdout and stderr."""
        answer = self.ask({"path": path, "arguments": [str(each) for each in arguments], "stdin": stdin})
        return types.SimpleNamespace(
            returncode=answer["status"] and os.waitstatus_to_exitcode(answer["status"]),
            stdout=answer["stdout"],
            stderr=answer["stderr"],
        )

    def call(self, module, name, arguments):
        """Returns the literal that a function of the workspace answers, or the value of a name (arguments: None)."""
        answer = self.ask({"module": module, "name": name, "arguments": arguments, "stdin": ""})
        kind, _, text = answer["stdout"].partition(" ")
        if answer["status"] != 0 or kind not in ("value", "function", "raised"):
            raise NoAnswer(f"{module}.{name} ended without an answer: {text[-200:]}{answer['stderr'][-200:]}")
        if kind == "function":
            return Function(self, module, name)
        try:
            value = literal(text)
            raised = exception(*value) if kind == "raised" else None
        except (TypeError, ValueError) as error:
            raise NoAnswer(f"{module}.{name}: {error}") from None
        if raised is not None:
            raise raised
        return value

    def ask(self, request):
        send(self.connection, {**request, "wall_s": self.wall_s})
        answer = receive(self.connection)
        if answer["status"] is None:
            raise NoAnswer(f"it took longer than {self.wall_s:g} s")
        return answer


def exception(names, text):
    """Returns an exception of the first of these built-in classes that can be made of a text."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):
                return kind(text)
    return Exception(text)


class Function:
    """A function of the workspace, which another process runs."""

    def __init__(self, ask, module, name):
        self.__name__, self._ask, self._module = name, ask, module

    def __call__(self, *arguments, **named):
        return self._ask.call(self._module, self.__name__, written((list(arguments), named)))


class Modules:
    """A finder and loader that lets a test import modules of the workspace, whose functions run elsewhere.

    It does not inherit from importlib.abc, whose import costs ten times what a call does.
    """

    def __init__(self, paths, ask):
        self.paths, self.ask = paths, ask

    def find_spec(self, name, path=None, target=None):
        base = name.replace(".", "/")
        package = any(each.startswith(f"{base}/") for each in self.paths)
        if not package and f"{base}.py" not in self.paths:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=package)  # type: ignore[arg-type]

    def create_module(self, spec):
        module = types.ModuleType(spec.name)

        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return self.ask.call(spec.name, name, None)

        module.__dict__["__getattr__"] = attribute
        return module

    def exec_module(self, module):
        pass


def serve_programs(connection):
    """Runs what the test asks for, one after the other; this process has never seen a test."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    while (request := receive(connection)) is not None:
        if "path" in request:
            job = program(request["path"], request["arguments"])
        else:
            job = function(request["module"], request["name"], request["arguments"])
        status, stdout, stderr = start(job, request["stdin"].encode(), LITERAL_BYTES, request["wall_s"])
        answer = {"stdout": stdout.decode("utf-8", "replace"), "stderr": stderr.decode("utf-8", "replace")[-2000:]}
        send(connection, {**answer, "status": status})


def function(module, name, arguments):
    """Returns a job: a call of a function of the workspace, whose answer it prints last of all."""

    def job():
        answers = os.dup(1)
        os.dup2(2, 1)  # what the function prints is no answer
        sys.path.insert(0, ROOT)
        try:
            value = getattr(importlib.import_module(module), name)
            if arguments is not None:
                given, named = literal(arguments)
                value = value(*given, **named)
        except Exception as error:
            builtin = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            text = "raised " + written((builtin, str(error)[:1000]))
        else:
            text = "function " if arguments is None and callable(value) else answer_with(value)
        write_all(answers, text.encode("utf-8", "replace"))
        os._exit(0)

    return job


def answer_with(value):
    """Returns what is told of a value: the value as a literal, or why it has none."""
    try:
        return "value " + written(value)
    except Exception as error:
        return f"none {error}"


def written(value):
    """Returns a value as a literal. Raises TypeError for one that has none."""
    check_literal(value)
    return repr(value)


def check_literal(value):
    kind = type(value)
    if kind is dict:
        for pair in value.items():
            check_literal(pair)
    elif kind in CONTAINERS:
        for each in value:
            check_literal(each)
    elif kind not in EXACT:
        raise TypeError(f"tests and the workspace exchange plain values, not {kind.__name__}")


class Infinite(ast.NodeTransformer):
    def visit_Name(self, node):
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def literal(text):
    """Returns the value of a literal; nan and inf are values too. Raises ValueError for anything else."""
    if len(text) >= LITERAL_BYTES:
        raise ValueError("the answer is too long")
    try:
        return ast.literal_eval(Infinite().visit(ast.parse(text, mode="eval").body))
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"no literal: {error}") from None


def send(connection, message):
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(HEAD_BYTES, "big") + data)


def receive(connection):
    """Returns the next message; None at the end."""
    head = exactly(connection, HEAD_BYTES)
    return json.loads(exactly(connection, int.from_bytes(head, "big"))) if head else None


def exactly(connection, count):
    data = b""
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 16))
        if not part:
            return b""
        data += part
    return data
