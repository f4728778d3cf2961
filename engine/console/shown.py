"""Text of others between rich's markup."""

from __future__ import annotations

from rich.markup import escape

from sandbox.printable import printable


def shown(text: str) -> str:
    """The text as markup that shows it: nothing in it is a style of rich or an order to the terminal.

    >>> shown("[red]\\x1b[2J")
    '\\\\[red]\\\\x1b[2J'
    """
    return escape(printable(text))
