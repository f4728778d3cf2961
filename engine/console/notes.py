"""Lines about a run that its user should read: on the console, in notes.log and on the timeline."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from engine.run.run_folder import RunFolder, shortened
from engine.telemetry.timeline import Timeline
from sandbox.printable import printable


def say(console: Console, line: str) -> None:
    """Prints a line as it is, control characters as escapes."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """Writes each line that it is called with to all three."""

    run: RunFolder
    console: Console
    timeline: Timeline

    def __call__(self, line: str) -> None:
        line = shortened(line)
        self.timeline.instant("fleet", line)
        self.run.note(line)
        say(self.console, line)
