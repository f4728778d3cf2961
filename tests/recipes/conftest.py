from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recipes.runs import Run


@pytest.fixture
def started() -> Iterator[list[Run]]:
    """Put in here what a test starts; nothing of it outlives the test."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.end_now()
