"""A unit test starts no process and opens no connection: those that do belong to tests/real."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

FORBIDDEN = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect"}
met: list[str] = []


def note(event: str, _: tuple[object, ...]) -> None:
    if event in FORBIDDEN:
        met.append(event)


sys.addaudithook(note)  # it cannot be taken away again


@pytest.fixture(autouse=True)
def nothing_real() -> Iterator[None]:
    met.clear()
    yield
    assert met == [], "move this test to tests/real"
