"""SIGTERM reaches a node that has not begun yet, in the middle of imports."""

from contextlib import suppress

import pytest

from engine.commands import node


def import_of_a_library():
    with suppress(Exception):  # as libraries do around their optional imports
        node._leave(15, None)


def test_no_library_takes_sigterm_for_an_error_of_its_own():
    with pytest.raises(BaseException, match="has left"):
        import_of_a_library()
