"""Shows text from elsewhere within rich's markup."""

from __future__ import annotations

from rich.markup import escape

from sandbox.printable import printable


def shown(text: str) -> str:
    """Returns markup that shows the text: nothing in it is a style of rich or an order to the terminal.

    >>> shown("[red]\\x1b[2J")
    '\\\\[red]\\\\x1b[2J'
    """
    return escape(printable(text))
