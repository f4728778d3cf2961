"""What the sandbox promises less of on this machine (README, "Host silence"), for the tests that it concerns."""

from __future__ import annotations

import asyncio
import os

import pytest

from sandbox.host.cgroup import Cgroups, open_groups

_groups = open_groups()
CGROUPS = isinstance(_groups, Cgroups)
if isinstance(_groups, Cgroups):
    _groups.close()
OWN_IDS = os.geteuid() == 0
needs_cgroups = pytest.mark.skipif(not CGROUPS, reason="no control groups: nothing bounds a call as a whole")
needs_own_ids = pytest.mark.skipif(not OWN_IDS, reason="an ordinary user has one id: it is 0 inside, and all calls'")


def news(stderr: str) -> list[str]:
    """The lines but the warning of a weaker jail."""
    return [line for line in stderr.splitlines() if "WEAKER JAIL" not in line]


async def next_news(stderr: asyncio.StreamReader | None) -> str:
    assert stderr is not None
    while not (found := news((await stderr.readline()).decode())) and not stderr.at_eof():
        pass
    return "".join(found)
