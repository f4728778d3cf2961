"""What a terminal would obey is shown, not sent."""

from __future__ import annotations

import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.printable import one_line, print_logs, printable

ORDERS = {
    "clear": "\x1b[2J",
    "title": "\x1b]0;mine\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "C1 CSI": "\x9b2J",
    "C1 OSC": "\x9d0;mine\x9c",
    "back": "no\x08\x08yes\r",
    "delete": "\x7f",
    "override": "\u202etxt.exe",
    "isolate": "\u2066a\u2069",
    "marks": "\u200e\u200f\u061c",
}


@pytest.mark.parametrize("text", ORDERS.values(), ids=ORDERS)
def test_orders_to_a_terminal_are_escapes(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert "\\x" in shown or "\\u" in shown


@given(st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_nothing_else_changes(text: str) -> None:
    shown = printable(text)
    assert not any(unicodedata.category(each) in ("Cc", "Cs") and each not in "\n\t" for each in shown)
    assert not any(
        unicodedata.bidirectional(each) in ("RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI") for each in shown
    )
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text
    assert "\n" not in one_line(text)


def test_a_plain_text_stays_as_it_is() -> None:
    text = "def f():\n\treturn 'é ∑ 👩‍🔬'\n"
    assert printable(text) == text


def test_what_is_logged_without_a_handler_is_printable() -> None:
    print_logs()
    assert logging.lastResort is not None
    try:
        raise ValueError("\x1b[2J")
    except ValueError as error:
        found = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "said \x9b%s", ("\x07",), found)
    line = logging.lastResort.format(record)
    assert line == printable(line)
    assert "ValueError: \\x1b[2J" in line
    logging.lastResort.setFormatter(None)
