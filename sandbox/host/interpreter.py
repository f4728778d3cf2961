"""The Python that guest code runs in: it is asked once, in a process of its own, when a host starts.

Invariants
- The node's installed packages and its own code are no part of it, unless the node's environment was given.
- A Python that cannot run guest code raises InterpreterUnusable: its path, the cause and what to do, in one line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sandbox.tiers import Tier

OLDEST, NEWEST_TESTED = (3, 11), (3, 13)
ANSWER_S = 30.0  # on a very busy machine; usually it takes 50 ms
FIX = "set SandboxConfig.python (or python=) to a CPython from 3.11 on, best of a virtual environment of its own"
# Runs in the interpreter that is asked, whatever its version; the last line that it prints is the answer. A `.pth` file
# may add any folder of the machine to sys.path, so only folders with installed packages are taken.
PROBE = """
import json, os, platform, site, sys, sysconfig
variables = {"installed_base": sys.base_prefix, "base": sys.base_prefix, "platbase": sys.base_exec_prefix}
library = sysconfig.get_config_var("INSTSONAME") or ""
packages = [] if sys.flags.no_site else [path for path in site.getsitepackages() if os.path.isdir(path)]
from importlib.machinery import PathFinder
there = getattr(sys, "stdlib_module_names", ())
print("\\n" + json.dumps({
    "executable": sys.executable,
    "binary": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "version": list(sys.version_info[:3]),
    "kind": platform.python_implementation(),
    "lock_free": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    "settings": os.path.join(sys.prefix, "pyvenv.cfg") if sys.prefix != sys.base_prefix else None,
    "library": None if library.endswith(".a") else os.path.join(sysconfig.get_config_var("LIBDIR") or "/", library),
    "stdlib": [sysconfig.get_path(name, vars=variables) for name in ("stdlib", "platstdlib")],
    "packages": packages,
    "modules": [name for name in sys.argv[1:] if name in there or PathFinder.find_spec(name, packages)],
}))
"""


class InterpreterUnusable(Exception):
    """A Python cannot run guest code; the message has its path, the cause and what to do, in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """One Python.

    executable: what guest code sees as sys.executable.
    binary: the file that runs; for a virtual environment, that of the Python it was made with.
    settings: pyvenv.cfg of the environment; None outside of one.
    library: libpython, if it is a file of its own.
    stdlib, packages: folders.
    modules: the top-level names that were asked for and exist.
    """

    executable: Path
    binary: Path
    version: tuple[int, ...]
    settings: Path | None
    library: Path | None
    stdlib: tuple[Path, ...]
    packages: tuple[Path, ...]
    modules: frozenset[str]

    def resolve(self, tier: Tier) -> Tier:
        """Returns the tier with what it preloads here. Raises InterpreterUnusable if a required module is missing."""
        for name in tier.preload:
            if _top(name) not in self.modules:
                raise InterpreterUnusable(
                    f"cannot preload: ModuleNotFoundError: No module named {name!r} (tier {tier.name!r}, "
                    f"{self.executable}). Fix: {make_guest()}; or set SandboxConfig.python (or python=)"
                )
        there = tuple(name for name in tier.optional if _top(name) in self.modules)
        return replace(tier, preload=tier.preload + there, optional=())


def default() -> str | None:
    """Returns ENV-guest/bin/python for a node that runs in the environment ENV; None if there is none."""
    folder = Path(f"{sys.prefix}-guest")
    return str(folder / "bin" / "python") if folder.is_dir() else None


def make_guest() -> str:
    """Returns the command, to be run in the checkout, that makes the guest environment or completes it."""
    folder = f"{sys.prefix}-guest"
    return f"python3 -m venv {folder} && {folder}/bin/pip install --no-deps -r requirements/guest.lock"


def find(given: str | None, tiers: Sequence[Tier]) -> Interpreter:
    """Asks the Python at the path `given`, else the default; else this process's own, without installed packages."""
    names = {_top(name) for tier in tiers for name in (*tier.preload, *tier.optional)}
    path = given or default()
    if path is not None:
        return _ask([path, "-I"], sorted(names))
    # -S: without anything that is installed
    return _ask([getattr(sys, "_base_executable", sys.executable), "-I", "-S"], sorted(names))


def _ask(command: list[str], names: list[str]) -> Interpreter:
    path = command[0]
    try:
        done = subprocess.run(
            [*command, "-B", "-c", PROBE, *names],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S,
        )  # fmt: skip
        answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        raise InterpreterUnusable(f"the Python at {path} gave no answer within {ANSWER_S:g} s. Fix: {FIX}") from None
    except (OSError, ValueError, IndexError) as error:
        reason = getattr(error, "strerror", None) or f"its answer is {done.stdout[-100:]!r}"
        raise InterpreterUnusable(f"cannot run the Python at {path}: {reason}. Fix: {_fix(path)}") from error
    if answer is None:
        reason = done.stderr.strip().rpartition("\n")[2][:300]
        raise InterpreterUnusable(
            f"the Python at {path} failed with status {done.returncode}: {reason}. Fix: {_fix(path)}"
        )
    version = tuple(answer["version"])
    if answer["kind"] != "CPython" or answer["lock_free"] or version < OLDEST:
        kind = "a CPython without its global lock" if answer["lock_free"] else answer["kind"]
        raise InterpreterUnusable(f"the Python at {path} is {kind} {'.'.join(map(str, version))}. Fix: {FIX}")
    return Interpreter(
        # In a virtual environment Python finds its packages by the name under which it is called.
        executable=Path(answer["executable" if answer["settings"] else "binary"]),
        binary=Path(answer["binary"]),
        version=version,
        settings=Path(answer["settings"]) if answer["settings"] else None,
        library=Path(answer["library"]) if answer["library"] else None,
        stdlib=tuple(map(Path, answer["stdlib"])),
        packages=tuple(map(Path, answer["packages"])),
        modules=frozenset(answer["modules"]),
    )


def _fix(path: str) -> str:
    return f"remove {Path(path).parents[1]} or build it anew (`make venv`)" if path == default() else FIX


def _top(name: str) -> str:
    return name.partition(".")[0]
