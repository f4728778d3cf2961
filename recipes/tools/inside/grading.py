"""Runs hidden tests against a workspace, after `workspace.py` in the same namespace in the jail.

Invariants
- The tests' process executes nothing of the workspace, and imports from no folder that a program can write to.
- Tests are read from standard input after the process that starts programs was forked. They are on no disk, and in the
  memory of no process that runs the workspace's code.
- What a program, or a function that a test calls, answers is bytes or a literal: no object of the workspace gets here.
"""

import ast
import builtins
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
    sys.meta_path.insert(0, Modules({path for path, _ in request["files"]}, ask))
    sys.modules["pytest"] = pytest_module()
    passed, failed = 0, {}
    for file, source in request["tests"].items():
        namespace = {"__name__": file, "__builtins__": builtins, "run": ask.run}
        for name, test in collected(source, file, namespace):
            try:
                test()
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
            return issubclass(kind, self.kind) and (self.match is None or re.search(self.match, str(value)) is not None)

    class Approx:
        def __init__(self, wanted, rel=1e-6, abs=1e-12):
            self.wanted, self.rel, self.abs = wanted, rel, abs

        def __eq__(self, other):
            if isinstance(self.wanted, list | tuple):
                pairs = list(zip(self.wanted, other, strict=True)) if len(self.wanted) == len(other) else [(0, None)]
                return all(Approx(one, self.rel, self.abs) == two for one, two in pairs)
            if type(other) not in (int, float, bool):
                return False
            return math.isclose(self.wanted, other, rel_tol=self.rel or 0.0, abs_tol=self.abs or 0.0)

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
            raise RuntimeError(f"{module}.{name} ended without an answer: {answer['stderr'][-200:]}")
        if kind == "function":
            return Function(self, module, name)
        value = literal(text)
        if kind == "value":
            return value
        error = getattr(builtins, str(value[0]), RuntimeError)
        raise (error if isinstance(error, type) and issubclass(error, Exception) else RuntimeError)(str(value[1]))

    def ask(self, request):
        send(self.connection, {**request, "wall_s": self.wall_s})
        answer = receive(self.connection)
        if answer["status"] is None:
            raise TimeoutError(f"it took longer than {self.wall_s:g} s")
        return answer


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
            if arguments is None and callable(value):
                text = "function "
            else:
                given, named = literal(arguments) if arguments is not None else ((), {})
                text = "value " + written(value if arguments is None else value(*given, **named))
        except Exception as error:
            text = "raised " + written((type(error).__name__, str(error)[:1000]))
        write_all(answers, text.encode("utf-8", "replace"))
        os._exit(0)

    return job


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
