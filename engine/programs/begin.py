"""Prepares the process of a program."""

from __future__ import annotations

import signal

from engine.process import streams
from engine.replica.config import prepare_environment
from sandbox.printable import print_logs


def begin() -> None:
    """Prepares standard streams, logs, SIGUSR1 and the environment of torch and vLLM. Programs call it first.

    A write to a stream that nobody reads any more does not end the process. SIGUSR1 does nothing until a run answers it
    (`engine.telemetry.watchdog`); it has a handler, since children would inherit that it is ignored.
    """
    streams.prepare_descriptors()
    streams.outlive_readers()
    print_logs()
    prepare_environment()  # before a recipe's own code imports torch
    signal.signal(signal.SIGUSR1, lambda *_: None)
