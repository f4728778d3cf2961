"""Packages that tests run against and that the project does not need: each set in a folder of its own, made once.

They are kept beside .venv under names that git ignores. Where no index can be reached the test is skipped and says so.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def folder_with(name: str, *pins: str) -> Path:
    """A folder for PYTHONPATH with these packages, without what they depend on."""
    return _made(name, pins, lambda folder: _pip(sys.executable, "install", "--no-deps", "--target", folder, *pins))


def environment_with(name: str, *pins: str) -> Path:
    """A virtual environment with these packages and what they depend on, on top of those of .venv."""

    def make(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        site = folder / "lib" / Path(sysconfig.get_path("purelib")).parent.name / "site-packages"
        (site / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        _pip(folder / "bin" / "python", "install", *pins)

    return _made(name, pins, make)


def _made(name: str, pins: tuple[str, ...], make) -> Path:
    folder = ROOT / f".venv-{name}"
    wanted = hashlib.sha256(repr(pins).encode()).hexdigest()
    stamp = folder / "installed"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            make(folder)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"pip could not install {', '.join(pins)}: {(error.stderr or '').strip()[-300:]}")
        stamp.write_text(wanted)
    return folder


def _pip(python: Path | str, *arguments: object) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
