"""Texts of the programs that run in the jail: a guest file of ours with the codec before it."""

from __future__ import annotations

import functools
import keyword
import py_compile
import re
import tempfile
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Literal

GUEST = Path(__file__).with_name("guest")
LOOKED_AT = 100_000  # characters in which imports are looked for, as `sandbox.tiers` does
HEADER_BYTES = 16  # of a .pyc file; what follows is marshalled code
IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(\w+)", re.MULTILINE)


@functools.cache
def guest_program(name: Literal["candidate", "checks"]) -> str:
    """Returns the text of a guest program that reads its request from standard input.

    It holds source and bytecode. Compiling the source costs more than a jailed call does, so an interpreter of the
    version that runs here takes the bytecode.
    """
    parts = [GUEST.joinpath(f"{file}.py").read_text() for file in ("plain", name)]
    source = "\n".join([*parts, "main(encode, decode)\n"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.py")
        file.write_text(source)
        compiled = py_compile.compile(str(file), cfile=f"{file}c", dfile=file.name, doraise=True, optimize=2)
        bytecode = Path(compiled or "").read_bytes()[HEADER_BYTES:]
    return (
        "import _frozen_importlib_external, marshal\n"
        f"same = _frozen_importlib_external.MAGIC_NUMBER == {MAGIC_NUMBER!r}\n"
        f"exec(marshal.loads({bytecode!r}) if same else {source!r})\n"
    )


def with_imports(program: str, *codes: str) -> str:
    """Returns the program with a line that is never run, by which the sandbox sees what the codes will import.

    It chooses by that a warmed interpreter which has those modules already.
    """
    modules = {name for code in codes for name in IMPORT.findall(code[:LOOKED_AT])}
    usable = sorted(name for name in modules if name.isidentifier() and not keyword.iskeyword(name))
    return program + "".join(f"if 0:\n    import {name}\n" for name in usable)
