"""How thoroughly files are damaged: the tests of this folder take a sample, tests/slow every damage."""

import pytest


@pytest.fixture
def every():
    """One damage of so many is tried."""
    return 6
