"""One sandbox for a test module (real nsjail)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from sandbox import Sandbox, SandboxConfig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(slots=4)) as sandbox:
        yield sandbox
