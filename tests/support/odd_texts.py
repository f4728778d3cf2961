"""Texts as nobody writes them: of a model, a guest or a client. For the fuzz tests of what reads them."""

import time
from collections.abc import Callable
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
BUSY_S = 0.05  # the most that the event loop may stand still for a text

# what is special somewhere: to Python, to a traceback, to JSON, to chat templates, to a terminal, to LaTeX, to regexes
ATOMS = (
    *"\n\r\t\v\f\0 \"'\\#()[]{}<>=,.:;*+-/%&|^@!~`$_aA0é𝟘",
    *("\x1b[2J", "\x1b]0;t\x07", "\x7f", "\x85", "\x9b", "\u2028", "\u202e", "\u200b", "\ufeff", "\U000e0041"),
    *("import ", "from ", "import .", "from . import ", "import a, ", " as ", "yield", "async ", "lambda: ", "coding:"),
    *(
        "Traceback (most recent call last):\n",
        '  File "a", line 1',
        "\n  File",
        "Error: ",
        "^^^",
        "  | ",
        "  +-+--- 1 ---",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        '{"name": "python", "arguments": {"code": "',
        '"}}',
        '\\"',
        "\\u0041",
        "\\ud800",
    ),
    *(
        "<answer>",
        "</answer>",
        "\\boxed{",
        "\\frac",
        "\\text{",
        "1e999",
        "NaN",
        "9" * 30,
        '"""',
        "'''",
        "\\\n",
        "=\n",
        "((",
        "[[",
    ),
)

_pieces = st.lists(st.sampled_from(ATOMS), min_size=1, max_size=3).map("".join)
REPEATED = st.tuples(_pieces, st.integers(1, 2000)).map(lambda drawn: (drawn[0] * drawn[1])[:2000])
"""A few atoms, again and again, up to 2,000 characters: what makes a regex walk back and forth."""

MIXED = st.lists(st.one_of(st.sampled_from(ATOMS), st.text(max_size=5)), max_size=40).map("".join)
ODD_TEXTS = st.one_of(REPEATED, MIXED, st.text(max_size=200))


def in_no_time(work: Callable[[], T]) -> T:
    """What `work` returns, once it took less than BUSY_S of this thread's CPU: a collection of garbage may come in
    between, so it has three tries.
    """
    for _ in range(3):
        began = time.thread_time()
        found = work()
        if time.thread_time() - began < BUSY_S:
            return found
    raise AssertionError(f"it takes more than {BUSY_S} s of CPU")
