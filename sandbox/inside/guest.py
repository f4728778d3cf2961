"""The last step before guest code, in the forked child of one call or of a session. Standard library only.

Invariants
- Before the first guest instruction the descriptors are exactly {0, 1, 2}, no capability is left, the process has its
  own uid, its rlimits are set and the second seccomp filter is on.
- Only this process reads the code and the stdin of a call; slot and zygote never do.
- Random numbers differ between calls, or follow from the call's seed.

_native.c does the same as `drop_privileges` if it is built.
"""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import math
import os
import resource
import struct
import sys
from _random import Random as Generator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sandbox.inside import linux
from sandbox.inside import main_program as program
from sandbox.inside.main_program import HOME

FIRST_UID = 1000
SEED_SHIFT = 64  # above all seeds, so that the numbers in place of the kernel's differ from those of `random`
LENGTH = struct.Struct("q")  # at the start of a board: how long all of the display is
ROUNDS = 30  # until the interpreter has adapted all that it runs (PEP 659)
REHEARSAL = (
    b"import math\nfor i in range(3):\n    print(i, f'{math.sqrt(i):.2f}', [i])",
    b"def f(x):\n    return 1 / x\nf(0)",
    b"x = = 1",
)
# For each library, programs that use what it builds at first use
REHEARSAL_FOLDER = Path(__file__).with_name("rehearsal")


_generators: list[tuple[Callable[[int | None], None], int]] = []  # how each is seeded, and the bound of its seeds


class SlotRequest(NamedTuple):
    """What a slot is told about a call.

    It has the call's limits, in the order of wire.Limits; the sizes of stdin and of the code, which its one descriptor
    holds in that order; the size of the board for its display (0: none); and its seed (-1: none).
    """

    wall_s: float
    cpu_s: float
    memory_bytes: int
    output_bytes: int
    processes: int
    disk_bytes: int
    stdin_bytes: int
    code_bytes: int
    display_bytes: int
    seed: int


REQUEST = struct.Struct("ddqqqqqqqq")


class Identity(NamedTuple):
    """What is the same for all calls of a slot.

    uid: None keeps the only id that is mapped. image_bytes: address space of the zygote, which a call's memory limit
    does not count.
    """

    uid: int | None
    image_bytes: int
    policy: linux.Filter
    jailed: bool


def file_bytes(disk_bytes: int, output_bytes: int) -> int:
    """Returns RLIMIT_FSIZE of a call: one limit for what it writes to a file and to stdout or stderr."""
    return max(disk_bytes, output_bytes)


def limit(kind: int, *values: int) -> None:
    """Sets the soft and the hard limit, or what this machine allows if that is less, since more would be refused."""
    most = resource.getrlimit(kind)[1] % (1 << 64)  # -1, which means no limit, becomes the largest number
    resource.setrlimit(kind, (min(values[0], most), min(values[1], most)))


def drop_privileges(request: SlotRequest, identity: Identity, source: int, out: int, err: int) -> None:
    """Gives up everything that guest code must not have. source: holds stdin and code."""
    for fd, standard in ((source, 0), (out, 1), (err, 2)):
        os.dup2(fd, standard)
    linux.close_from(3)
    file, space = file_bytes(request.disk_bytes, request.output_bytes), request.memory_bytes + identity.image_bytes
    for kind, soft, hard in (
        (resource.RLIMIT_AS, space, space),
        (resource.RLIMIT_FSIZE, file, file),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_MEMLOCK, 65536, 65536),
        (resource.RLIMIT_SIGPENDING, 1024, 1024),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        limit(kind, soft, hard)
    if math.isfinite(request.cpu_s):
        cpu = math.ceil(request.cpu_s)
        limit(resource.RLIMIT_CPU, cpu, cpu + 1)  # SIGXCPU first; SIGKILL for code that ignores it
    if not identity.jailed:
        return
    os.setsid()  # otherwise a signal to its process group would reach the slot, if both have the same id
    limit(resource.RLIMIT_NPROC, request.processes, request.processes)
    if identity.uid is not None:
        os.setresgid(identity.uid, identity.uid, identity.uid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
    linux.drop_capabilities()
    os.chdir(HOME)
    identity.policy.install()


def main_program(
    stdin_bytes: int, code_bytes: int, seed: int, show: program.Show, leave: Callable[[int], NoReturn] = os._exit
) -> NoReturn:
    """Runs the call's code, which is on descriptor 0 behind its stdin, as the main program. seed: -1 for none."""
    try:
        code = os.pread(0, code_bytes, stdin_bytes)
        os.ftruncate(0, stdin_bytes)
        seed_random(seed)
        program.run(code, show, leave)
    except MemoryError:
        program.die(program.OUT_OF_MEMORY)


def seed_random(seed: int) -> None:
    """Gives each call its own random numbers; the state of the zygote's generators would be the same in all."""
    for reseed, most in _generators:
        reseed(seed % most if seed >= 0 else None)
    if seed >= 0:
        _seed_entropy(seed)


def _seed_entropy(seed: int) -> None:
    """Lets the seed also determine what Python asks the kernel for.

    That is `os.urandom`, hence secrets, uuid4 and numpy's default_rng, and the seed of a `random.Random()` that is
    given none, hence tempfile's names.
    """
    bits = Generator(seed + 1 << SEED_SHIFT).getrandbits

    def urandom(size: int) -> bytes:
        return bits(8 * size).to_bytes(size, "little")

    os.urandom = urandom
    if (random := sys.modules.get("random")) is not None:
        reseed = random.Random.seed

        def seed_random_object(self: Any, a: Any = None, version: int = 2) -> None:
            reseed(self, bits(64) if a is None else a, version)

        random._urandom, random.Random.seed = urandom, seed_random_object  # type: ignore[attr-defined]
        random.seed = random._inst.seed  # type: ignore[attr-defined] # bound to the method that it was


class Board:
    """Shared memory through which a call's display leaves, so that the guest needs no descriptor for it."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._room = address, size - LENGTH.size

    def show(self, text: str) -> None:
        encoded = text.encode(errors="backslashreplace")
        ctypes.memmove(self._address, LENGTH.pack(len(encoded)), LENGTH.size)
        ctypes.memmove(self._address + LENGTH.size, encoded, min(len(encoded), self._room))


def find_generators() -> None:
    """Notes the generators of random numbers in modules of this process (`random`, sympy.core.random, numpy).

    `seed_random` seeds them.
    """
    _generators.clear()
    if (random := sys.modules.get("random")) is not None:
        named = [value for module in sys.modules.values() for value in getattr(module, "__dict__", {}).values()]
        for generator in {id(value): value for value in named if type(value) is random.Random}.values():
            generator.gauss_next = None
            # The method in C; the one in Python only converts other kinds of seeds first.
            _generators.append((Generator.seed.__get__(generator), 1 << 63))
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed(0)
        _generators.append((_numpy_seeder(random.mtrand._rand), 1 << 32))


def _numpy_seeder(generator: Any) -> Callable[[int | None], None]:
    """Returns `generator.seed`, which without a seed fills the state in one go.

    Numpy's own takes 190 page faults for that (numpy/random, mt19937.h).
    """
    numbers, address = 624, generator._bit_generator.ctypes.state_address

    def seed(number: int | None) -> None:
        if number is None:
            ctypes.memmove(address, os.urandom(4 * numbers) + numbers.to_bytes(4, sys.byteorder), 4 * numbers + 4)
        else:
            generator.seed(number)

    return seed


class _Rehearsed(BaseException):
    """Ends a rehearsed program without ending the process."""


def _rehearsed(status: int) -> NoReturn:
    raise _Rehearsed


def _library_programs() -> list[bytes]:
    """Returns programs that use the preloaded libraries, which would otherwise build something in every call."""
    files = sorted(REHEARSAL_FOLDER.glob("*.py"))
    return [file.read_bytes() for file in files if file.stem in sys.modules]


def rehearse(*, libraries: bool) -> None:
    """Runs every path of a call in the zygote, with what is imported or with what is in each call.

    What is built at first use is then shared by all calls, not built in each, and fewer pages are written to. At the
    end standard streams are as before, and no program remains.
    """
    saved = [os.dup(standard) for standard in (0, 1, 2)]
    null, source = os.open(os.devnull, os.O_RDWR), os.memfd_create("rehearsal")
    for fd, standard in ((source, 0), (null, 1), (null, 2)):
        os.dup2(fd, standard)
    find_generators()
    for code in _library_programs() if libraries else REHEARSAL * ROUNDS:
        os.ftruncate(source, 0)
        os.pwrite(source, code, 0)
        program.make_ready()
        with contextlib.suppress(_Rehearsed):
            main_program(0, len(code), -1, None, _rehearsed)
    for fd, standard in zip(saved, (0, 1, 2), strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    os.close(source)
    os.close(null)
    for name in ("last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    find_generators()
    linecache.clearcache()
    program.make_ready()
