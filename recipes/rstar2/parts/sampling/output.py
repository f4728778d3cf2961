"""Opens the folder of a job that can be resumed, and hashes what decides its rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from engine.atomic_files import write_whole, writing
from engine.errors import BadInput
from engine.run.identity import Identity, describe


def open_output(folder: Path, identity: Identity) -> None:
    """Makes the folder of a job, or goes on with it. Raises BadInput where it holds rows of a job of other values."""
    path = folder / "config.json"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not any(rows.stat().st_size for rows in folder.glob("*.jsonl")):  # no job has written a row
            write_whole(path, [msgspec.json.format(msgspec.json.encode(identity.values), indent=2), b"\n"])
            return
    try:
        there = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadInput(f"{path} is damaged: {error}. Fix: remove {folder}, or give another output=") from error
    if differences := identity.differences(there):
        changed = describe(differences)
        raise BadInput(f"output: {folder} holds another job, which differs in {changed}. Fix: another output=")


def fingerprint(model: Path) -> str:
    """Hashes a checkpoint's weights: the size and the first and last megabyte of each file.

    Training changes them all.
    """
    digest = hashlib.blake2b(digest_size=16)
    piece = 1 << 20
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size} ".encode())
            digest.update(file.read(piece))
            file.seek(max(0, size - piece))
            digest.update(file.read(piece))
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Hashes a file, or all files of a folder in the order of their names."""
    digest = hashlib.sha256()
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file():
            with each.open("rb") as file:
                while piece := file.read(1 << 22):
                    digest.update(piece)
    return digest.hexdigest()
