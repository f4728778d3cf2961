"""Programs that benches run."""

import signal
import sys

import pytest

from bench.measuring.processes import child


def test_a_program_does_not_outlive_the_block_that_runs_it():
    with pytest.raises(KeyboardInterrupt), child([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGTERM
