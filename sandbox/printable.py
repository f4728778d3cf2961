"""Makes text of a model or a guest safe to print in a terminal, a log or an error.

A terminal obeys control characters: they move the cursor, set its title, fill the clipboard or hide what stood there
before. Marks of writing direction show a line in another order than it has. A file that is viewed later comes to a
terminal too, so the destination of the text does not matter.
"""

from __future__ import annotations

import logging
import re

# Control characters except newline and tab; separators that some programs take for a line break; marks of direction;
# halves of surrogate pairs, which no stream can encode.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Returns the text with escapes in place of what a terminal would obey.

    >>> printable("\x1b[2Jgone \u202efdp.exe\n")
    '\\x1b[2Jgone \\u202efdp.exe\n'
    """
    return UNPRINTABLE.sub(_escape, text)


def one_line(text: str) -> str:
    r"""Returns the text as `printable` does, but as one line of a log, where a newline would begin another entry.

    >>> one_line("first\nsecond")
    'first\\nsecond'
    """
    return printable(text).replace("\n", "\\n")


def print_logs() -> None:
    """Makes logs printable, tracebacks too, in a program that has set no handler of its own."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _escape(character: re.Match[str]) -> str:
    number = ord(character[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
