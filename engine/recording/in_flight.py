"""Keeps the rollouts under way in a file of the run's folder, which the page and `rocstar rollouts` read.

Invariants
- The file is replaced every WRITE_S, as a whole and by a thread; the loop only takes the snapshot.
- It is for people who look: a disk that cannot take it is noted once, and the run goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.process.daemon_thread import DaemonThread
from engine.telemetry.in_flight import InFlight, Snapshot

NAME = "in_flight.json"
WRITE_S = 2.0
_encode = msgspec.json.Encoder().encode


class NotReadable(ValueError):
    """The file of a run cannot be read. The message is one line that says why."""


async def keep_written(
    run: Path,
    in_flight: InFlight,
    *,
    groups_per_step: int,
    note: Callable[[str], None],
    every_s: float = WRITE_S,
) -> None:
    """Writes until it is cancelled, and then once more: that nothing is under way.

    run: the run's folder. note: takes a line for the user.
    """
    thread, noted = DaemonThread("in-flight"), False

    def write() -> Callable[[], None]:
        snapshot = in_flight.snapshot(groups_per_step=groups_per_step)
        return lambda: _write(run / NAME, snapshot)

    try:
        while True:
            try:
                await thread.run(write())
            except OSError as error:
                if not noted:
                    note(f"cannot write {run / NAME}: {error.strerror}; rollouts under way are not shown")
                noted = True
            await asyncio.sleep(every_s)
    finally:
        thread.post(write())
        thread.close()


def _write(path: Path, snapshot: Snapshot) -> None:
    """Replaces the file. It does not wait for the disk: after a loss of power nobody needs it."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(_encode(snapshot))
    draft.replace(path)


def read(run: Path) -> Snapshot | None:
    """Returns what a run wrote last, None if it wrote nothing. Raises NotReadable."""
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=Snapshot)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise NotReadable(f"{run / NAME} cannot be read: {error}") from error
