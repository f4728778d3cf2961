"""What must be equal on all machines of a run: versions of packages, and our own sources."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.nodes.messages import PROTOCOL, Build
from engine.recipe import ROOT, name_of
from engine.run.run_folder import versions

_FOLDERS = ("engine", "sandbox", "algo", "recipes")


def build_of(recipe: Path) -> Build:
    """Returns the build of this machine. recipe: its file, which counts even if it lies outside of our folders."""
    packages = {name: str(version) for name, version in versions().items() if name != "platform"}
    return Build(protocol=PROTOCOL, code=_code(recipe), versions=packages)


def _code(recipe: Path) -> str:
    digest = hashlib.sha256()
    files = [file for folder in _FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    for file in [*files, recipe]:
        digest.update(name_of(file).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
