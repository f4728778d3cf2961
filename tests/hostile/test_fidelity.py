"""A call shows what `python main.py` shows, byte for byte: stdout, stderr and exit code of every program in fidelity/.

The reference is the same interpreter with `-B -X utf8` and the jail's environment, with stdin, stdout and stderr on
memory files as in the jail, in a folder that holds nothing but main.py. That folder's name is the only thing replaced
in what the reference prints. What differs all the same stands in DIFFERENT with its reason, and must go on differing.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from sandbox import TIERS, Limits, Sandbox, SandboxConfig
from sandbox.host import interpreter
from sandbox.host.nsjail import ELSEWHERE
from tests.hostile.fidelity import endings, errors, language, module, numeric, parallel, source, streams

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOME = "/tmp"  # of the jail: where main.py would stand
LIMITS = Limits(wall_s=30.0, cpu_s=30.0, memory_bytes=4 << 30, output_bytes=4 << 20)
DEADLINE_S = 40.0
GUEST = interpreter.find(None, ())
TOPICS = {
    topic.__name__.rpartition(".")[2]: topic.PROGRAMS
    for topic in (source, errors, streams, endings, module, language, parallel, numeric)
}
PROGRAMS = {f"{topic}: {name}": code for topic, programs in TOPICS.items() for name, code in programs.items()}
STDIN = {f"streams: {name}": text for name, text in streams.STDIN.items()}
AS_TEXT = "code comes as text: what it declares of an encoding, right or wrong, says nothing"
FRAMES = "frames of the sandbox lie below the program's: seen by frame walks and recursion depth"
DIFFERENT = {
    **dict.fromkeys(
        (
            *("errors: recursion", "errors: recursion by two", "errors: recursion depth", "errors: recursion in repr"),
            *("errors: traceback module", "errors: stack of a function", "errors: frames", "errors: faulthandler"),
            *("errors: frames in a traceback", "endings: atexit that exits"),
        ),
        FRAMES,
    ),
    "source: byte order mark and other cookie": AS_TEXT,
    "source: unknown cookie": AS_TEXT,
    "source: ascii cookie": AS_TEXT,
    "source: cookie that cannot decode": AS_TEXT,
    "parallel: manager": "no Unix sockets with a name in the jail: a multiprocessing manager cannot listen",
    "module: flags": "the zygote runs without site and with a safe path",
    "module: garbage collector frozen": "the zygote's objects are frozen, to be shared by all calls",
    "module: modules": "more modules are loaded than a fresh interpreter has",
    "module: thread state": "the main thread's native_id is that of the zygote's",
    "parallel: main thread at exit": "threading's own end is left out for a program with one thread",
    "endings: signals at a time limit": "they have a handler, which writes out what was printed",
    "endings: stderr closed and an error": "the interpreter's last resort prints reference counts, which differ",
}
COOKIE = re.compile(r"(?:#.*\n)?#.*?coding[:=] *([-\w.]+)")
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


class Shown(NamedTuple):
    stdout: str
    stderr: str
    exit_code: int | None  # None: ended by a signal


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(slots=2)) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def numeric_box() -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(slots=2, tiers=TIERS[1:])) as sandbox:
        yield sandbox


def memory_file(stack: ExitStack, content: bytes = b"") -> int:
    fd = os.memfd_create("stream")
    stack.callback(os.close, fd)
    os.pwrite(fd, content, 0)
    return fd


def jail_environment() -> dict[str, str]:
    """What nsjail.cfg sets, for the reference too."""
    text = Path(sys.modules["sandbox"].__path__[0], "host", "nsjail.cfg").read_text()
    pairs = (pair.split("=", 1) for pair in re.findall(r'^envar: "([^"]*)"', text, re.MULTILINE))
    return {name: value for name, value in pairs if name != "LD_BIND_NOW"}


def as_saved(code: str) -> bytes:
    """The bytes of a file with this text: an editor saves it in the encoding that it declares."""
    declared = COOKIE.match(code)
    try:
        return code.encode(declared[1] if declared else "utf-8")
    except (LookupError, UnicodeEncodeError):
        return code.encode("utf-8", "surrogatepass")


async def reference(code: str, stdin: str, folder: Path) -> Shown:
    """What `python main.py` shows in `folder`."""
    (folder / "main.py").write_bytes(as_saved(code))
    env = jail_environment() | {"HOME": str(folder), "TMPDIR": str(folder)}
    with ExitStack() as stack:
        files = [memory_file(stack, stdin.encode("utf-8", "surrogatepass")), memory_file(stack), memory_file(stack)]
        # A shell that starts the tests in the background, or nohup, lets them ignore signals.
        command = ["/usr/bin/env", "--default-signal", str(GUEST.executable), "-B", "-X", "utf8", "main.py"]
        streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        process = await asyncio.create_subprocess_exec(*command, **streams, env=env, cwd=folder, start_new_session=True)
        async with asyncio.timeout(DEADLINE_S):
            status = await process.wait()
        stdout, stderr = (
            os.pread(fd, 1 << 26, 0).decode("utf-8", "replace").replace(str(folder), HOME) for fd in files[1:]
        )
    return Shown(same_addresses(stdout), same_addresses(stderr), status if status >= 0 else None)


async def jailed(box: Sandbox, code: str, stdin: str) -> Shown:
    result = await box.run(code, stdin=stdin, limits=LIMITS)
    assert not result.truncated
    assert result.outcome == outcome_of(result.exit_code) or "MemoryError" in result.stderr
    stdout, stderr = (text.replace(str(ELSEWHERE), HOME) for text in (result.stdout, result.stderr))
    return Shown(same_addresses(stdout), same_addresses(stderr), result.exit_code)


def outcome_of(exit_code: int | None) -> str:
    return "killed" if exit_code is None else "error" if exit_code else "ok"


async def compare(box: Sandbox, name: str, folder: Path) -> None:
    code, stdin = PROGRAMS[name], STDIN.get(name, "")
    async with asyncio.TaskGroup() as group:
        theirs = group.create_task(reference(code, stdin, folder), name="reference")
        ours = group.create_task(jailed(box, code, stdin), name="jailed")
    if name in DIFFERENT:
        assert ours.result() != theirs.result(), "no longer different: take it out of DIFFERENT"
    else:
        assert ours.result() == theirs.result()


def same_addresses(text: str) -> str:
    """Addresses of objects are chance: the same in both."""
    return ADDRESS.sub("0xADDRESS", text)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if not name.startswith("numeric: ")])
async def test_a_program_does_what_python_does(box: Sandbox, name: str, tmp_path: Path) -> None:
    await compare(box, name, tmp_path)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("numeric: ")])
async def test_a_numeric_program_does_what_python_does(numeric_box: Sandbox, name: str, tmp_path: Path) -> None:
    await compare(numeric_box, name, tmp_path)


async def test_every_difference_is_of_a_program() -> None:
    assert DIFFERENT.keys() <= PROGRAMS.keys()
    assert STDIN.keys() <= PROGRAMS.keys()


PLAIN_RANDOM = "import random\nprint(random.random(), random.Random().random(), random.SystemRandom().random())"
NUMPY_RANDOM = (
    "import numpy.random as r\nprint(r.rand(), r.default_rng().random(), r.RandomState().rand(), r.bytes(9).hex())"
)


# its own two generators, which it uses in calculations too
SYMPY_RANDOM = (
    "import sympy\nfrom sympy.core.random import _assumptions_rng, rng\n"
    "print(sympy.randprime(10**30, 10**31), rng.random(), _assumptions_rng.random())"
)


async def test_random_numbers_differ_between_calls(box: Sandbox, numeric_box: Sandbox) -> None:
    for sandbox, code in ((box, PLAIN_RANDOM), (numeric_box, NUMPY_RANDOM), (numeric_box, SYMPY_RANDOM)):
        shown = [(await sandbox.run(code)).stdout.split() for _ in range(5)]
        assert all(len(set(column)) == 5 for column in zip(*shown, strict=True))


@pytest.mark.skipif("seed" not in signature(Sandbox.run).parameters, reason="Sandbox.run takes no seed")
async def test_a_seed_makes_random_numbers_repeat(box: Sandbox, numeric_box: Sandbox) -> None:
    plain = "import random\nprint(random.random(), random.sample(range(99), 3), random.gauss(0, 1))"
    numeric = "import numpy as np, random\nprint(np.random.rand(), np.random.permutation(9), random.random())"
    for sandbox, code in ((box, plain), (numeric_box, numeric)):
        shown = [(await sandbox.run(code, seed=seed)).stdout for seed in (7, 7, 8, None)]
        assert shown[0] == shown[1]
        assert len(set(shown)) == 3


async def test_a_seed_gives_the_same_numbers_in_every_interpreter(numeric_box: Sandbox) -> None:
    """As two hosts have two."""
    shown = [
        (await numeric_box.run(SYMPY_RANDOM, seed=seed, tier=tier)).stdout
        for seed, tier in ((7, "math"), (7, "full"), (8, "full"))
    ]
    assert shown[0] == shown[1] != shown[2]
    assert len(shown[0].split()) == 3
