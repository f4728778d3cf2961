"""Files that carry a number in their name, in a folder where other things may lie."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MOST_DIGITS = 18
PLACE = "{:06d}"


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """{number: path}, ascending, of what is named exactly as `pattern` names it; nothing where there is no folder.

    A copy ("step-000005 (copy).rec"), a draft or a name with fewer digits is somebody else's.

    >>> [path.name for path in numbered(Path("record/steps"), "step-{:06d}.rec").values()]
    []
    """
    before, after = pattern.split(PLACE)
    found = {}
    with suppress(OSError):
        for path in folder.iterdir():
            digits = path.name.removeprefix(before).removesuffix(after)
            if digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS:
                number = int(digits)
                if path.name == pattern.format(number):
                    found[number] = path
    return dict(sorted(found.items()))
