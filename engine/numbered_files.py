"""Finds the files with a number in their name, in a folder that may hold others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MOST_DIGITS = 18
PLACE = "{:06d}"


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Returns {number: path}, ascending, of the files named exactly as `pattern` says; empty if there is no folder.

    Other names, such as those of a copy ("step-000005 (copy).rec") or a draft, are left out.

    >>> [path.name for path in numbered(Path("record/steps"), "step-{:06d}.rec").values()]
    []
    """
    before, after = pattern.split(PLACE)
    paths = {}
    with suppress(OSError):
        for path in folder.iterdir():
            digits = path.name.removeprefix(before).removesuffix(after)
            if digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS:
                number = int(digits)
                if path.name == pattern.format(number):
                    paths[number] = path
    return dict(sorted(paths.items()))
