"""Packages that tests run against and that the project does not need: each set in a folder of its own, made once.

They are kept beside .venv under names that git ignores. uv installs them, by links into the user's cache: an
environment takes 1 to 5 seconds where pip takes 15 to 60. Where a package is not to be had the test is skipped and says
why.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import ROOT

UV = "uv==0.13.9"
PIP_OPTIONS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "no-index": "UV_NO_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""What pip's configuration says of indexes, as uv reads it from its environment; lists have spaces in both."""
BELOW = sysconfig.get_path("purelib")
SITE = Path("lib") / Path(BELOW).parent.name / "site-packages"


def folder_with(name: str, *pins: str) -> Path:
    """Returns a folder for PYTHONPATH with these packages, without what they depend on."""

    def make(folder: Path) -> None:
        _uv("pip", "install", "--python", sys.executable, "--no-deps", "--target", folder, *pins)

    return _made(name, pins, make)


def own_environment(name: str, *pins: str, python: str = sys.executable) -> Path:
    """Returns a virtual environment with these packages and what they depend on, and nothing else.

    python: its interpreter, or a version such as "3.12", which has to be on this machine.
    """

    def make(folder: Path) -> None:
        _uv("venv", "--python", python, folder)
        _uv("pip", "install", "--python", folder, *pins)

    return _made(name, pins, make)


def environment_with(name: str, *pins: str) -> Path:
    """Returns a virtual environment with these packages and what they depend on, on top of those of .venv."""

    def make(folder: Path) -> None:
        _uv("venv", "--python", sys.executable, folder)
        (folder / SITE / "below.pth").write_text(f"import site; site.addsitedir({BELOW!r})\n")
        _uv("pip", "install", "--python", folder, "--no-deps", *_missing(folder, pins))

    return _made(name, pins, make)


def node_packages(name: str, *pins: str) -> Path:
    """Returns the folder node_modules with these packages of npm and what they depend on. Their scripts are not run."""

    def make(folder: Path) -> None:
        if shutil.which("npm") is None:
            pytest.skip(f"npm is not installed, which {', '.join(pins)} come with")
        folder.mkdir()
        options = ("--ignore-scripts", "--no-package-lock", "--prefer-offline", "--no-audit", "--no-fund")
        _run(["npm", "install", "--silent", "--prefix", folder, *options, *pins])

    return _made(name, pins, make) / "node_modules"


def _missing(folder: Path, pins: tuple[str, ...]) -> list[str]:
    """Returns the packages, with versions, that are needed beside those of .venv, which count where they will do."""
    there = _uv("pip", "freeze", "--python", sys.executable).split()
    elsewhere = [package.partition("==")[0] for package in there if "+" in package]  # such builds are on no index
    wanted, builds, chosen = (folder / name for name in ("wanted.in", "builds.in", "chosen.txt"))
    wanted.write_text("\n".join(pins))
    builds.write_text("\n".join(elsewhere))
    chosen.write_text("\n".join(there))  # uv prefers the versions of the file that it writes
    options = ("--no-header", "--no-annotate", "--excludes", builds, "--output-file", chosen)
    _uv("pip", "compile", "--python", sys.executable, *options, wanted)
    return [package for package in chosen.read_text().split("\n") if package and package not in there]


def _made(name: str, pins: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    folder = ROOT / f".venv-{name}"
    wanted = hashlib.sha256(repr(pins).encode()).hexdigest()
    stamp = folder / "installed"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            make(folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"{', '.join(pins)} could not be installed: {str(error.stderr or error).strip()[-300:]}")
        stamp.write_text(wanted)
    return folder


def _uv(*arguments: object) -> str:
    """Runs uv and returns what it prints. Raises CalledProcessError with its errors, and TimeoutExpired."""
    command = [_uv_itself() / "bin" / "uv", "--quiet", *arguments]
    return _run(command, {**os.environ, "UV_PYTHON_DOWNLOADS": "never", **_indexes()})


def _uv_itself() -> Path:
    def make(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", folder])
        _pip("--python", folder / "bin" / "python", "install", UV)

    return _made("uv", (UV,), make)


@functools.cache
def _indexes() -> dict[str, str]:
    """Returns the variables for uv that say what pip's configuration says, its own variables first."""
    said = dict(line.split("=", 1) for line in _pip("config", "list").splitlines() if "=" in line)
    values = {
        variable: ast.literal_eval(said[f"{section}.{option}"])
        for option, variable in PIP_OPTIONS.items()
        for section in ("global", "install", ":env:")  # the later ones count
        if f"{section}.{option}" in said
    }
    # As with pip no index comes before another.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match"} | {name: " ".join(text.split()) for name, text in values.items()}


def _pip(*arguments: object) -> str:
    return _run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments])


def _run(command: list[object], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, timeout=600, env=environment
    )
    return done.stdout
