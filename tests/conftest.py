"""What all tests share: markers by folder, and what a test may ask for."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox import Sandbox, SandboxConfig
from sandbox.printable import printable
from tests.support.examples import load_profiles
from tests.support.runs import Run

load_profiles()

MARKED = {"real", "hostile", "slow"}
CONVERTED = tempfile.TemporaryDirectory(prefix="rocstar-datasets-")
os.environ["HF_DATASETS_CACHE"] = CONVERTED.name  # `datasets` reads it when it is imported


# What a test starts inherits which signals are ignored. Shells ignore SIGINT in what runs in the background, and nohup
# SIGHUP.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


def pytest_unconfigure(config: pytest.Config) -> None:
    CONVERTED.cleanup()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return  # one of several processes, whose tests the first one reports
    for report in [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]:
        print(f"{report.outcome} in {report.when}: {report.nodeid}")  # short, and the last lines that a log has


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A folder's name is the marker of what lies in it."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in MARKED:
            item.add_marker(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes what a test printed and logged printable: halves of surrogate pairs do not get from process to process."""
    report = yield
    report.sections = [(title, printable(text)) for title, text in report.sections]
    return report


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What was imported so far stays out of collections: the stage that learns makes one in each step."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def started() -> Iterator[list[Run]]:
    """Put in here what a test starts; nothing of it outlives the test."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.end_now()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    """One sandbox for a test module (real nsjail)."""
    async with Sandbox(SandboxConfig(slots=4)) as sandbox:
        yield sandbox
