"""Keeps the rollouts under way in a file of the run's folder, which the page and `rocstar rollouts` read.

Invariants
- The file is replaced every WRITE_S, whole, by a thread; the loop only takes the snapshot.
- It is for people who look: a disk that cannot take it is noted once, and the run goes on.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.telemetry.in_flight import InFlight, Snapshot

NAME = "in_flight.json"
WRITE_S = 2.0
_encode = msgspec.json.Encoder().encode


class NotReadable(ValueError):
    """The file of a run cannot be read. The message is one line that says why."""


async def keep_written(run: Path, in_flight: InFlight, *, groups_per_step: int, note: Callable[[str], None]) -> None:
    """Writes until it is cancelled, and then once more: that nothing is under way.

    run: the run's folder. note: takes a line for the user.
    """
    written = True
    try:
        while True:
            snapshot = in_flight.snapshot(groups_per_step=groups_per_step)
            try:
                await asyncio.to_thread(_write, run / NAME, snapshot)
                written = True
            except OSError as error:
                if written:
                    note(
                        f"cannot write {run / NAME}: {error.strerror}; the run goes on, and its rollouts are not shown"
                    )
                written = False
            await asyncio.sleep(WRITE_S)
    finally:
        with suppress(OSError):
            _write(run / NAME, in_flight.snapshot(groups_per_step=groups_per_step))


def _write(path: Path, snapshot: Snapshot) -> None:
    """Replaces the file. It does not wait for the disk: after a loss of power nobody needs it."""
    draft = path.with_name(f".{path.name}.{threading.get_ident()}.draft")  # the last one may meet the one before
    draft.write_bytes(_encode(snapshot))
    os.replace(draft, path)


def read(run: Path) -> Snapshot | None:
    """Returns what a run wrote last, None if it wrote nothing. Raises NotReadable."""
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=Snapshot)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise NotReadable(f"{run / NAME} cannot be read: {error}") from error
