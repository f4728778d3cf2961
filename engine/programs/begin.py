"""What every program does first."""

from __future__ import annotations

import signal

from engine.process import streams
from engine.replica.config import prepare_environment
from sandbox.printable import print_logs


def begin() -> None:
    """Makes standard streams and logs safe, and SIGUSR1 harmless until a run answers it; prepares for torch and vLLM.

    A write to a stream that nobody reads any more ends nothing. To ask a run too early what it waits for
    (`engine.telemetry.watchdog`) is no death; the signal is not ignored, since children would inherit that.
    """
    streams.prepare_descriptors()
    streams.outlive_readers()
    print_logs()
    prepare_environment()  # before a recipe's own code imports torch
    signal.signal(signal.SIGUSR1, lambda *_: None)
