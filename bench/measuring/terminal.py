"""What benches and commands write on a terminal: progress, tables, and the paths of what they draw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def say(text: str) -> None:
    """Writes a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, 160 columns wide where stdout is no terminal."""
    printed = Table(*header, title=title or None)
    for row in rows:
        printed.add_row(*row)
    (Console() if sys.stdout.isatty() else Console(width=160)).print(printed)


def written(path: Path, write: Callable[[Path], object]) -> str:
    """Writes a file that a bench can do without. Returns its path, or why it could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        return f"not written: {error}"
    return str(path)
